"""One plan holds for every shape of batch, and a run of the same model keeps it."""

import jax
import numpy as np
import pytest

import jvpipe
from jvpipe.runtime.engine.training_state import given_leaves
from jvpipe.session.compiled_plans import CompiledPlans
from tests.session.tiny import BATCH, HERE, PARAMS, THERE, begun

LARGER = {"x": np.ones((8, 2), np.float32)}


@pytest.fixture(scope="module")
def pipe() -> jvpipe.Pipeline:
    return begun(schedule="pipedream")[0]


def for_run(pipe: jvpipe.Pipeline, params: list[np.ndarray]) -> CompiledPlans:
    return pipe.session.compiled_plans.for_run(
        params, BATCH, None, None, lambda stacks: given_leaves(params)
    )


def test_before_a_model_is_traced_there_is_none() -> None:
    plans = CompiledPlans(pipe_settings := begun()[0].session.settings, begun()[0].session.store)
    assert not plans
    assert plans.settings is pipe_settings
    with pytest.raises(ValueError, match="no model yet"):
        plans.for_batch(BATCH)


def test_a_new_shape_runs_the_same_layers_under_the_same_plan(pipe: jvpipe.Pipeline) -> None:
    plans = pipe.session.compiled_plans
    larger = plans.for_batch(LARGER)
    assert larger is plans.for_batch(LARGER)
    assert larger is not plans.current
    assert larger.plan == plans.current.plan
    assert [layer.name for layer in larger.traced.graph.layers] == [
        x.name for x in plans.current.traced.graph.layers
    ]


def test_a_plan_that_is_adopted_holds_for_every_shape(pipe: jvpipe.Pipeline) -> None:
    plans = for_run(pipe, PARAMS)
    plans.for_batch(LARGER)
    plans.adopt(plans.with_plan(THERE))
    assert [compiled.plan.cuts for compiled in plans] == [THERE.cuts] * 2
    assert plans.for_batch(BATCH) is plans.current


def test_a_run_of_the_same_model_keeps_plan_and_states_and_another_one_does_not(
    pipe: jvpipe.Pipeline,
) -> None:
    plans = pipe.session.compiled_plans
    same, other = for_run(pipe, PARAMS), None
    assert (same.model_id, same.current.plan) == (plans.model_id, plans.current.plan)
    with pytest.raises(ValueError, match="the plan"):  # that was given for three layers
        other = for_run(pipe, PARAMS[:2])
    assert other is None


def test_the_parameters_of_a_run_are_given_once(pipe: jvpipe.Pipeline) -> None:
    plans = for_run(pipe, PARAMS)
    leaves = plans.take_leaves()
    assert sorted(leaves) == [("parameter", 0), ("parameter", 1), ("parameter", 2)]
    device = jax.devices()[0]
    np.testing.assert_array_equal(leaves["parameter", 1].make(device, ()), PARAMS[1])
    assert plans.take_leaves() == {}


def test_a_stream_is_compiled_again_with_the_plans_that_it_came_from(pipe: jvpipe.Pipeline) -> None:
    plans = for_run(pipe, PARAMS)
    spans = [
        (0, THERE.with_schedule("pipedream").to_json()),
        (5, HERE.with_schedule("pipedream").to_json()),
    ]
    compiled = plans.from_spans(spans)
    assert [(span.start, span.layout.plan.cuts) for span in compiled.spans] == [
        (0, THERE.cuts),
        (5, HERE.cuts),
    ]
    assert compiled.plan == plans.current.plan
    assert plans.from_spans(spans[1:]) is plans.current, (
        "of one plan alone nothing need be compiled"
    )
