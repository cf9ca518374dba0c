"""Inlining equation by equation gives what tracing again gives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvpipe import _jax
from jvpipe.programs.inline import inlined
from jvpipe.trace import jaxprs

X = jax.ShapeDtypeStruct((3, 4), np.float32)
TABLE = jnp.arange(4.0)[None]


@jax.jit
def inner(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.where(x > 0, x, y * TABLE), jnp.clip(x, -1, 1)


def nested(x: jax.Array) -> Any:
    """One body twice, a result that is an argument, one that is a constant, one that nobody reads."""
    (a, b), (c, _) = inner(x, x + jnp.float32(2) * 3), inner(2 * x, x)
    return a + c, b, jax.jit(lambda y: (y, 1.0))(x), jnp.sum(a)


def clipped_adam(x: jax.Array) -> Any:
    optimizer, params = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), {"a": x, "b": x[0]}
    return optimizer.update(params, optimizer.init(params), params)


@pytest.mark.parametrize("fn", [nested, clipped_adam])
def test_the_same_line_as_traced_again(fn: Any) -> None:
    expected, found = jaxprs.flatten(fn, X), inlined(jax.make_jaxpr(fn)(X))
    assert found is not None
    assert str(found.jaxpr) == str(expected.jaxpr)
    assert [np.asarray(c).tolist() for c in found.consts] == [np.asarray(c).tolist() for c in expected.consts]
    value = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
    results = [jax.jit(_jax.jaxpr_as_fun(closed))(value) for closed in (found, expected)]
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
        lambda x: jax.jit(lambda y: jax.lax.scan(lambda c, r: (c + r, c), y[0], y))(x),
        jax.nn.relu,
    ],
)
def test_what_is_more_than_calls_is_left(fn: Any) -> None:
    assert inlined(jax.make_jaxpr(fn)(X)) is None
