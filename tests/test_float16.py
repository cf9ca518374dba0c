"""Gradients that float16 loses are scaled: they come through, overflows are left out, and cuts
change no bit.
"""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
import jvpipe.float16

KEY = jax.random.key(0)
BATCH = {"x": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}
PARAMS = [jnp.eye(8) + 0.1 * i for i in range(4)]


def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
    """Whose gradients are about 1e-9 each."""
    x = batch["x"].astype(jnp.float16)
    for w in params:
        x = jnp.tanh(x @ w.astype(jnp.float16))
    return 1e-8 * jnp.mean(x.astype(jnp.float32) ** 2)


def trained(loss: Any, optimizer: Any, params: Any, stages: int = 2) -> Any:
    pipe = jvpipe.Pipeline(loss, optimizer, stages, 4, planner="even")
    state = pipe.init(params, BATCH, KEY)
    losses = []
    for _ in range(4):
        state, metrics = pipe.step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return losses, pipe.params(state)


def test_gradients_that_would_vanish_come_through() -> None:
    part = {"x": BATCH["x"][:2]}
    assert not any(np.any(g) for g in jax.grad(loss_fn)(PARAMS, part, None))  # 0 in float16
    made = jvpipe.float16.scaled(loss_fn, optax.sgd(1e6), scale=2.0**24)
    losses, params = trained(made, made.optimizer, made.init(PARAMS))
    assert losses[0] == pytest.approx(float(loss_fn(PARAMS, BATCH, None)), rel=1e-3)
    assert losses[-1] < 0.99 * losses[0]
    assert float(params["scale"]) == 2.0**24
    one = trained(made, made.optimizer, made.init(PARAMS), stages=1)
    jax.tree.map(np.testing.assert_array_equal, one, (losses, params))


def test_an_overflow_updates_nothing_and_halves_the_scale() -> None:
    def large(params: Any, batch: Any, rng: Any) -> Any:
        return 1e8 * loss_fn(params, batch, rng)

    made = jvpipe.float16.scaled(large, optax.adam(1e-2), scale=2.0**22, growth_updates=2)
    pipe = jvpipe.Pipeline(made, made.optimizer, 2, 4, planner="even")
    state = pipe.init(made.init(PARAMS), BATCH, KEY)
    scales, moved = [], []
    for _ in range(24):
        before = pipe.params(state)
        state, _ = pipe.step(state, BATCH)
        after = pipe.params(state)
        scales.append(float(after["scale"]))
        moved.append(not np.array_equal(before["params"][0], after["params"][0]))
    assert scales[0] == 2.0**21
    assert not moved[0]
    assert True in moved
    for i, (scale, after) in enumerate(pairwise(scales)):
        assert after in (scale / 2, scale, 2 * scale)
        assert moved[i + 1] == (after >= scale)
    assert any(after == 2 * scale for scale, after in pairwise(scales))
    for leaf in jax.tree.leaves(pipe.optimizer_state(state)):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize(
    ("gradient", "scale", "expected"),
    [(np.inf, 4.0, 2.0), (np.inf, 1.0, 1.0), (np.inf, 0.5, 0.5), (0.0, 2.0**127, 2.0**127)],
)
def test_the_scale_is_not_halved_below_one_nor_doubled_beyond_all_numbers(
    gradient: float, scale: float, expected: float
) -> None:
    optimizer = jvpipe.float16.scaled(loss_fn, optax.sgd(0.1), growth_updates=1).optimizer
    params = {"params": jnp.ones(2), "scale": jnp.float32(scale)}
    gradients = {"params": jnp.full(2, gradient, jnp.float32), "scale": jnp.float32(0)}
    changes, _ = optimizer.update(gradients, optimizer.init(params), params)
    assert params["scale"] + changes["scale"] == expected


@pytest.mark.parametrize(
    ("scale", "growth", "told"),
    [
        (3.0, 1, "power of two, not 3"),
        (0.0, 1, "not 0"),
        (2.0, 0, "growth_updates must be a whole number of at least 1, not 0"),
        (2.0, True, "growth_updates must be a whole number of at least 1, not True"),
    ],
)
def test_scales_that_are_none_are_refused(scale: float, growth: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        jvpipe.float16.scaled(loss_fn, optax.sgd(1.0), scale, growth)


def test_what_a_loss_returns_beside_stays() -> None:
    def weighted(params: Any, batch: Any, rng: Any) -> Any:
        return jvpipe.Weighted(loss_fn(params, batch, rng) * 8, jnp.float32(8.0)), {"a": 1.0}

    made = jvpipe.float16.scaled(weighted, optax.sgd(1.0))
    (total, weight), aux = made(made.init(PARAMS), BATCH, None)
    assert (float(weight), aux) == (8.0, {"a": 1.0})
    assert float(total) == pytest.approx(8 * float(loss_fn(PARAMS, BATCH, None)))
    assert made.init(lambda key: PARAMS)(KEY)["params"] is PARAMS


def test_the_scale_of_float16_is_refused_by_its_name_where_layers_update_apart() -> None:
    made = jvpipe.float16.scaled(loss_fn, optax.sgd(1.0))
    pipe = jvpipe.Pipeline(made, made.optimizer, 2, 4, planner="even", schedule="pipedream")
    with pytest.raises(ValueError, match=r"^the loss scale of float16 needs .*, or bfloat16"):
        pipe.init(made.init(PARAMS), BATCH, KEY)
