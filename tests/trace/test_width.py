"""Losses that compute in 64 bits while the program does not: refused, unless they can run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.trace.width import check_width

BATCH = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
PARAMS = 0.5 * np.eye(4, dtype=np.float32)


def squares(x: jax.Array) -> jax.Array:
    return jnp.sum(x.astype(jnp.float64) ** 2)


def product(x: jax.Array) -> jax.Array:
    return jnp.sum(x.astype(jnp.float64) @ jnp.ones((4, 4)))


def loop(x: jax.Array) -> jax.Array:
    zero = jnp.float64(0)
    return jax.lax.fori_loop(0, 4, lambda i, total: total + x[i].sum().astype(jnp.float64), zero)


def exact_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x.astype(jnp.float64) + 1e9) - 1e9 * x.size


def not_differentiated(x: jax.Array) -> jax.Array:
    return squares(jax.lax.stop_gradient(x))


def picked(x: jax.Array) -> jax.Array:
    return jnp.take(x, jnp.arange(3), axis=1).sum()


def loss_of(inside: Any) -> Any:
    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        x = jnp.tanh(batch @ params)
        with jax.enable_x64(True):
            value = inside(x).astype(jnp.float32)
        return value + jnp.mean(x)

    return loss_fn


def step(loss_fn: Any) -> tuple[Any, Any]:
    pipe = jvpipe.Pipeline(loss_fn, optax.sgd(0.1), stages=1, microbatches=1, planner="even")
    state, metrics = pipe.step(pipe.init(PARAMS, BATCH, None), BATCH)
    return pipe.params(state), metrics["loss"]


@pytest.mark.parametrize("inside", [squares, product, loop])
def test_a_loss_whose_derivative_needs_64_bits_is_refused(inside: Any) -> None:
    with pytest.raises(
        ValueError, match=r"computes \S*64\S* inside .* set jax_enable_x64 for the whole"
    ):
        step(loss_of(inside))
    with jax.enable_x64(True):
        step(loss_of(inside))


def test_a_loss_that_returns_64_bits_is_refused() -> None:
    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        with jax.enable_x64(True):
            return exact_sum(batch @ params)

    with pytest.raises(ValueError, match="set jax_enable_x64 for the whole program"):
        step(loss_fn)


@pytest.mark.parametrize("inside", [exact_sum, not_differentiated, picked])
def test_values_of_64_bits_that_are_cast_back_work(inside: Any) -> None:
    loss_fn = loss_of(inside)
    params, loss = step(loss_fn)
    expected, gradient = jax.value_and_grad(loss_fn)(PARAMS, BATCH, None)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(params, PARAMS - 0.1 * gradient, rtol=1e-5)


def test_nothing_is_checked_of_a_loss_of_32_bits() -> None:
    check_width(jax.make_jaxpr(jnp.sin)(1.0), calls={})
