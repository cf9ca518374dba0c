"""Inlining equation by equation gives what tracing again gives."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, Jaxpr, JaxprEqn
from jvpipe.trace import jaxprs
from jvpipe.trace.flatten import CALLS, RULES
from jvpipe.trace.inline import inlined
from jvpipe.trace.keys import index_key, picks_key
from jvpipe.trace.primitives import is_cheap
from jvpipe.trace.structure import comparable, structure

X = jax.ShapeDtypeStruct((3, 4), np.float32)
TABLE = jnp.arange(4.0)[None]
KEYS = jax.random.split(jax.random.key(3), 6)


@jax.jit
def inner(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    with jax.named_scope("inside"):
        return jnp.where(x > 0, x, y * TABLE), jnp.clip(x, -1, 1)


def nested(x: jax.Array) -> Any:
    """One body twice, a result that is an argument, one that is a constant, one that nobody
    reads.
    """
    with jax.named_scope("first"):
        a, b = inner(x, x + jnp.float32(2) * 3)
    c, _ = inner(2 * x, x)
    return a + c, b, jax.jit(lambda y: (y, 1.0))(x), jnp.sum(a)


def clipped_adam(x: jax.Array) -> Any:
    optimizer, params = (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
        {"a": x, "b": x[0]},
    )
    return optimizer.update(params, optimizer.init(params), params)


def with_keys(x: jax.Array) -> jax.Array:
    """A key of many, a key that is a constant, and the first of what is largest."""
    drawn = jax.random.normal(KEYS[5], x.shape) + jax.random.normal(jax.random.key(1), x.shape)
    return drawn + jax.lax.top_k(x, 1)[0]


def with_rules(x: jax.Array) -> jax.Array:
    """A derivative rule, a checkpoint, a loop and a branch."""
    y = jax.checkpoint(lambda x: jax.nn.relu(jnp.sin(x)))(x)
    y = jax.lax.fori_loop(0, 3, lambda i, y: y * TABLE + i, y)
    return jax.lax.cond(y[0, 0] > 0, jnp.sin, jnp.cos, y)


@pytest.mark.parametrize("calls", [CALLS, CALLS | RULES], ids=["rules kept", "rules inlined"])
@pytest.mark.parametrize("fn", [nested, clipped_adam, with_keys, with_rules])
def test_the_same_line_as_traced_again(fn: Any, calls: dict[str, str]) -> None:
    closed = jax.make_jaxpr(fn)(X)
    expected, found = traced_again(closed, calls), inlined(closed, calls)
    assert shape_of(found) == shape_of(expected)
    assert [_jax.scope(eqn) for eqn in found.jaxpr.eqns] == [
        _jax.scope(eqn) for eqn in expected.jaxpr.eqns
    ]
    value = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
    results = [jax.jit(_jax.jaxpr_as_fun(closed))(value) for closed in (found, expected)]
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_numbers_along_an_axis_are_made_where_they_are_read_first() -> None:
    def fn(x: jax.Array) -> jax.Array:
        numbers = jnp.arange(4).astype(jnp.float32)
        return jnp.sin(x) + numbers[None]

    found = inlined(jax.make_jaxpr(fn)(X), CALLS)
    assert [str(eqn.primitive) for eqn in found.jaxpr.eqns][:3] == [
        "sin",
        "iota",
        "convert_element_type",
    ]


def shape_of(closed: ClosedJaxpr) -> Any:
    jaxpr = closed.jaxpr
    consts = [comparable(x) for x in closed.consts]
    return structure(jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars), consts


def folded(eqn: JaxprEqn, values: list[Any]) -> list[Any] | None:
    """The results of a cheap equation between constant scalars; None for any other one."""
    shapes = [_jax.aval(v).shape for v in eqn.outvars]
    if any(shapes) or any(isinstance(x, _jax.Tracer) for x in values) or not is_cheap(eqn):
        return None
    with jax.ensure_compile_time_eval():
        results = _jax.bind(eqn, values)
    avals = map(_jax.aval, eqn.outvars)
    plain = [isinstance(aval.dtype, np.dtype) for aval in avals]
    return [np.asarray(x)[()] if p else x for x, p in zip(results, plain, strict=True)]


def traced_again(closed: ClosedJaxpr, calls: dict[str, str]) -> ClosedJaxpr:
    """What JAX makes of a function that runs the equations of calls one by one."""

    def results(jaxpr: Jaxpr, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        consts = [x if np.shape(x) else np.asarray(x)[()] for x in consts]
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))
        jaxprs.run_jaxpr(jaxprs.prune(jaxpr.eqns, jaxpr.outvars), env, apply)
        return jaxprs.read_by(jaxpr.outvars, env)

    def apply(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        with jax.named_scope(_jax.scope(eqn)):
            if eqn.primitive.name in calls:
                body = eqn.params[calls[eqn.primitive.name]]
                closed = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
                return results(closed.jaxpr, closed.consts, values)
            if picks_key(eqn):
                return [index_key(eqn, values[0])]
            return folded(eqn, values) or _jax.bind(eqn, values)

    again = jax.make_jaxpr(lambda *xs: results(closed.jaxpr, closed.consts, xs))(*closed.in_avals)
    return ClosedJaxpr(
        again.jaxpr.replace(eqns=jaxprs.prune(again.jaxpr.eqns, again.jaxpr.outvars)), again.consts
    )
