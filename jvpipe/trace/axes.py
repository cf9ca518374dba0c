"""Finds which axis of an equation's result holds the examples, given the axes of its operands.

An axis holds the examples if the examples follow one another along this axis. An example
may have several rows there, which must be neighbors. Below, `a x b` is one axis, made of
the axes a and b by a reshape:

    [examples, tokens]     along axis 0          [tokens, examples]     along axis 1
    [examples x tokens]    along axis 0          [tokens x examples]    along no axis

Each class of primitives has a rule, which follows the operands' axes by the parameters and shapes
of the equation. Equations without a rule are refused. To support another primitive, add it to a
class in `_CLASSES`, or give it a case in `_followed` or `_moved`.
"""

import math
from collections.abc import Sequence

import numpy as np

from jvpipe import _jax
from jvpipe._jax import JaxprEqn

Axis = int | None
Followed = Sequence[Axis | np.integer] | str
"""The axis of the examples in each result, None if a result has no such axis. If the examples
cannot be followed, a text that says why. An axis may be a NumPy integer, as in vmap's parameters.
"""

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


_CLASS_OF = {name: kind for kind, names in _CLASSES.items() for name in names.split()}
"""The class of each primitive that has one."""


def grown_axis(
    shape: Sequence[int],
    other: Sequence[int],
    examples: int,
    fewer: int,
) -> Axis | str:
    """Returns the axis of a value whose size follows the number of examples.

    Args:
        shape: the shape of the value in a trace on some number of examples.
        other: its shape in a trace on another number.
        examples: the number of examples of the first trace.
        fewer: the number of examples of the other trace.

    Returns:
        None if no size differs. If sizes differ in any other way, a text that says so.

    >>> grown_axis((4, 8), (2, 8), 4, 2), grown_axis((8,), (8,), 4, 2)
    (0, None)
    """
    pairs = zip(shape, other, strict=False)
    axes = [axis for axis, (a, b) in enumerate(pairs) if a != b]
    same_rank = len(shape) == len(other)
    if same_rank and not axes:
        return None
    if same_rank and len(axes) == 1:
        (axis,) = axes
        if shape[axis] * fewer == other[axis] * examples:
            return axis
    return f"makes {list(shape)} of {examples} examples and {list(other)} of {fewer}"


def along_after(
    eqn: JaxprEqn,
    axes: Sequence[Axis],
    grown: Sequence[Axis],
) -> Sequence[Axis] | str:
    """Returns the axis of the examples in each result of an equation.

    Args:
        eqn: an equation with at least one operand that has an axis of the examples.
        axes: the axis of the examples in each operand; None for operands without examples.
        grown: for each result, the axis whose size grows with the number of examples; None if no
            axis does.

    Returns:
        For each result, the axis; None if the result has no such axis. If the examples
        cannot be followed, a text that says why.
    """
    followed = _followed(eqn, axes, grown)
    if isinstance(followed, str):
        return followed
    return [None if axis is None else int(axis) for axis in followed]


def _followed(
    eqn: JaxprEqn,
    axes: Sequence[Axis],
    grown: Sequence[Axis],
) -> Followed:
    name, params = eqn.primitive.name, eqn.params
    first = next(axis for axis in axes if axis is not None)
    same = all(axis in (None, first) for axis in axes)
    rank = len(_jax.aval(eqn.invars[0]).shape)
    match _CLASS_OF.get(name, name):
        case "elementwise":
            if not same:
                return "joins values that have their examples along different axes"
            return _all(first, grown)
        case "keys":
            return _all(first, grown)
        case "reduces":
            removed = params["axes"]
            before = sum(axis < first for axis in removed)
            after = None if first in removed else first - before
            return [after] * len(grown)
        case "runs":
            if params["axis"] == first:
                return "sums up from example to example"
            return _all(first, grown)
        case "windows":
            size = params["window_dimensions"][first]
            stride = params["window_strides"][first]
            is_of_one = size == stride == 1
            if is_of_one and tuple(params["padding"][first]) == (0, 0):
                return _all(first, grown)
            return "looks at several examples"
        case "reshape":
            return _reshaped(eqn, first, grown[0])
        case "dot_general":
            return _product(eqn, axes)
        case "conv_general_dilated":
            return _convolved(eqn, axes)
        case "gather":
            return _gathered(eqn, axes)
        case "scatter" | "scatter-add":
            return _scattered(eqn, axes)
        case "sort":
            is_beside = same and params["dimension"] != first
            return _all(first, grown) if is_beside else "sorts examples"
        case "fft":
            is_before = first < rank - len(params["fft_lengths"])
            return _all(first, grown) if is_before else "transforms over examples"
        case "top_k":
            is_beside = params.get("axis", rank - 1) != first
            return _all(first, grown) if is_beside else "sorts examples"
        case _:
            return (
                _moved(eqn, first) or "is an operation that jvpipe cannot follow examples through"
            )


def _all(axis: int, grown: Sequence[Axis]) -> Followed:
    """Returns the axis for each result, if just this axis grows with the number of examples."""
    if any(size_follows != axis for size_follows in grown):
        return "changes the number of examples"
    return [axis] * len(grown)


def _moved(eqn: JaxprEqn, before: int) -> Followed | None:
    """Returns the axis after an equation that changes shape or order; None for other equations."""
    name, params = eqn.primitive.name, eqn.params
    shape = _jax.aval(eqn.invars[0]).shape
    match name:
        case "transpose":
            return [tuple(params["permutation"]).index(before)]
        case "broadcast_in_dim":
            return [params["broadcast_dimensions"][before]]
        case "squeeze":
            return [before - sum(axis < before for axis in params["dimensions"])]
        case "expand_dims":
            added = params["dimensions"]
            rank = len(shape) + len(added)
            kept = [axis for axis in range(rank) if axis not in added]
            return [kept[before]]
        case "concatenate":
            return [before] if params["dimension"] != before else "puts examples beside others"
        case "stack":
            return [before + (params["axis"] <= before)]
        case "split":
            if params["axis"] == before:
                return "takes some of the examples"
            return [before] * len(eqn.outvars)
        case "rev":
            return (
                [before]
                if before not in params["dimensions"]
                else "reverses the order of the examples"
            )
        case "pad":
            is_plain = tuple(params["padding_config"][before]) == (0, 0, 0)
            return [before] if is_plain else "adds examples"
        case "slice" | "dynamic_slice" if _jax.aval(eqn.outvars[0]).shape[before] == shape[before]:
            return [before]
        case "slice" | "dynamic_slice" | "dynamic_update_slice":
            return "takes some of the examples"
        case _:
            return None


def _reshaped(eqn: JaxprEqn, axis: int, grown: Axis) -> Followed:
    """Returns the axis after a reshape.

    The product of the sizes in front of the examples' axis must be the same before and
    after. Then the new axis begins where the old one began, and it holds whole examples in
    their order.

    Args:
        eqn: the reshape.
        axis: the axis of the examples in its operand.
        grown: the axis of the result whose size grows with the number of examples, if any.
    """
    before = _jax.aval(eqn.invars[0]).shape
    after = _jax.aval(eqn.outvars[0]).shape
    in_front = math.prod(before[:axis])
    if grown is None or math.prod(after[:grown]) != in_front:
        return "mixes the axis of the examples with others"
    return [grown]


def _product(eqn: JaxprEqn, axes: Sequence[Axis]) -> Followed:
    """Follows the axis through a product, in three cases.

    - The product contracts the examples' axis of both operands.
    - The examples' axis is a batch axis of both operands.
    - Only one operand depends on examples, and the product does not contract their axis.
    """
    # If each example of one operand meets the same example of the other, contracting them is a sum
    # over the examples.
    contracted, batched = eqn.params["dimension_numbers"]
    left, right = axes
    inside = left in contracted[0], right in contracted[1]
    if any(inside):
        paired = all(inside) and contracted[0].index(left) == contracted[1].index(right)
        return [None] if paired else "multiplies examples by values of other examples"
    if left is not None and right is not None:
        both_batched = left in batched[0] and right in batched[1]
        if both_batched and batched[0].index(left) == batched[1].index(right):
            return [batched[0].index(left)]
        return "multiplies each example with every other"
    side, axis = (0, left) if left is not None else (1, right)
    assert axis is not None
    if axis in batched[side]:
        return [batched[side].index(axis)]
    ranks = [len(_jax.aval(x).shape) for x in eqn.invars]
    bound = {*contracted[side], *batched[side]}
    free = [i for i in range(ranks[side]) if i not in bound]
    # The result has the batch axes, then the free axes of the left operand, then of the right one.
    before = ranks[0] - len(contracted[0]) if side else len(batched[0])
    return [before + free.index(axis)]


def _convolved(eqn: JaxprEqn, axes: Sequence[Axis]) -> Followed:
    """Follows the axis through a convolution: examples must be the batch axis of its input."""
    numbers, (inputs, kernel) = eqn.params["dimension_numbers"], axes
    is_plain = kernel is None and eqn.params["batch_group_count"] == 1
    if is_plain and inputs == numbers.lhs_spec[0]:
        return [numbers.out_spec[0]]
    return "convolves over examples"


def _gathered(eqn: JaxprEqn, axes: Sequence[Axis]) -> Followed:
    """Follows the axis through a lookup.

    An example's indices may look up rows of a table that depends on no example, or the example's
    own part of the operand. Indices that depend on no example may look up rows in every example.
    """
    numbers = eqn.params["dimension_numbers"]
    sizes = eqn.params["slice_sizes"]
    operand, indices = axes
    rank = len(_jax.aval(eqn.outvars[0]).shape)
    # The result's axes that come from the indices: all axes of the indices except the last.
    outer = [i for i in range(rank) if i not in numbers.offset_dims]
    if indices is not None:
        if indices >= len(outer):
            return "takes an index from several examples"
        batching = numbers.operand_batching_dims, numbers.start_indices_batching_dims
        if operand is None or (operand, indices) in [*zip(*batching, strict=True)]:
            return [outer[indices]]
        return "looks up other examples: write jnp.take_along_axis instead of x[jnp.arange(n), i]"
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    assert operand is not None
    count = _jax.aval(eqn.invars[0]).shape[operand]
    if operand in dropped or sizes[operand] != count:
        return "takes some of the examples"
    inner = [i for i in range(len(sizes)) if i not in dropped]
    return [numbers.offset_dims[inner.index(operand)]]


def _scattered(eqn: JaxprEqn, axes: Sequence[Axis]) -> Followed:
    """Follows the axis through a scatter.

    Each example may be written or added to its own part of the operand. Examples may also be added
    up in an operand that depends on no example.
    """
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = axes
    rank = len(_jax.aval(eqn.invars[2]).shape)
    outer = [i for i in range(rank) if i not in numbers.update_window_dims]
    # The axis of the updates that corresponds to the examples' axis in the indices.
    beside = None
    if indices is not None and indices < len(outer):
        beside = outer[indices]
    if operand is None:
        adds = eqn.primitive.name == "scatter-add"
        are_paired = updates in outer and beside in (None, updates)
        return [None] if adds and are_paired else "puts examples in one place"
    if operand in numbers.operand_batching_dims:
        batching = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
        are_paired = (operand, indices) in [*zip(*batching, strict=True)]
        return [operand] if are_paired and updates in (None, beside) else "adds to other examples"
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    shape = _jax.aval(eqn.invars[0]).shape
    inner = [i for i in range(len(shape)) if i not in dropped]
    is_indexed = indices is not None or operand in numbers.scatter_dims_to_operand_dims
    if operand not in inner or is_indexed:
        return "adds to examples by their numbers"
    window = numbers.update_window_dims[inner.index(operand)]
    whole = _jax.aval(eqn.invars[2]).shape[window] == shape[operand]
    if whole and updates in (None, window):
        return [operand]
    return "adds to some of the examples"
