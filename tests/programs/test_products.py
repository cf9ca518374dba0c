"""Products are turned where that spares a transposition, and only there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import Precision, dot_general

from jvpipe._jax import ClosedJaxpr, jaxpr_as_fun
from jvpipe.programs.products import upright


def traced(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[list[str], ClosedJaxpr]:
    arrays = [
        jnp.asarray(np.random.default_rng(i).normal(size=shape), jnp.float32)
        for i, shape in enumerate(shapes)
    ]
    turned = upright(jax.make_jaxpr(fn)(*arrays))
    for mine, plain in zip(
        jaxpr_as_fun(turned)(*arrays), jax.tree.leaves(fn(*arrays)), strict=True
    ):
        np.testing.assert_allclose(mine, plain, rtol=1e-5, atol=1e-5)
    return [eqn.primitive.name for eqn in turned.jaxpr.eqns], turned


@pytest.mark.parametrize(
    ("permutation", "left", "right", "dimensions"),
    [
        ((1, 0), (4, 3, 2), (4, 3, 5), (((0, 1), (0, 1)), ((), ()))),
        ((2, 0, 1), (4, 2, 6), (4, 5), (((0,), (0,)), ((), ()))),
        ((1, 2, 0), (4, 2), (4, 5, 6), (((0,), (0,)), ((), ()))),
        ((0, 2, 1), (7, 4, 2), (4, 7, 5), (((1,), (0,)), ((0,), (1,)))),
        ((0, 1, 3, 2), (7, 3, 4, 2), (7, 3, 4, 5), (((2,), (2,)), ((0, 1), (0, 1)))),
    ],
)
def test_what_is_only_transposed_is_made_so(
    permutation: Any, left: Any, right: Any, dimensions: Any
) -> None:
    names, _ = traced(
        lambda a, b: jnp.transpose(dot_general(a, b, dimensions), permutation), left, right
    )
    assert names == ["dot_general"]


def test_the_gradient_of_a_weight_has_no_transposition() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w))

    shapes = (3, 5), (2, 4, 3)
    plain = jax.make_jaxpr(jax.grad(loss))(*map(jnp.ones, shapes))
    assert "transpose" in [eqn.primitive.name for eqn in plain.jaxpr.eqns]
    assert "transpose" not in traced(jax.grad(loss), *shapes)[0]


def test_the_rest_is_left_alone() -> None:
    matrix = (((0,), (0,)), ((), ()))
    both = ["dot_general", "transpose"]
    names, _ = traced(lambda a, b: (c := dot_general(a, b, matrix), c.T), (4, 2), (4, 3))
    assert names == both  # the product itself is wanted too
    names, _ = traced(lambda a, b: (c := dot_general(a, b, matrix)).T @ c, (4, 2), (4, 3))
    assert names == [*both, "dot_general"]
    names, _ = traced(
        lambda a, b: jnp.transpose(dot_general(a, b, matrix), (1, 0, 2)), (4, 2, 5), (4, 3)
    )
    assert names == both  # another permutation
    names, _ = traced(lambda a: a.T, (4, 2))
    assert names == ["transpose"]


def test_each_operand_keeps_its_precision() -> None:
    def gradient(a: jax.Array, b: jax.Array) -> jax.Array:
        precision = (Precision.HIGH, Precision.DEFAULT)
        return dot_general(a, b, (((0,), (0,)), ((), ())), precision, jnp.float32).T

    names, turned = traced(gradient, (4, 2), (4, 3))
    assert names == ["dot_general"]
    assert turned.jaxpr.eqns[0].params["precision"] == (Precision.DEFAULT, Precision.HIGH)
    assert turned.jaxpr.eqns[0].params["preferred_element_type"] == jnp.float32
