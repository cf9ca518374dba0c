"""Models of other libraries, given as these libraries make them, train as in plain JAX."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jvpipe
from tests.grid import grid
from tests.zoo import mean_square, regression_batch

Tree = Any
B, D, M = 4, 8, 2
KEY = jax.random.key(0, impl="unsafe_rbg")


def permissive(function: Callable) -> Callable:
    """These libraries mix types and ranks."""
    return jax.numpy_dtype_promotion("standard")(jax.numpy_rank_promotion("allow")(function))


@dataclass(frozen=True)
class Case:
    """A loss of parameters as a library has them."""

    loss_fn: Callable[..., Any]
    params: Tree


class Plain(eqx.Module):
    """A module that can be called; every leaf is an array, so it is the parameters itself."""

    layers: list[eqx.nn.Linear]
    norm: eqx.nn.LayerNorm

    def __init__(self, key: jax.Array) -> None:
        self.layers = [eqx.nn.Linear(D, D, key=k) for k in jax.random.split(key, 3)]
        self.norm = eqx.nn.LayerNorm(D)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = self.norm(x + jnp.tanh(layer(x)))
        return x


def equinox_module() -> Case:
    def loss_fn(model: Plain, batch: Tree, rng: Any) -> jax.Array:
        return mean_square(jax.vmap(model)(batch["x"]), batch["y"])

    return Case(loss_fn, Plain(KEY))


def equinox_partition() -> Case:
    """Beside arrays there are activations, and the rate of a dropout, a number of Python."""
    hidden = [eqx.nn.Linear(D, D, key=k) for k in jax.random.split(KEY, 3)]
    rest = [[eqx.nn.Lambda(jnp.tanh), eqx.nn.Dropout(0.3)] for _ in hidden]
    model = eqx.nn.Sequential(
        [part for linear, others in zip(hidden, rest, strict=True) for part in (linear, *others)]
    )
    params, static = eqx.partition(model, eqx.is_array)

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        model, keys = eqx.combine(params, static), jax.random.split(rng, batch["x"].shape[0])
        return mean_square(jax.vmap(lambda x, key: model(x, key=key))(batch["x"], keys), batch["y"])

    return Case(loss_fn, params)


class Dense(nnx.Module):
    """A module that can be called and is a tree of arrays."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def nnx_module() -> Case:
    def loss_fn(model: Dense, batch: Tree, rng: Any) -> jax.Array:
        return mean_square(model(batch["x"]), batch["y"])

    return Case(loss_fn, Dense(nnx.Rngs(0)))


def haiku() -> Case:
    @hk.transform
    def model(x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = hk.LayerNorm(-1, create_scale=True, create_offset=True)(jnp.tanh(hk.Linear(D)(x)))
            x = hk.dropout(hk.next_rng_key(), 0.2, x)
        return hk.Linear(D)(x)

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        return mean_square(model.apply(params, rng, batch["x"]), batch["y"])

    return Case(loss_fn, jax.jit(model.init)(KEY, regression_batch(B, D)["x"]))


def plain_step(case: Case, batch: Tree, rate: float) -> tuple[float, list[Any]]:
    """The loss and the parameters after a step of SGD, by JAX alone."""
    gradient, loss = jax.tree.map(jnp.zeros_like, case.params), 0.0
    plain = jax.jit(jax.value_and_grad(case.loss_fn))
    for m in range(M):
        part = jax.tree.map(lambda x, m=m: x[m * (B // M) : (m + 1) * (B // M)], batch)
        key = jax.random.fold_in(jax.random.fold_in(KEY, 0), m)
        value, grads = plain(case.params, part, key)
        gradient, loss = (
            jax.tree.map(lambda a, b: a + b / M, gradient, grads),
            loss + float(value) / M,
        )
    return loss, jax.tree.leaves(jax.tree.map(lambda p, g: p - rate * g, case.params, gradient))


@pytest.mark.parametrize(
    "case_of",
    grid([equinox_module, equinox_partition, nnx_module, haiku], equinox_module, nnx_module),
)
@permissive
def test_a_model_of_another_library_trains_as_in_plain_jax(case_of: Callable[[], Case]) -> None:
    case, batch = case_of(), regression_batch(B, D)
    pipe = jvpipe.Pipeline(case.loss_fn, optax.sgd(0.5), stages=2, microbatches=M, planner="even")
    state, metrics = pipe.step(pipe.init(case.params, batch, KEY), batch)
    loss, params = plain_step(case, batch, 0.5)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    trained = pipe.params(state)
    assert jax.tree.structure(trained) == jax.tree.structure(case.params)
    for ours, theirs, before in zip(
        jax.tree.leaves(trained), params, jax.tree.leaves(case.params), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        assert not np.array_equal(ours, before)
    assert len(pipe.session.graph.layers) >= 3


@permissive
def test_a_module_with_more_than_arrays_is_told_what_to_do() -> None:
    model = eqx.nn.MLP(D, D, D, 2, key=KEY)
    pipe = jvpipe.Pipeline(
        lambda model, batch, rng: jnp.mean(jax.vmap(model)(batch["x"])), optax.sgd(0.1)
    )
    cure = r"parameter 'activation' is of type \w+, which is not an array: .*eqx\.partition\(model, eqx\.is_array\)"
    with pytest.raises(ValueError, match=cure) as refused:
        pipe.init(model, regression_batch(B, D), None)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=cure):
        pipe.init(lambda key: eqx.nn.MLP(D, D, D, 2, key=key), regression_batch(B, D), KEY)
