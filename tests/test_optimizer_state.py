"""The optimizer's state as optax would have it: read, evaluated with, written."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.runtime.engine.tensors import Limits
from tests.grid import grid

D, MICRO, STEPS = 4, 2, 3


def averaged(
    inner: optax.GradientTransformation, decay: float = 0.5
) -> optax.GradientTransformation:
    """Keeps a running mean of the parameters beside what another optimizer keeps."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, first = inner.update(updates, state[0], params)
        new = optax.apply_updates(params, updates)
        return updates, (
            first,
            jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state[1], new),
        )

    return optax.GradientTransformation(lambda params: (inner.init(params), params), update)


def kinds(params: Any) -> Any:
    return {name: "one" if name == "blocks" else "two" for name in params}


OPTIMIZERS = {
    "ema": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "averaged": averaged(optax.sgd(0.1, momentum=0.9)),
    "schedule_free": optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(
        learning_rate=lambda n: 1e-2 / (1 + n)
    ),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "multi_transform": optax.multi_transform(
        {"one": optax.adam(1e-2), "two": optax.sgd(0.1, momentum=0.9)}, kinds
    ),
    "masked": optax.masked(optax.adam(1e-2), {"blocks": True, "head": False}),
}


def params() -> dict[str, Any]:
    scale = np.arange(1, 4, dtype=np.float32)[:, None, None]
    return {
        "blocks": {
            "w": 0.2 * scale * np.eye(D, dtype=np.float32),
            "b": np.zeros((3, D), np.float32),
        },
        "head": 0.1 * np.ones((D, 2), np.float32),
    }


def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
    """Three layers stacked for a scan, and one more."""
    x, _ = jax.lax.scan(
        lambda x, p: (jnp.tanh(x @ p["w"] + p["b"][None]), None), batch, params["blocks"]
    )
    return jnp.mean((x @ params["head"] - 1) ** 2)


def batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(2 * MICRO, D)).astype(np.float32)


def trained(
    optimizer: Any, schedule: str = "1f1b", **options: Any
) -> tuple[jvpipe.Pipeline, jvpipe.State]:
    pipe = jvpipe.Pipeline(loss_fn, optimizer, 2, MICRO, schedule, planner="even", **options)
    state = pipe.init(params(), batch(0), None)
    for newest, _ in pipe.run(state, map(batch, range(STEPS))):
        state = newest
    return pipe, state


def alone(optimizer: Any) -> tuple[Any, Any]:
    """What optax makes of the same batches without a pipeline."""

    @jax.jit
    def step(found: Any, state: Any, batch: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss_fn)(found, batch, None), state, found)
        return optax.apply_updates(found, updates), state

    found, state = params(), optimizer.init(params())
    for i in range(STEPS):
        found, state = step(found, state, batch(i))
    return found, state


@pytest.mark.parametrize(
    "name", grid(OPTIMIZERS, "schedule_free", "inject_hyperparams", "multi_transform")
)
def test_it_is_what_optax_has(name: str) -> None:
    pipe, state = trained(OPTIMIZERS[name])
    ours, (_, theirs) = pipe.optimizer_state(state), alone(OPTIMIZERS[name])
    assert len(pipe.session.graph.layers) == 4
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert isinstance(a, np.ndarray)
        assert (a.shape, a.dtype) == (np.shape(b), b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["averaged", "schedule_free"])
def test_parameters_made_of_it_are_evaluated(name: str) -> None:
    pipe, state = trained(OPTIMIZERS[name])
    before, live = jax.tree.leaves(pipe.params(state)), list(pipe.ledger.live)
    inner = pipe.optimizer_state(state)
    made = (
        optax.contrib.schedule_free_eval_params(inner, pipe.params(state))
        if name == "schedule_free"
        else inner[1]
    )
    held_out = batch(7)
    found = float(pipe.evaluate(state, held_out, params=made)["loss"])
    assert found == pytest.approx(float(loss_fn(made, held_out, None)), rel=1e-5)
    assert found != pytest.approx(float(pipe.evaluate(state, held_out)["loss"]), rel=1e-3)
    own = pipe.evaluate(state, held_out, params=pipe.params(state))["loss"]
    np.testing.assert_array_equal(own, pipe.evaluate(state, held_out)["loss"])
    assert pipe.ledger.live == live
    for ours, theirs in zip(jax.tree.leaves(pipe.params(state)), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_parameters_that_lie_beside_others_count_for_the_limit() -> None:
    pipe, state = trained(optax.sgd(0.1))
    alone = max(peak.bytes for peak in pipe.session.compiled.evaluation_peaks)
    pipe.session.limits = Limits(alone)
    pipe.evaluate(state, batch(0))
    with pytest.raises(jvpipe.MemoryLimitExceeded, match="given parameters") as refused:
        pipe.evaluate(state, batch(0), params=pipe.params(state))
    assert refused.value.smallest_limit_bytes > alone
    pipe.session.limits = Limits(refused.value.smallest_limit_bytes)
    pipe.ledger.peak[:] = pipe.ledger.live
    pipe.evaluate(state, batch(0), params=pipe.params(state))
    assert max(pipe.ledger.peak_bytes.values()) == refused.value.smallest_limit_bytes


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_an_injected_learning_rate_is_written(schedule: str) -> None:
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    pipe, state = trained(optimizer, schedule)
    assert bool(state.stream_steps) == (schedule == "pipedream")
    found = pipe.optimizer_state(state)
    found.hyperparams["learning_rate"] = 0.0
    state = pipe.with_optimizer_state(state, found)
    before, live = jax.tree.leaves(pipe.params(state)), list(pipe.ledger.live)
    for newest, _ in pipe.run(state, [batch(1), batch(2)]):
        state = newest
    assert state.step == STEPS + 2
    for ours, theirs in zip(jax.tree.leaves(pipe.params(state)), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert float(pipe.optimizer_state(state).hyperparams["learning_rate"]) == 0
    assert pipe.ledger.live == live


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_a_state_in_flight_that_is_written_back_as_it_was_changes_nothing(schedule: str) -> None:
    """Stages have made updates of their own number; the tree has room for one count."""
    runs = []
    for written in (False, True):
        pipe, state = trained(optax.adam(1e-2), schedule)
        if written:
            state = pipe.with_optimizer_state(state, pipe.optimizer_state(state))
        for newest, _ in pipe.run(state, [batch(3), batch(4)]):
            state = newest
        runs.append(jax.tree.leaves(pipe.params(pipe.drain(state))))
    for once, again in zip(*runs, strict=True):
        np.testing.assert_array_equal(once, again)


def test_trees_of_another_kind_are_refused() -> None:
    pipe, state = trained(OPTIMIZERS["ema"])
    found = pipe.params(state)
    for bad, message in (
        ({"blocks": found["blocks"]}, "params: 'head' is missing, it must be float32"),
        (
            found | {"head": found["head"][:, :1]},
            r"params: 'head' is float32\[4, 1\], it must be float32\[4, 2\]",
        ),
        (
            found | {"tail": found["head"]},
            "params: there is no 'tail' in the tree of this pipeline",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            pipe.evaluate(state, batch(0), params=bad)
    with pytest.raises(ValueError, match="the optimizer's state: '0/0/count' is missing"):
        pipe.with_optimizer_state(state, ())
    assert np.isfinite(pipe.evaluate(state, batch(0))["loss"])
