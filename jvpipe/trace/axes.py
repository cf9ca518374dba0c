"""The axis of the examples, followed through an equation: which axis of each result has a part for each of them.

An axis holds the examples one after another, perhaps several rows of each: [examples, tokens] and [examples x tokens]
do, [tokens, examples] does along its last axis, [tokens x examples] does not.
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from jvpipe import _jax
from jvpipe._jax import JaxprEqn

Axis = int | None
Found = Sequence[Axis | np.integer] | str
"""Of each result its axis, None for one that has none; or why examples do not stay apart. vmap counts axes in numpy."""

_CLASSES = {
    "reduces": """
        reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin
    """,
    "runs": """
        cumsum cumprod cummax cummin cumlogsumexp
    """,
    "windows": """
        reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_gather_add
    """,
    "keys": """
        random_bits random_split random_fold_in random_wrap random_unwrap random_seed random_clone
    """,
    "elementwise": """
        abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj convert_element_type
        copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 floor ge gt imag integer_pow is_finite le lgamma
        log log1p expm1 logistic lt max min mul mulhi name ne neg nextafter not optimization_barrier or population_count
        pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
        sin sinh sqrt square stop_gradient sub tan tanh xor bessel_i0e bessel_i1e igamma igammac
        regularized_incomplete_beta polygamma zeta random_gamma bitcast_convert_type sharding_constraint debug_callback
        debug_print
    """,
}


@cache
def _class_of() -> dict[str, str]:
    return {name: kind for kind, names in _CLASSES.items() for name in names.split()}


def along_after(eqn: JaxprEqn, axes: Sequence[Axis], grown: Sequence[Axis]) -> Sequence[Axis] | str:
    """Follows the axis of the examples.

    Args:
        eqn: an equation of which at least one operand has such an axis.
        axes: of each operand; None for what depends on no example.
        grown: of each result, the axis whose size follows the number of examples, if there is one.
    """
    followed = _followed(eqn, axes, grown)
    return (
        followed
        if isinstance(followed, str)
        else [None if axis is None else int(axis) for axis in followed]
    )


def _followed(eqn: JaxprEqn, axes: Sequence[Axis], grown: Sequence[Axis]) -> Found:
    name, params = eqn.primitive.name, eqn.params
    own = next(axis for axis in axes if axis is not None)
    same = all(axis in (None, own) for axis in axes)
    match _class_of().get(name):
        case "elementwise":
            return (
                _all(own, grown)
                if same
                else "joins values that have their examples along different axes"
            )
        case "keys":
            return _all(own, grown)
        case "reduces":
            gone = params["axes"]
            return [None if own in gone else own - sum(axis < own for axis in gone)] * len(grown)
        case "runs":
            return _all(own, grown) if params["axis"] != own else "sums up from example to example"
        case "windows":
            plain = params["window_dimensions"][own] == 1 and tuple(params["padding"][own]) == (
                0,
                0,
            )
            return (
                _all(own, grown)
                if plain and params["window_strides"][own] == 1
                else "looks at several examples"
            )
        case _:
            return _others(eqn, axes, own, grown, same=same)


def _others(
    eqn: JaxprEqn, axes: Sequence[Axis], own: int, grown: Sequence[Axis], *, same: bool
) -> Found:
    """Follows the axis through what is of a kind of its own."""
    match eqn.primitive.name:
        case "reshape":
            return _reshaped(eqn, own, grown[0])
        case "dot_general":
            return _product(eqn, axes)
        case "conv_general_dilated":
            return _convolved(eqn, axes)
        case "gather":
            return _gathered(eqn, axes)
        case "scatter" | "scatter-add":
            return _scattered(eqn, axes)
        case "sort":
            return _all(own, grown) if same and eqn.params["dimension"] != own else "sorts examples"
        case "fft":
            rank, last = len(_jax.aval(eqn.invars[0]).shape), len(eqn.params["fft_lengths"])
            return _all(own, grown) if own < rank - last else "transforms over examples"
        case "top_k":
            last = len(_jax.aval(eqn.invars[0]).shape) - 1
            return _all(own, grown) if eqn.params.get("axis", last) != own else "sorts examples"
        case _:
            return _moved(eqn, own) or "is an operation that jvpipe cannot follow examples through"


def _all(axis: int, grown: Sequence[Axis]) -> Found:
    """Every result has the axis of the operands."""
    return (
        [axis for _ in grown] if all(g == axis for g in grown) else "changes the number of examples"
    )


def _moved(eqn: JaxprEqn, own: int) -> Found | None:
    """The axis after a change of shape, or of order; None for other operations."""
    name, params = eqn.primitive.name, eqn.params
    shape = _jax.aval(eqn.invars[0]).shape
    match name:
        case "transpose":
            return [tuple(params["permutation"]).index(own)]
        case "broadcast_in_dim":
            return [params["broadcast_dimensions"][own]]
        case "squeeze":
            return [own - sum(axis < own for axis in params["dimensions"])]
        case "expand_dims":
            kept = [
                i
                for i in range(len(shape) + len(params["dimensions"]))
                if i not in params["dimensions"]
            ]
            return [kept[own]]
        case "concatenate":
            return [own] if params["dimension"] != own else "puts examples beside others"
        case "stack":
            return [own + (params["axis"] <= own)]
        case "split":
            return (
                [own] * len(eqn.outvars) if params["axis"] != own else "takes some of the examples"
            )
        case "rev":
            return [own] if own not in params["dimensions"] else "turns the examples round"
        case "pad":
            return [own] if tuple(params["padding_config"][own]) == (0, 0, 0) else "adds examples"
        case "slice" | "dynamic_slice" | "dynamic_update_slice":
            whole = _jax.aval(eqn.outvars[0]).shape[own] == shape[own]
            return (
                [own] if whole and name != "dynamic_update_slice" else "takes some of the examples"
            )
        case _:
            return None


def _reshaped(eqn: JaxprEqn, own: int, grown: Axis) -> Found:
    """The axis after a reshape: if it begins where the one before began, it holds whole examples, one after another."""
    before, after = _jax.aval(eqn.invars[0]).shape, _jax.aval(eqn.outvars[0]).shape
    if grown is None or math.prod(before[:own]) != math.prod(after[:grown]):
        return "mixes the axis of the examples with others"
    return [grown]


def _product(eqn: JaxprEqn, axes: Sequence[Axis]) -> Found:
    (contracted, batched) = eqn.params["dimension_numbers"]
    left, right = axes
    inside = left in contracted[0], right in contracted[1]
    if any(inside):
        paired = all(inside) and contracted[0].index(left) == contracted[1].index(right)
        return [None] if paired else "multiplies examples with what is not theirs"
    if left is not None and right is not None:
        paired = (
            left in batched[0]
            and right in batched[1]
            and batched[0].index(left) == batched[1].index(right)
        )
        return [batched[0].index(left)] if paired else "multiplies each example with every other"
    side, own = (0, left) if left is not None else (1, right)
    assert own is not None
    if own in batched[side]:
        return [batched[side].index(own)]
    ranks = [len(_jax.aval(x).shape) for x in eqn.invars]
    free = [i for i in range(ranks[side]) if i not in contracted[side] and i not in batched[side]]
    before = len(batched[0]) + (ranks[0] - len(contracted[0]) - len(batched[0]) if side else 0)
    return [before + free.index(own)]


def _convolved(eqn: JaxprEqn, axes: Sequence[Axis]) -> Found:
    numbers = eqn.params["dimension_numbers"]
    alone = axes[1] is None and eqn.params["batch_group_count"] == 1
    return (
        [numbers.out_spec[0]]
        if alone and axes[0] == numbers.lhs_spec[0]
        else "convolves over examples"
    )


def _gathered(eqn: JaxprEqn, axes: Sequence[Axis]) -> Found:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices = axes
    rank = len(_jax.aval(eqn.outvars[0]).shape)
    outer = [
        i for i in range(rank) if i not in numbers.offset_dims
    ]  # the axes of the indices, but for the last
    if indices is not None:
        if indices >= len(outer):
            return "takes an index from several examples"
        if operand is None:
            return [outer[indices]]
        paired = [
            *zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        ]
        return (
            [outer[indices]]
            if (operand, indices) in paired
            else (
                "looks other examples up: write jnp.take_along_axis instead of x[jnp.arange(n), i]"
            )
        )
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    assert operand is not None
    if operand in gone or sizes[operand] != _jax.aval(eqn.invars[0]).shape[operand]:
        return "takes some of the examples"
    inner = [i for i in range(len(sizes)) if i not in gone]
    return [numbers.offset_dims[inner.index(operand)]]


def _scattered(eqn: JaxprEqn, axes: Sequence[Axis]) -> Found:
    """The axis after values are added where indices say: to examples of their own, or to what has none."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = axes
    rank = len(_jax.aval(eqn.invars[2]).shape)
    outer = [i for i in range(rank) if i not in numbers.update_window_dims]
    batched = [
        *zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    ]
    own = None if indices is None or indices >= len(outer) else outer[indices]
    if operand is None:
        adds = eqn.primitive.name == "scatter-add"
        paired = updates in outer and own in (None, updates)
        return [None] if adds and paired else "puts examples in one place"
    if operand is not None and operand in numbers.operand_batching_dims:
        paired = (operand, indices) in batched and updates in (None, own)
        return [operand] if paired else "adds to other examples"
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    shape = _jax.aval(eqn.invars[0]).shape
    inner = [i for i in range(len(shape)) if i not in gone]
    if (
        operand not in inner
        or indices is not None
        or operand in numbers.scatter_dims_to_operand_dims
    ):
        return "adds to examples by their numbers"
    window = numbers.update_window_dims[inner.index(operand)]
    whole = _jax.aval(eqn.invars[2]).shape[window] == shape[operand]
    return [operand] if whole and updates in (None, window) else "adds to some of the examples"
