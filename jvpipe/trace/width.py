"""Checks a loss that computes in 64 bits while JAX runs with types of 32 bits.

`jax.enable_x64(True)` inside a loss counts only while JAX traces the loss. Its equations are cut
into programs and differentiated under the setting of the whole program, where an input of 64 bits
has 32. So values of 64 bits work only inside of one program: made there from fewer bits, and cast
back there, as for an accurate sum.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr
from jvpipe.trace import jaxprs
from jvpipe.trace.inline import inlined

_WIDE_FLOATS = ("float64", "complex128")
_WIDE = (*_WIDE_FLOATS, "int64", "uint64")


def check_width(traced: ClosedJaxpr, calls: Mapping[str, str]) -> None:
    """Checks that a loss and its derivative can run under the setting of the whole program.

    Args:
        traced: the loss.
        calls: the calls that are replaced by their bodies, as in `inlined`.

    Raises:
        ValueError: the loss computes in 64 bits inside `jax.enable_x64`, with values that programs
            hand to each other.
    """
    if jax.config.read("jax_enable_x64"):
        return
    made = (_jax.aval(v) for eqn in jaxprs.every(traced.jaxpr.eqns) for v in eqn.outvars)
    first = next(filter(_is_wide, made), None)
    if first is None or _works(traced, calls):
        return
    raise ValueError(
        f"the loss computes {first.str_short()} inside jax.enable_x64, but its derivative is taken "
        "outside of it, without 64-bit types: set jax_enable_x64 for the whole program, "
        'jax.config.update("jax_enable_x64", True), or compute in 32 bits'
    )


def _works(traced: ClosedJaxpr, calls: Mapping[str, str]) -> bool:
    """Tells whether the derivative can be traced and lowered, with no values of 64 bits handed on.

    The loss is taken as one layer. A value is handed on if it is captured or returned, if the
    backward reads it, or if a body such as that of a loop takes or makes it.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            loss = inlined(traced, calls)
            closed = _differentiated(loss, calls)
            shapes = list(map(jaxprs.shape_of, loss.jaxpr.invars))
            _jax.lowered(jax.jit(lambda *xs: jaxprs.evaluate_jaxpr(closed, xs)), shapes, "cpu")
    except Exception:  # JAX raises errors of many types
        return False
    # Integers may be handed on, because only the lower half of an index counts.
    return not any(str(aval.dtype) in _WIDE_FLOATS for aval in _handed_on(closed))


def _differentiated(loss: ClosedJaxpr, calls: Mapping[str, str]) -> ClosedJaxpr:
    """Returns results and derivative of a loss, and what its backward reads."""

    def both(*inputs: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        first, *others = jaxprs.evaluate_jaxpr(loss, inputs)
        return first, others

    def run(*inputs: jax.Array) -> Any:
        first, pull, others = jax.vjp(both, *inputs, has_aux=True)
        return jax.tree.leaves((first, others, pull, pull(jnp.full((), 1.0, first.dtype))))

    shapes = map(jaxprs.shape_of, loss.jaxpr.invars)
    return inlined(jax.make_jaxpr(run)(*shapes), calls)


def _handed_on(closed: ClosedJaxpr) -> Iterator[Any]:
    """Yields the types of the values that programs or bodies hand to each other."""
    yield from map(_jax.aval, (*closed.jaxpr.constvars, *closed.jaxpr.outvars))
    for eqn in closed.jaxpr.eqns:
        if _jax.inner_jaxprs(eqn):
            yield from map(_jax.aval, (*eqn.invars, *eqn.outvars))


def _is_wide(aval: Any) -> bool:
    return str(aval.dtype) in _WIDE
