"""The derivative of one equation that has a rule of its own, as a jaxpr."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, JaxprEqn
from jvpipe.trace.flatten import flatten


def inexact(values: Sequence[Any]) -> list[int]:
    """Returns the positions of values that have a derivative."""
    return [i for i, v in enumerate(values) if jnp.issubdtype(v.dtype, jnp.inexact)]


def pullback(
    eqn: JaxprEqn, moving: Sequence[int] | None = None
) -> tuple[ClosedJaxpr, Sequence[int]]:
    """Returns the derivative of an equation, and the operands by which it is one.

    Arrays that a rule closes over are its first operands and have no derivative, but JAX does not
    say how many there are: operands are left out from the front until the rule can be
    differentiated.

    Args:
        eqn: with a derivative rule of its own.
        moving: the operands that have a derivative; None: all of inexact type.

    Returns:
        A function of the operands and of the cotangents of those results that are inexact.
    """
    ins = list(map(_jax.aval, eqn.invars))
    outs = list(map(_jax.aval, eqn.outvars))

    def derivative(moving: Sequence[int]) -> ClosedJaxpr:
        def pull(operands: list[Any], cotangents: list[Any]) -> Any:
            def apply(*moved: Any) -> list[Any]:
                values = dict(enumerate(operands)) | dict(zip(moving, moved, strict=True))
                out = _jax.bind(eqn, list(values.values()))
                return [out[i] for i in inexact(out)]

            _, pull = jax.vjp(apply, *(operands[i] for i in moving))
            return pull(cotangents)

        return flatten(pull, ins, [outs[i] for i in inexact(outs)])

    moving = inexact(ins) if moving is None else moving
    while True:
        try:
            return derivative(moving), moving
        except Exception as error:
            # JAX refuses a derivative by what a rule closes over; anything else is an error of the
            # rule's own.
            if not _jax.is_of_closed_over(error) or not moving:
                raise
            moving = moving[1:]
