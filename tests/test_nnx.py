"""Modules of NNX with dropout and batch norm are trained as one device trains them, cut
anywhere.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jvpipe
import jvpipe.nnx

KEY = jax.random.key(0)
BATCH = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
M = 4


class Net(nnx.Module):
    """Two layers, each with a norm of the batch and dropout."""

    def __init__(self, rngs: nnx.Rngs, share: float = 0.5) -> None:
        self.maps = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])
        self.norms = nnx.List([nnx.BatchNorm(8, momentum=0.9, rngs=rngs) for _ in range(4)])
        self.dropout = nnx.Dropout(share, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for each, norm in zip(self.maps, self.norms, strict=True):
            x = x + self.dropout(jnp.tanh(norm(each(x))))
        return x


def squares(module: Any, batch: Any) -> Any:
    return jnp.mean((module(batch) - 1) ** 2)


def trained(stages: int, steps: int = 2) -> tuple[Any, Any, Any]:
    made = jvpipe.nnx.loss(Net, squares)
    pipe = jvpipe.Pipeline(
        made, optax.adam(1e-2), stages=stages, microbatches=M, has_state=True, planner="even"
    )
    state = pipe.init(made.init, BATCH, KEY, made.model_state(KEY))
    losses = []
    for _ in range(steps):
        state, metrics = pipe.step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return losses, pipe.params(state), pipe.model_state(state)


def test_cuts_change_no_bit_and_statistics_are_kept() -> None:
    one, two = trained(1), trained(2)
    jax.tree.map(np.testing.assert_array_equal, one, two)
    _, _, statistics = two
    fresh: Any = jvpipe.nnx.loss(Net, squares).model_state(KEY)
    assert jax.tree.structure(statistics) == jax.tree.structure(fresh)
    assert not np.array_equal(statistics["norms"][0]["mean"], fresh["norms"][0]["mean"])


def test_statistics_are_those_of_a_loop_of_nnx() -> None:
    """Without dropout the module itself, called on each micro-batch in turn, comes to the same."""
    build = lambda rngs: Net(rngs, share=0.0)  # noqa: E731
    made = jvpipe.nnx.loss(build, squares)
    params, statistics = made.init(KEY), made.model_state(KEY)
    module = build(nnx.Rngs(KEY))
    for part in np.split(BATCH, M):
        expected = squares(module, part)
        found, statistics = made(params, statistics, part, KEY)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    theirs = nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), statistics, theirs)


def test_dropout_follows_the_key_and_ends_without_one() -> None:
    made = jvpipe.nnx.loss(Net, squares)
    params, statistics = made.init(KEY), made.model_state(KEY)
    of = lambda key: float(made(params, statistics, BATCH, key)[0])  # noqa: E731
    assert of(jax.random.key(1)) == of(jax.random.key(1)) != of(jax.random.key(2))
    module = Net(nnx.Rngs(KEY))
    module.eval()
    assert of(None) == pytest.approx(float(squares(module, BATCH)))
    _, kept = made(params, statistics, BATCH, None)
    jax.tree.map(np.testing.assert_array_equal, kept, statistics)
    trained_module = made.module(params, statistics)
    np.testing.assert_array_equal(trained_module(BATCH), module(BATCH))
