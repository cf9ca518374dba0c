"""Convolutions with their axes in the order in which a library takes them.

At the top of a program XLA on CPUs puts transposes around a convolution and hands it to a library. In a function that
is called it does not: there a convolution whose axes lie otherwise is a loop, which is slow and sums in another order.

    batch, features, rows  ->  batch, rows, features       the operand, and back again the result
    out, in, rows          ->  rows, in, out               the filter
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jvpipe import _jax
from jvpipe._jax import ClosedJaxpr, JaxprEqn
from jvpipe.trace import jaxprs


def in_order(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the same function with transposes around its convolutions, as XLA would have put them there.

    >>> x, w = jax.numpy.ones((1, 2, 8)), jax.numpy.ones((3, 2, 5))
    >>> closed = in_order(jax.make_jaxpr(lambda x, w: jax.lax.conv(x, w, (1,), "SAME"))(x, w))
    >>> [(str(eqn.primitive), eqn.outvars[0].aval.shape) for eqn in closed.eqns]
    [('transpose', (1, 8, 2)), ('transpose', (5, 2, 3)), ('conv_general_dilated', (1, 8, 3)), ('transpose', (1, 3, 8))]
    """
    if all(eqn.primitive.name != "conv_general_dilated" for eqn in closed.jaxpr.eqns):
        return closed

    def run(*values: Any) -> list[Any]:
        jaxpr = closed.jaxpr
        env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env |= zip(jaxpr.invars, values, strict=True)
        jaxprs.run_jaxpr(jaxpr.eqns, env, _applied)
        return jaxprs.read_by(jaxpr.outvars, env)

    return jax.make_jaxpr(run)(*closed.in_avals)


def _applied(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Applies an equation to values."""
    if eqn.primitive.name != "conv_general_dilated":
        return _jax.bind(eqn, values)
    numbers = eqn.params["dimension_numbers"]
    operand, filters, result = (
        _last(*numbers.lhs_spec),
        (*numbers.rhs_spec[2:], *numbers.rhs_spec[1::-1]),
        _last(*numbers.out_spec),
    )
    usual = tuple(range(len(operand)))
    inner = type(numbers)(_first(usual), (usual[-1], usual[-2], *usual[:-2]), _first(usual))
    moved = [_moved(x, axes) for x, axes in zip(values, (operand, filters), strict=True)]
    turned = eqn.replace(params=eqn.params | {"dimension_numbers": inner})
    (out,) = _jax.bind(turned, moved)
    return [_moved(out, tuple(np.argsort(result).tolist()))]


def _last(batch: int, feature: int, *space: int) -> tuple[int, ...]:
    return (batch, *space, feature)


def _first(usual: Sequence[int]) -> tuple[int, ...]:
    """Returns the axes of an array whose features come last, as JAX tells them."""
    return (usual[0], usual[-1], *usual[1:-1])


def _moved(x: Any, axes: tuple[int, ...]) -> Any:
    return x if axes == tuple(range(len(axes))) else jax.lax.transpose(x, axes)
