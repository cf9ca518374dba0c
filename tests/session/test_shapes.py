"""Batches of other shapes than the first: each flows alone, values are those of the replay, limits hold."""

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


def pipeline(schedule: str = "1f1b", limit: int | None = None) -> jvpipe.Pipeline:
    return jvpipe.Pipeline(loss_fn, optax.sgd(0.1), 3, 4, schedule, planner="even", memory_limit=limit)


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
