"""Deferred batch norm remembers what torchgpipe's does, in a pipeline too; its formulas are written
down again here.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe import BatchStatistics, deferred_batch_norm
from tests.grid import grid

WIDTH, RATE, STEPS, MOMENTUM, EPSILON = 3, 0.5, 2, 0.1, 1e-5
Tree = Any


@dataclass
class DeferredBatchNorm:
    """torchgpipe/batchnorm.py: `_track`, `_commit` and `forward`, in NumPy."""

    chunks: int
    running_mean: np.ndarray = field(default_factory=lambda: np.zeros(WIDTH))
    running_var: np.ndarray = field(default_factory=lambda: np.ones(WIDTH))
    sum: Any = 0.0
    sum_squares: Any = 0.0
    counter: int = 0
    tracked: int = 0

    def track(self, x: np.ndarray) -> None:
        self.sum, self.sum_squares = self.sum + x.sum((0, 1)), self.sum_squares + (x**2).sum((0, 1))
        self.counter += x.size // WIDTH
        self.tracked += 1
        if self.tracked == self.chunks:
            mean = self.sum / self.counter
            var = self.sum_squares / self.counter - mean**2
            self.running_mean = self.running_mean * (1 - MOMENTUM) + mean * MOMENTUM
            self.running_var = self.running_var * (1 - MOMENTUM) + var * MOMENTUM
            self.sum, self.sum_squares, self.counter, self.tracked = 0.0, 0.0, 0, 0


def plain(x: jax.Array) -> jax.Array:
    """A micro-batch normalized by its own statistics."""
    mean, variance = jnp.mean(x, (0, 1), keepdims=True), jnp.var(x, (0, 1), keepdims=True)
    return (x - mean) / jnp.sqrt(variance + EPSILON)


def hidden(params: Tree, batch: jax.Array, norm: Any) -> jax.Array:
    for w in params:
        batch = batch + jnp.tanh(norm(batch @ w)) @ w.T
    return batch


def oracle(
    params: Tree, batches: list[np.ndarray], micro: int
) -> tuple[Tree, list[DeferredBatchNorm]]:
    """Plain gradient steps, with torchgpipe's layer told of what each norm was given."""

    @jax.jit
    def seen(params: Tree, x: jax.Array) -> tuple[list[jax.Array], Tree]:
        given: list[jax.Array] = []
        hidden(params, x, lambda y: given.append(y) or plain(y))
        return given, jax.grad(lambda p: jnp.mean(hidden(p, x, plain) ** 2))(params)

    norms = [DeferredBatchNorm(micro) for _ in params]
    params = [jnp.asarray(w) for w in params]
    for batch in batches:
        sums = [np.zeros((WIDTH, WIDTH), np.float32)] * len(params)
        for x in np.split(batch, micro):
            given, grads = seen(params, jnp.asarray(x))
            for norm, y in zip(norms, given, strict=True):
                norm.track(np.asarray(y, np.float64))
            sums = [s + g for s, g in zip(sums, grads, strict=True)]
        params = [w - RATE * jnp.asarray(g) / micro for w, g in zip(params, sums, strict=True)]
    return params, norms


def loss_of(micro: int) -> Any:
    def loss_fn(params: Tree, state: Tree, batch: jax.Array, rng: Any) -> tuple[jax.Array, Tree]:
        left, kept = list(state), []

        def norm(x: jax.Array) -> jax.Array:
            y, after = deferred_batch_norm(
                x, left.pop(0), micro, momentum=MOMENTUM, epsilon=EPSILON
            )
            kept.append(after)
            return y

        return jnp.mean(hidden(params, batch, norm) ** 2), kept

    return loss_fn


@pytest.mark.parametrize(
    ("micro", "options"),
    grid([(1, {}), (3, {}), (4, {"checkpoint": "always"})], (4, {"checkpoint": "always"})),
    ids=["one", "three", "four, recomputed"],
)
def test_running_statistics_are_those_of_whole_batches(micro: int, options: Any) -> None:
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(2)]
    batches = [rng.normal(1.0, 2.0, size=(12, 2, WIDTH)).astype(np.float32) for _ in range(STEPS)]
    pipe = jvpipe.Pipeline(
        loss_of(micro),
        optax.sgd(RATE),
        stages=2,
        microbatches=micro,
        planner="even",
        has_state=True,
        **options,
    )
    state = pipe.init(params, batches[0], None, [BatchStatistics.of(WIDTH)] * 2)
    *_, (state, _) = pipe.run(state, batches)
    wanted, norms = oracle(params, batches, micro)
    for ours, theirs in zip(pipe.params(state), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(pipe.model_state(state), norms, strict=True):
        np.testing.assert_allclose(ours.mean, theirs.running_mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(ours.variance, theirs.running_var, rtol=1e-4, atol=1e-5)
        assert (ours.seen, ours.items, list(ours.total)) == (0, 0, [0.0] * WIDTH)


def test_no_micro_batches_are_refused() -> None:
    with pytest.raises(
        ValueError, match="microbatches must be the pipeline's number, at least 1, not 0"
    ):
        deferred_batch_norm(jnp.ones((2, WIDTH)), BatchStatistics.of(WIDTH), 0)


def test_values_far_from_zero_keep_their_variance() -> None:
    """Squares of 1e4 and more say nothing of a variance of 1 in float32, except in the first
    batch.
    """
    x = 1e4 + np.random.default_rng(2).normal(size=(2, 64, WIDTH)).astype(np.float32)
    statistics = BatchStatistics.of(WIDTH)
    for half in (*x, *x):
        y, statistics = deferred_batch_norm(jnp.asarray(half), statistics, 2, momentum=1.0)
        np.testing.assert_allclose(np.std(y, axis=0), 1.0, atol=1e-3)
    np.testing.assert_allclose(statistics.mean, x.mean((0, 1)), rtol=1e-6)
    np.testing.assert_allclose(statistics.variance, x.var((0, 1)), rtol=1e-3)


@pytest.mark.parametrize("features", [True, -1, 0])
def test_features_are_a_whole_number(features: Any) -> None:
    with pytest.raises(ValueError, match="features must be a whole number of at least 1, not "):
        BatchStatistics.of(features)
