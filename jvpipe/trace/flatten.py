"""Traces any function to one flat list of equations, without nested calls."""

from collections.abc import Callable
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr
from jvpipe.trace.inline import inlined

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
        keep_rules: whether to keep calls with a derivative rule, because a derivative of
            the result needs the rule. If not, the bodies of these calls replace them.

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
            "the loss, or a derivative rule in it, closes over a value that was traced, of which "
            "nothing is left when it is used (jax.grad(jax.jit(loss)) fails too): pass the value "
            "as an argument, or make it with NumPy"
        )
    return inlined(traced, calls)
