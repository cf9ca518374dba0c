"""Traces any function to one flat list of equations, without nested calls."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, Jaxpr, JaxprEqn
from jvpipe.trace import jaxprs
from jvpipe.trace.inline import SHARDING, folded, inlined, literal
from jvpipe.trace.keys import index_key
from jvpipe.trace.unroll import as_array, stacked_result, stacks_layers, unrolled

# Calls that are replaced by the equations of their bodies. Each primitive comes with the parameter
# that has the body. `jax.checkpoint` ("checkpoint", "remat", "remat2") is among them, because
# jvpipe itself decides which values are kept and which are recomputed.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "remat": "jaxpr",
}
# Calls with a derivative rule of their own, each with the parameter that has the body.
RULES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


def flatten(
    fn: Callable[..., Any],
    *args: Any,
    keep_rules: bool = False,
) -> ClosedJaxpr:
    """Traces a function to one flat, pruned jaxpr.

    Nested `jit` and `jax.checkpoint` calls are replaced by their bodies, which keep the name scopes
    of the calls. Cheap scalars that depend only on constants are computed here, once for all.
    Sharding constraints are left out.

    Args:
        fn: the function.
        args: arrays or `jax.ShapeDtypeStruct`.
        keep_rules: whether to keep calls with a derivative rule, which a derivative of the result
            needs. If not, their bodies replace them.

    Raises:
        ValueError: the function closes over a value that was traced.

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
            "it is used (jax.grad(jax.jit(loss)) fails too): pass the value as an argument, or make it with NumPy"
        )
    if not stacks_layers(traced.jaxpr, calls):
        return inlined(traced, calls)

    def unrolled_fn(*xs: Any) -> list[Any]:
        return [*map(as_array, _traced(traced.jaxpr, traced.consts, xs, calls))]

    # Only scans over stacked layers need a second trace; anything else is inlined equation by
    # equation.
    closed = jax.make_jaxpr(unrolled_fn)(*traced.in_avals)
    return jaxprs.with_equations(closed, closed.jaxpr.eqns)


def _traced(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    calls: dict[str, str],
) -> list[Any]:
    """Traces a jaxpr again, with calls replaced by bodies and scans over stacked layers unrolled.

    Args:
        jaxpr: the jaxpr.
        consts: its constants.
        args: the arguments that it is called with.
        calls: the names of primitives that are calls, each with the parameter that has its body.
    """

    def inline(body: ClosedJaxpr | Jaxpr, values: Sequence[Any]) -> list[Any]:
        if isinstance(body, ClosedJaxpr):
            return _traced(body.jaxpr, body.consts, values, calls)
        return _traced(body, (), values, calls)

    def apply(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        with jax.named_scope(_jax.scope(eqn)):
            result = stacked_result(eqn, values)
            if result is not None:
                return result
            if eqn.primitive.name in calls:
                return inline(eqn.params[calls[eqn.primitive.name]], values)
            results = unrolled(eqn, values, lambda xs: inline(eqn.params["jaxpr"], xs))
            if results is not None:
                return results
            values = [as_array(v) for v in values]
            if eqn.primitive.name == SHARDING:
                return values
            return folded(eqn, values) or index_key(eqn, values) or _jax.bind(eqn, values)

    constants = map(literal, consts, map(_jax.aval, jaxpr.constvars))
    variables = [*jaxpr.constvars, *jaxpr.invars]
    env = dict(zip(variables, [*constants, *args], strict=True))
    jaxprs.run_jaxpr(
        jaxprs.prune(jaxpr.eqns, jaxpr.outvars),
        env,
        apply,
    )
    return jaxprs.read_by(jaxpr.outvars, env)
