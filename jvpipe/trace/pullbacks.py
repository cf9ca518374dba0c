"""The derivative, as a jaxpr, of an equation with a user's derivative rule."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, JaxprEqn
from jvpipe.trace.flatten import flatten


def inexact(values: Sequence[Any]) -> list[int]:
    """Returns the positions of the values that are of inexact type."""
    return [i for i, v in enumerate(values) if jnp.issubdtype(v.dtype, jnp.inexact)]


def pullback(
    eqn: JaxprEqn, moving: Sequence[int] | None = None
) -> tuple[ClosedJaxpr, Sequence[int]]:
    """Returns the derivative of an equation, and the operands that it is taken with respect to.

    The first operands may be arrays that the rule closes over. JAX refuses to differentiate with
    respect to them and does not say how many there are. So operands are removed from the front of
    `moving` until JAX accepts the rest.

    Args:
        eqn: an equation with a derivative rule.
        moving: the positions of the operands to differentiate with respect to; None for all
            operands of inexact type.

    Returns:
        A jaxpr from the operands and the cotangents of the inexact results to the cotangents of
        operands; and the positions of these operands.
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
            # Any other error comes from the rule itself.
            if not _jax.is_of_closed_over(error) or not moving:
                raise
            moving = moving[1:]
