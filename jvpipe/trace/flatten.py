"""Any function as one flat line of equations."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, Jaxpr, JaxprEqn
from jvpipe.trace import jaxprs
from jvpipe.trace.inline import SHARDING, folded, inlined, literal
from jvpipe.trace.keys import index_key
from jvpipe.trace.unroll import stacked, stacks_layers, unrolled, whole

# Calls that say nothing of their own: their bodies belong to the caller. `remat2` is among them because
# jvpipe decides by itself what is kept and what is recomputed.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "remat": "jaxpr",
}
# Calls with a derivative of their own.
RULES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


def flatten(fn: Callable[..., Any], *args: Any, keep_rules: bool = False) -> ClosedJaxpr:
    """Traces `fn` to one flat, pruned jaxpr; `args` are arrays or `jax.ShapeDtypeStruct`.

    Nested `jit` and `jax.checkpoint` calls are inlined and keep their name scopes; what depends on constants
    alone is computed at once. Functions with a derivative of their own are inlined too, unless the result is still
    to be differentiated (`keep_rules`). What is said of shardings is left out.

    >>> import jax, jax.numpy as jnp
    >>> closed = flatten(jax.jit(lambda x: jax.jit(jnp.sin)(x) + 1.0), 1.0)
    >>> [str(eqn.primitive) for eqn in closed.jaxpr.eqns]
    ['sin', 'add']
    """
    calls = CALLS if keep_rules else CALLS | RULES
    traced = jax.make_jaxpr(fn)(*args)
    if any(isinstance(x, _jax.Tracer) for x in traced.consts):
        raise ValueError(
            "the loss, or a derivative rule in it, closes over a value that was traced, of which nothing is left when "
            "it is used (jax.grad(jax.jit(loss)) fails likewise): pass the value as an argument, or make it with NumPy"
        )
    if not stacks_layers(traced.jaxpr, calls):
        return inlined(traced, calls)
    closed = jax.make_jaxpr(
        lambda *xs: [*map(whole, _traced(traced.jaxpr, traced.consts, xs, calls))]
    )(*traced.in_avals)
    jaxpr = closed.jaxpr
    return ClosedJaxpr(jaxpr.replace(eqns=jaxprs.prune(jaxpr.eqns, jaxpr.outvars)), closed.consts)


def _traced(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], calls: dict[str, str]
) -> list[Any]:
    """Traces the equations of a jaxpr again, without its calls, scans over stacked layers unrolled."""

    def inline(body: ClosedJaxpr | Jaxpr, values: Sequence[Any]) -> list[Any]:
        inner, inner_consts = (
            (body.jaxpr, body.consts) if isinstance(body, ClosedJaxpr) else (body, ())
        )
        return _traced(inner, inner_consts, values, calls)

    def apply(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        with jax.named_scope(_jax.scope(eqn)):
            if (result := stacked(eqn, values)) is not None:
                return result
            if eqn.primitive.name in calls:
                return inline(eqn.params[calls[eqn.primitive.name]], values)
            if (
                results := unrolled(eqn, values, lambda xs: inline(eqn.params["jaxpr"], xs))
            ) is not None:
                return results
            values = [whole(v) for v in values]
            if eqn.primitive.name == SHARDING:
                return values
            return folded(eqn, values) or index_key(eqn, values) or _jax.bind(eqn, values)

    env = dict(
        zip(
            [*jaxpr.constvars, *jaxpr.invars],
            [*map(literal, consts, map(_jax.aval, jaxpr.constvars)), *args],
            strict=True,
        )
    )
    jaxprs.run(jaxprs.prune(jaxpr.eqns, jaxpr.outvars), env, apply)
    return jaxprs.read(jaxpr.outvars, env)
