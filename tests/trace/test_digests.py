"""Digests are equal exactly where what is computed is, and name the first leaf or equation that is
not.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe.trace.digests import array_digest, jaxpr_lines, leaf_lines, made_lines
from jvpipe.trace.flatten import flatten

X = np.ones(3, np.float32)


def lines(fn: Callable[..., Any], x: Any = X) -> list[str]:
    closed = flatten(fn, x, keep_rules=True)
    return jaxpr_lines(closed.jaxpr, closed.consts)


def scaled(by: float) -> Callable[[Any], Any]:
    return lambda x: jnp.sin(x) * by


def shifted(by: Any) -> Callable[[Any], Any]:
    array = jnp.asarray(by)
    return lambda x: jnp.sin(x) + array


def ruled(factor: float) -> Callable[[Any], Any]:
    """The same forward whatever the factor is, which its derivative alone has."""

    @jax.custom_vjp
    def fn(x: Any) -> Any:
        return jnp.sin(x)

    fn.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (factor * g * x,))
    return fn


def test_what_is_traced_twice_has_the_same_lines() -> None:
    assert lines(scaled(0.1)) == lines(scaled(0.1))
    assert lines(shifted([1.0, 2.0, 3.0])) == lines(shifted([1.0, 2.0, 3.0]))
    assert lines(ruled(2.0)) == lines(ruled(2.0))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (scaled(0.1), scaled(0.2)),
        (scaled(0.1), shifted([1.0, 2.0, 3.0])),
        (shifted([1.0, 2.0, 3.0]), shifted([1.0, 2.0, 4.0])),
        (ruled(2.0), ruled(3.0)),
        (lambda x: x - 2 * x, lambda x: 2 * x - x),
    ],
    ids=["a number", "code", "a closed-over array", "a derivative rule", "which variable is read"],
)
def test_what_differs_is_seen(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    assert lines(one) != lines(other)


def test_a_closed_over_array_and_an_equation_are_named() -> None:
    own, other = lines(shifted([1.0, 2.0, 3.0])), lines(shifted([1.0, 2.0, 4.0]))
    (unlike,) = [line for line, their in zip(own, other, strict=True) if line != their]
    assert unlike.startswith("closed-over array 0 float32[3]")
    own, other = lines(scaled(0.5)), lines(scaled(0.25))
    (unlike,) = [line for line, their in zip(own, other, strict=True) if line != their]
    assert unlike.startswith("equation 1, mul 0.5 to float32[3]")


def test_arrays_count_by_the_bytes_that_a_device_has() -> None:
    assert array_digest(np.array([1.0, 2.0])) == array_digest(jnp.array([1.0, 2.0]))
    assert array_digest(np.arange(6).reshape(2, 3).T) == array_digest(
        np.arange(6).reshape(2, 3).T.copy()
    )
    assert array_digest(jnp.bfloat16(1.5)) != array_digest(jnp.bfloat16(1.25))
    assert array_digest(jax.random.key(0)) == array_digest(jax.random.key_data(jax.random.key(0)))


def test_leaves_are_named_by_path_and_shapes_have_no_bytes() -> None:
    tree = {"a": [X, 2 * X], "b": jax.ShapeDtypeStruct((2,), np.float32)}
    own, other = leaf_lines(tree), leaf_lines(tree | {"a": [X, 3 * X]})
    assert [line.rpartition(" ")[0] for line in own[:2]] == ["a/0 float32[3]", "a/1 float32[3]"]
    assert own[2] == "b float32[2]"
    assert [a == b for a, b in zip(own, other, strict=True)] == [True, False, True]


def test_leaves_that_a_function_makes_differ_where_their_making_does() -> None:
    def initializer(scale: float, table: Any) -> Callable[[Any], Any]:
        def init(key: Any) -> Any:
            first, second = jax.random.split(key)
            return {
                "w": jax.random.normal(first, (3,)),
                "v": scale * jax.random.normal(second, (3,)),
                "t": table + 0.0,
                "o": jnp.ones(2),
            }

        return init

    key = jax.random.key(0)
    own = made_lines(initializer(0.5, X), key)
    assert own == made_lines(initializer(0.5, X), jax.random.key(1)), "the key is compared beside"
    assert [line.split()[0] for line in own] == ["o", "t", "v", "w"]
    for scale, table, unlike in ((0.25, X, "v"), (0.5, 2 * X, "t")):
        other = made_lines(initializer(scale, table), key)
        assert [
            line.split()[0] for line, their in zip(own, other, strict=True) if line != their
        ] == [unlike]
