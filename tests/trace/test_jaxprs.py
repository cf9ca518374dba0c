"""Jaxprs as lists of equations."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvpipe import _jax
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import flatten
from jvpipe.trace.jaxprs import free_variables, prune
from jvpipe.trace.structure import comparable, structure
from tests.zoo import clipped, scaled

X = np.arange(6, dtype=np.float32).reshape(2, 3) / 10


def primitives(fn: Callable, *args: Any, **options: Any) -> list[str]:
    return [eqn.primitive.name for eqn in flatten(fn, *args, **options).jaxpr.eqns]


def shape_of(fn: Callable, *args: Any) -> Any:
    closed = flatten(fn, *args, keep_rules=True)
    jaxpr = closed.jaxpr
    return structure(jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars), comparable(
        closed.consts
    )


def test_zeros_are_told_apart_by_their_signs() -> None:
    for one, other in ((0.0, -0.0), (0j, complex(0.0, -0.0)), (0j, complex(-0.0, 0.0))):
        assert comparable(one) == comparable(one) != comparable(other)


def test_calls_are_inlined() -> None:
    @jax.checkpoint
    def block(x: jax.Array) -> jax.Array:
        return jax.jit(lambda y: jnp.sin(jax.jit(jnp.cos)(y)))(x)

    assert primitives(block, X) == ["cos", "sin"]


def test_custom_derivatives_stay_while_they_are_needed() -> None:
    assert primitives(clipped, X, keep_rules=True) == ["custom_jvp_call"]
    assert "custom_jvp_call" not in primitives(clipped, X)
    assert primitives(lambda x: scaled(x, x.T), X) == ["transpose", "dot_general"]


def test_loops_and_branches_stay() -> None:
    assert primitives(lambda x: jax.lax.fori_loop(0, 3, lambda i, y: jnp.sin(y), x), X) == ["scan"]
    assert "cond" in primitives(lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), X)


def test_constants_are_computed_at_once() -> None:
    assert primitives(lambda x: x * (jnp.float32(2) * jnp.sin(jnp.float32(1))), X) == ["mul"]


def test_what_nobody_needs_is_left_out() -> None:
    assert primitives(lambda x: (jnp.sin(x), jnp.cos(x))[0], X) == ["sin"]


def test_scopes_survive_inlining() -> None:
    def model(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            return jax.jit(jax.named_call(jnp.sin, name="inner"))(x)

    (eqn,) = flatten(model, X).jaxpr.eqns
    assert _jax.scope(eqn) == "outer/inner"


def test_flat_means_the_same() -> None:
    def model(x: jax.Array) -> jax.Array:
        x = jax.nn.gelu(clipped(x)) + jax.nn.softmax(x)
        return jax.lax.cond(jnp.sum(x) > 0, jax.jit(jnp.sin), jnp.cos, x)

    closed = flatten(model, X)
    (found,) = _jax.jaxpr_as_fun(closed)(jnp.asarray(X))
    np.testing.assert_allclose(found, jax.jit(model)(X), rtol=1e-6)


def test_prune_and_free_variables() -> None:
    jaxpr = flatten(lambda x, y: (jnp.sin(x) + y, jnp.cos(y)), X, X).jaxpr
    x, y = jaxpr.invars
    first, second = jaxpr.outvars
    assert [e.primitive.name for e in prune(jaxpr.eqns, [first])] == ["sin", "add"]
    assert free_variables(jaxpr.eqns) == [x, y]
    assert free_variables(prune(jaxpr.eqns, [second])) == [y]


def test_a_structure_knows_no_names() -> None:
    assert shape_of(lambda x: jnp.sin(x) * 2, X) == shape_of(lambda other: jnp.sin(other) * 2, X)
    assert len({shape_of(lambda x: jnp.sin(x), X)[0], shape_of(lambda x: jnp.sin(x), X)[0]}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: jnp.sin(x), lambda x: jnp.cos(x)),
        (lambda x: x * 2, lambda x: x * 3),
        (lambda x: x * 0.0, lambda x: x * -0.0),
        (lambda x: x - x.T.T, lambda x: x.T.T - x),
        (lambda x: jnp.sum(x, 0), lambda x: jnp.sum(x, 1)),
        (lambda x: (x, x + 1), lambda x: (x + 1, x)),
        (lambda x: x + X, lambda x: x + 2 * X),
        (lambda x: x.astype(jnp.int32), lambda x: x.astype(jnp.int8)),
        (
            lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y * 2, x),
            lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y * 3, x),
        ),
        (lambda x: jax.random.key(0), lambda x: jax.random.key(1)),
        (jax.nn.relu, jax.nn.relu6),
    ],
)
def test_structures_tell_functions_apart(one: Callable, other: Callable) -> None:
    assert shape_of(one, X) == shape_of(one, X)
    assert shape_of(one, X) != shape_of(other, X)


def test_structures_tell_types_apart() -> None:
    assert shape_of(jnp.sin, X) != shape_of(jnp.sin, X.T)
    assert shape_of(jnp.sin, X) != shape_of(jnp.sin, X.astype(np.float16))


def ruled(slope: float) -> Callable:
    """The identity, with a derivative of some slope."""

    @jax.custom_jvp
    def identity(x: jax.Array) -> jax.Array:
        return x * 1

    identity.defjvp(lambda primals, tangents: (identity(*primals), slope * tangents[0]))
    return identity


def pulled(slope: float) -> Callable:
    """The same by its transposed derivative; what comes in beside takes no part."""

    @jax.custom_vjp
    def identity(x: jax.Array, where: jax.Array) -> jax.Array:
        return x * 1

    identity.defvjp(lambda x, where: (x, None), lambda _, g: (slope * g, None))
    return identity


def test_custom_derivatives_are_told_apart_by_what_they_do() -> None:
    where = np.arange(3)
    assert shape_of(ruled(2.0), X) == shape_of(ruled(2.0), X)
    assert shape_of(ruled(2.0), X) != shape_of(ruled(3.0), X)
    assert shape_of(pulled(2.0), X, where) == shape_of(pulled(2.0), X, where)
    assert shape_of(pulled(2.0), X, where) != shape_of(pulled(3.0), X, where)


def test_custom_derivatives_inside_a_loop_are_told_apart() -> None:
    def looped(slope: float) -> Callable:
        rule = ruled(slope)
        return lambda x: jax.lax.fori_loop(0, 3, lambda i, y: rule(y), x)

    assert shape_of(looped(2.0), X) == shape_of(looped(2.0), X)
    assert shape_of(looped(2.0), X) != shape_of(looped(3.0), X)


def test_arrays_that_a_derivative_closes_over_are_compared_and_not_differentiated() -> None:
    def tinted(forth: np.ndarray, back: np.ndarray) -> Callable:
        @jax.custom_vjp
        def tint(x: jax.Array) -> jax.Array:
            return x * forth[None]

        tint.defvjp(lambda x: (tint(x), None), lambda _, g: (g * back[None],))
        return tint

    one, other = np.ones(3, np.float32), np.full(3, 2, np.float32)
    assert shape_of(tinted(one, other), X) == shape_of(tinted(one.copy(), other.copy()), X)
    assert shape_of(tinted(one, other), X) != shape_of(tinted(one, one), X)


def test_a_derivative_that_calls_its_function_in_a_loop_is_compared_once() -> None:
    """As that of odeint, which integrates: what derivatives of derivatives would be, nobody
    asks.
    """

    @jax.custom_vjp
    def grown(x: jax.Array) -> jax.Array:
        return x * 2

    def back(_: None, g: jax.Array) -> tuple[jax.Array]:
        return (jax.lax.fori_loop(0, 3, lambda i, g: grown(g), g),)

    grown.defvjp(lambda x: (grown(x), None), back)
    assert shape_of(grown, X) == shape_of(grown, X)
    assert shape_of(grown, X) != shape_of(jax.jit(lambda x: x * 2), X)


def test_a_derivative_that_closes_over_what_was_traced_is_refused() -> None:
    def masked(x: jax.Array) -> jax.Array:
        mask = jnp.arange(3) > 1

        @jax.custom_vjp
        def pick(x: jax.Array) -> jax.Array:
            return jnp.where(mask[None], x, 0)

        pick.defvjp(lambda x: (pick(x), None), lambda _, g: (jnp.where(mask[None], g, 0),))
        return pick(x)

    with pytest.raises(
        ValueError,
        match=r"closes over a value of an earlier trace.*pass the value as an argument, or make",
    ):
        shape_of(masked, X)


def test_silent_prints_nothing_even_in_loops_and_branches() -> None:
    def loud(x: jax.Array) -> jax.Array:
        def body(i: Any, x: jax.Array) -> jax.Array:
            jax.debug.print("{}", jnp.sum(x))
            return jax.lax.cond(
                i > 1, lambda x: (jax.debug.callback(print, x), jnp.sin(x))[1], jnp.cos, x
            )

        return jax.lax.fori_loop(0, 3, body, x)

    closed = jax.make_jaxpr(loud)(X)
    quiet = jaxprs.silent(closed)
    assert "debug" in str(closed)
    assert "debug" not in str(quiet)
    assert not quiet.effects
    assert jaxprs.silent(quiet) is quiet
    (ours,), theirs = jax.jit(_jax.jaxpr_as_fun(quiet))(X), jax.jit(loud)(X)
    np.testing.assert_array_equal(ours, theirs)


def test_what_is_said_of_shardings_is_left_out() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    along = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    closed = flatten(
        jax.jit(lambda x: jax.lax.with_sharding_constraint(2 * x, along) + 1), jnp.ones(4)
    )
    assert [eqn.primitive.name for eqn in closed.jaxpr.eqns] == ["mul", "add"]
