"""A given plan is taken as it is, and refused where it does not fit."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jvpipe
from jvpipe.schedules import PipeMare
from jvpipe.session.model_planner import compile_plan
from tests.bits import MICRO, batches_of
from tests.session.tiny import BATCH, HERE, PARAMS, THERE, begun, pipeline
from tests.zoo import CASES


def test_a_given_plan_is_compiled_with_the_users_fates_and_nothing_is_planned() -> None:
    pipe, _ = begun(HERE, fates={"*": "recompute"})
    assert pipe.session.compiled_plans.planned is None
    assert pipe.plan.cuts == HERE.cuts
    assert {fate for stage in pipe.plan.stages for fate in stage.fates.values()} == {"recompute"}


def test_a_planned_plan_comes_with_what_it_was_decided_on() -> None:
    pipe, _ = begun(2)
    assert pipe.session.compiled_plans.planned is not None
    assert pipe.session.compiled_plans.planned.plan.cuts == pipe.plan.cuts
    assert pipe.session.compiled_plans.planned.layer_s is None, "an even cut asks for no seconds"


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match="4 stages need at least as many layers, but the model has 3: use at most 3 stages",
    ):
        pipeline(4, devices=None).init(PARAMS, BATCH, None)


def test_a_plan_for_other_layers_is_refused() -> None:
    session = begun()[0].session
    compiled = session.compiled
    wrong = jvpipe.Plan.from_cuts([2, 1], splits=[1])
    for plan, told in (
        (wrong, "splits layers before equations"),
        (jvpipe.Plan.from_cuts([2, 2]), "they must have layers 0 to 2"),
    ):
        with pytest.raises(ValueError, match=told):
            compile_plan(session.settings, session.store, compiled.traced, plan, compiled.optimizer)
    plan = THERE.with_schedule("1f1b")
    assert (
        compile_plan(
            session.settings, session.store, compiled.traced, plan, compiled.optimizer
        ).plan
        == plan
    )


def test_model_state_that_goes_from_a_late_layer_to_an_early_one_stays_on_one_stage() -> None:
    def loss_fn(params: Any, state: Any, batch: Any, rng: Any) -> tuple[jax.Array, Any]:
        x = batch + state
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2), 0.9 * state + 0.1 * jnp.mean(x)

    def carrying(schedule: str, stages: Any = 2, planner: str = "jvpipe") -> jvpipe.Pipeline:
        options = {"planner": planner, "has_state": True, "microbatches": 2}
        return jvpipe.Pipeline(loss_fn, optax.sgd(0.1), stages, schedule=schedule, **options)

    params, batch, state = [jnp.eye(4)] * 4, jnp.ones((4, 4)), jnp.zeros(())
    cut = jvpipe.Plan.from_cuts([1, 1, 1, 1], devices=[0, 1, 0, 1])
    with pytest.raises(ValueError, match="reads the model state that layer 3 of stage 3 writes"):
        carrying("interleaved", cut).init(params, batch, None, state)
    with pytest.raises(ValueError, match="4 stages: layers that must share a stage leave 1 pieces"):
        carrying("interleaved", planner="even").init(params, batch, None, state)
    found = carrying("auto")
    found.init(params, batch, None, state)
    assert len(found.plan.stages) == 2


def test_the_synchronous_steps_before_a_stream_keep_the_limit_too() -> None:
    m = CASES["mlp"]()
    batches = batches_of(m)[:3]
    schedule = PipeMare(warmup_updates=2)

    def held(limit: int | None) -> int:
        pipe = jvpipe.Pipeline(m.loss_fn, optax.adamw(1e-2), 1, MICRO, schedule, memory_limit=limit)
        state = pipe.init(m.params, batches[0], m.rng)
        for batch in batches:
            state, _ = pipe.step(state, batch)
        pipe.drain(state)
        return max(pipe.ledger.peak_bytes.values())

    limit = int(0.75 * held(None))
    assert held(limit) <= limit
