"""Batches of other shapes than the first: each flows alone, values are those of the replay, limits
hold.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe

PARAMS = [np.eye(4, dtype=np.float32)] * 3


def loss_fn(params: list[jax.Array], batch: jax.Array, rng: jax.Array) -> jax.Array:
    for w in params:
        batch = jnp.tanh(batch @ w)
    return jnp.mean(batch**2)


def batch(size: int) -> np.ndarray:
    return np.random.default_rng(size).normal(size=(size, 4)).astype(np.float32)


def pipeline(
    schedule: str = "1f1b", limit: int | None = None, stages: int | jvpipe.Plan = 3
) -> jvpipe.Pipeline:
    return jvpipe.Pipeline(
        loss_fn, optax.sgd(0.1), stages, 4, schedule, planner="even", memory_limit=limit
    )


def test_a_stream_takes_batches_of_other_shapes() -> None:
    pipe, batches = pipeline("pipedream"), [batch(n) for n in (8, 16, 8, 8, 16)]
    *_, (state, _) = pipe.run(pipe.init(PARAMS, batches[0], None), batches)
    again, losses = jvpipe.replay(pipe.ledger, pipe, PARAMS, batches, None)
    for ours, theirs in zip(pipe.params(state), again, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len(losses) == 4 * len(batches)


def test_a_larger_batch_over_the_limit_is_refused_and_the_state_is_whole() -> None:
    first = pipeline()
    state, _ = first.step(first.init(PARAMS, batch(8), None), batch(8))
    limit = max(first.ledger.peak_bytes.values())
    pipe = pipeline(limit=limit)
    state = pipe.init(PARAMS, batch(8), None)
    with pytest.raises(jvpipe.MemoryLimitExceeded, match=f"the limit is {limit:,}") as refused:
        pipe.step(state, batch(80))
    pipe.step(state, batch(8))
    assert max(pipe.ledger.peak_bytes.values()) <= limit
    enough = pipeline(limit=refused.value.smallest_limit_bytes)
    enough.step(enough.init(PARAMS, batch(8), None), batch(80))


def test_a_larger_batch_keeps_the_limit_under_the_plan_that_layers_move_to_before_it() -> None:
    plans = [jvpipe.Plan.from_cuts(cuts) for cuts in ([1, 1, 1], [3])]
    pipe = pipeline(stages=plans[0])
    state, _ = pipe.step(pipe.init(PARAMS, batch(8), None), batch(32))
    pipe = pipeline(stages=plans[0], limit=max(pipe.ledger.peak_bytes.values()))
    state = pipe.migrate(pipe.init(PARAMS, batch(8), None), plans[1], at=(0, 2))
    with pytest.raises(jvpipe.MemoryLimitExceeded) as refused:
        pipe.step(state, batch(32))
    state, _ = pipe.step(state, batch(8))
    assert pipe.plan.cuts == (3,)
    enough = pipeline(stages=plans[0], limit=refused.value.smallest_limit_bytes)
    enough.step(enough.migrate(enough.init(PARAMS, batch(8), None), plans[1], at=(0, 2)), batch(32))
