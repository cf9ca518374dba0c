"""How equations that change shapes, or work along some axes, run on parts of an array.

For example, an array of shape (6, 4) in 3 parts along axis 0 is transposed part by part, and the
results are 3 parts of an array of shape (4, 6) along axis 1.
"""

import math
from typing import Any

from jvpipe import _jax
from jvpipe._jax import JaxprEqn
from jvpipe.programs.cut_arrays import cut_shape
from jvpipe.trace.axes import along_after

REDUCTIONS = frozenset(
    f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum", "xor")
)
"""Reductions along axes; the same reduction combines the results of parts."""
_SIZES = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "slice": "limit_indices"}
"""The parameter with the sizes of a result, which are smaller for a part."""
_CUMULATIVE = ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")
_OTHERS = ("argmax", "argmin", "pad", "rev", "sort", "squeeze", "transpose")
_IN_PARTS = REDUCTIONS.union(_SIZES, _CUMULATIVE, _OTHERS)
"""Equations that run on each part separately if they leave the order of the parts as it is."""


def on_a_part(
    eqn: JaxprEqn,
    axis: int,
    count: int,
) -> tuple[dict[str, Any], int] | None:
    """Returns how an equation runs on each part of its operand separately.

    Args:
        eqn: the equation.
        axis: the axis along which the operand is cut.
        count: the number of parts, at least 2.

    Returns:
        The changed parameters of the equation that runs on a part, and the axis along which the
        result is then cut; None if a part of the result needs several parts of the operand, or if
        the equation is not in `_IN_PARTS`.
    """
    name = eqn.primitive.name
    if name not in _IN_PARTS:
        return None
    cut = _reshaped(eqn, axis, count) if name == "reshape" else axis
    # Parts follow one another along an axis as examples do, so the rules about examples hold.
    after = along_after(eqn, [axis], [cut])
    if isinstance(after, str) or after[0] is None:
        return None
    key = _SIZES.get(name)
    return {key: cut_shape(eqn.params[key], after[0], count)} if key else {}, after[0]


def _reshaped(eqn: JaxprEqn, axis: int, count: int) -> int | None:
    """Finds the axis of a reshaped array along which the parts of the operand stay separate.

    The sizes before this axis must have the same product as the sizes before the operand's axis,
    and the number of parts must divide the size of this axis.
    """
    # Example: [2, 6, 5] in 3 parts along axis 1 becomes [2, 3, 10] in 3 parts along axis 1. The
    # product before both axes is 2, and the size 3 is divisible by the number of parts.
    if eqn.params["dimensions"] is not None:
        return None
    before = math.prod(_jax.aval(eqn.invars[0]).shape[:axis])
    shape = eqn.params["new_sizes"]
    fits = (t for t, n in enumerate(shape) if math.prod(shape[:t]) == before and n % count == 0)
    return next(fits, None)
