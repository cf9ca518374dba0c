"""Rules for running equations that change shapes, or work along some axes, on parts of an array.

A rule says how an equation runs on each part of its operand separately. For example, an array of
shape (6, 4) in 3 parts along axis 0 is transposed part by part, and the results are 3 parts of an
array of shape (4, 6) along axis 1.
"""

import math
from collections.abc import Callable
from typing import Any

from jvpipe import _jax
from jvpipe._jax import JaxprEqn
from jvpipe.programs.cut_arrays import cut_shape

Params = dict[str, Any]


def on_a_part(
    eqn: JaxprEqn,
    axis: int,
    count: int,
) -> tuple[Params, int] | None:
    """Returns how an equation runs on each part of its operand separately.

    Args:
        eqn: the equation.
        axis: the axis along which the operand is cut.
        count: the number of parts.

    Returns:
        The changed parameters of the equation that runs on a part, and the axis along which the
        result is then cut; None if a part of the result needs several parts of the operand, or if
        the equation has no rule.
    """
    rule = _RULES.get(eqn.primitive.name)
    return None if rule is None else rule(eqn, axis, count)


_Rule = Callable[[JaxprEqn, int, int], tuple[Params, int] | None]
"""A rule for some equations, with the arguments and results of `on_a_part`."""


def _broadcast_in_dim(
    eqn: JaxprEqn,
    axis: int,
    count: int,
) -> tuple[Params, int]:
    """Returns the axis's position in the result, and the shape of a part of the result."""
    target = int(eqn.params["broadcast_dimensions"][axis])
    shape = cut_shape(eqn.params["shape"], target, count)
    return {"shape": shape}, target


def _reshape(
    eqn: JaxprEqn,
    axis: int,
    count: int,
) -> tuple[Params, int] | None:
    """Finds the axis of a reshaped array along which the parts of the operand stay separate.

    The sizes before this axis must have the same product as the sizes before the operand's axis,
    and the number of parts must divide the size of this axis.
    """
    # Example: [2, 6, 5] in 3 parts along axis 1 becomes [2, 3, 10] in 3 parts along axis 1. The
    # product before both axes is 2, and the size 3 is divisible by the number of parts.
    if eqn.params["dimensions"] is not None:
        return None
    operand = _jax.aval(eqn.invars[0])
    before = math.prod(operand.shape[:axis])
    shape = eqn.params["new_sizes"]
    for target, size in enumerate(shape):
        is_there = math.prod(shape[:target]) == before
        if is_there and size % count == 0:
            return {"new_sizes": cut_shape(shape, target, count)}, target
    return None


def _transpose(
    eqn: JaxprEqn,
    axis: int,
    count: int,
) -> tuple[Params, int]:
    """Returns the axis's position in the result."""
    permutation = list(eqn.params["permutation"])
    return {}, permutation.index(axis)


def _without(name: str) -> _Rule:
    """Returns the rule for equations that remove the axes in their parameter `name`."""

    def shaped(
        eqn: JaxprEqn,
        axis: int,
        count: int,
    ) -> tuple[Params, int] | None:
        """Follows the axis past the removed axes; None if the axis itself is removed.

        Args:
            eqn: the equation.
            axis: the axis along which the operand is cut.
            count: how many parts there are.
        """
        removed = eqn.params[name]
        if axis in removed:
            return None
        before = sum(int(d < axis) for d in removed)
        return {}, axis - before

    return shaped


def _along(name: str) -> _Rule:
    """Returns the rule for equations that work along the axes in their parameter `name`."""

    def shaped(
        eqn: JaxprEqn,
        axis: int,
        count: int,
    ) -> tuple[Params, int] | None:
        """Leaves the axis where it is; None if the equation works along it.

        Args:
            eqn: the equation.
            axis: the axis along which the operand is cut.
            count: how many parts there are.
        """
        axes = eqn.params[name]
        works_along = axis in axes if isinstance(axes, tuple) else axis == axes
        return None if works_along else ({}, axis)

    return shaped


def _slice(
    eqn: JaxprEqn,
    axis: int,
    count: int,
) -> tuple[Params, int] | None:
    """Slices each part along the other axes, if the axis itself is not sliced."""
    operand = _jax.aval(eqn.invars[0])
    result = _jax.aval(eqn.outvars[0])
    if result.shape[axis] != operand.shape[axis]:
        return None
    limits = cut_shape(eqn.params["limit_indices"], axis, count)
    return {"limit_indices": limits}, axis


def _pad(
    eqn: JaxprEqn,
    axis: int,
    count: int,
) -> tuple[Params, int] | None:
    """Pads each part along the other axes, if the axis itself is not padded."""
    padding = eqn.params["padding_config"][axis]
    return None if any(padding) else ({}, axis)


REDUCTIONS = frozenset(
    f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum", "xor")
)
"""Reductions along axes; the same reduction combines the results of parts."""
_CUMULATIVE = ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")
_RULES: dict[str, _Rule] = {
    **dict.fromkeys([*REDUCTIONS, "argmax", "argmin"], _without("axes")),
    **dict.fromkeys(_CUMULATIVE, _along("axis")),
    "broadcast_in_dim": _broadcast_in_dim,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "slice": _slice,
    "sort": _along("dimension"),
    "squeeze": _without("dimensions"),
    "transpose": _transpose,
}
