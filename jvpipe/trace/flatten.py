"""Traces any function to one flat list of equations, without nested calls."""

from collections.abc import Callable
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr
from jvpipe.trace.inline import inlined
from jvpipe.trace.width import check_width

# Calls that are replaced by the equations of their bodies: the name of each primitive, with the
# name of the parameter that has the body. `jax.checkpoint` ("checkpoint", "remat", "remat2") is
# among them, because jvpipe decides which values are kept and which are recomputed.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "remat": "jaxpr",
}
# Calls with a user's derivative rule, in the same form.
RULES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


def flatten(
    fn: Callable[..., Any],
    *args: Any,
    keep_rules: bool = False,
) -> ClosedJaxpr:
    """Traces a function to one flat, pruned jaxpr.

    Nested `jit` and `jax.checkpoint` calls are replaced by their bodies, which keep the name scopes
    of the calls. Cheap scalars that depend only on constants are computed here, once. Sharding
    constraints are removed.

    Args:
        fn: the function.
        args: arrays or `jax.ShapeDtypeStruct`.
        keep_rules: whether to keep calls with a derivative rule, which are needed to differentiate
            the result. If False, they are replaced by their bodies, too.

    Raises:
        ValueError: the function closes over a tracer, a value of an earlier trace, or over a
            mutable array; or it is to be differentiated, but cannot be (`check_width`).

    >>> import jax, jax.numpy as jnp
    >>> closed = flatten(jax.jit(lambda x: jax.jit(jnp.sin)(x) + 1.0), 1.0)
    >>> [str(eqn.primitive) for eqn in closed.jaxpr.eqns]
    ['sin', 'add']
    """
    calls = CALLS if keep_rules else CALLS | RULES
    traced = jax.make_jaxpr(fn)(*args)
    if any(isinstance(x, _jax.Tracer) for x in traced.consts):
        raise ValueError(
            "the loss, or a derivative rule in it, closes over a value of an earlier trace, which "
            "is no longer valid (jax.grad(jax.jit(loss)) fails, too): pass the value as an "
            "argument, or make it with NumPy"
        )
    for x in traced.consts:
        if isinstance(x, jax.Ref):
            raise ValueError(
                f"the loss closes over a mutable array (jax.new_ref), {jax.typeof(x)}: carry its "
                "value as model state, with has_state=True"
            )
    if keep_rules:
        check_width(traced, calls)
    return inlined(traced, calls)
