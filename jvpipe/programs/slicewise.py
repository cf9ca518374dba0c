"""Runs equations slice by slice on arrays that stack the parameters of several layers.

The optimizer sees a stacked array, and each layer owns a slice of it. An array whose slices lie
apart is passed on as `Rows`. How an equation runs on `Rows` depends on its work along the axis of
the layers:

    the equation ...              runs on ...                             and yields
    works along other axes        each slice                              Rows
    reduces over the layers       each slice, then the stacked results    an array
    does anything else            the whole array                         an array

Whether values of different layers may meet in an equation is decided in
`jvpipe.programs.ownership`. An array that is the same all along an axis is passed on as `Even`, so
that its slices are known without making the whole array.

An equation without a rule here runs on the whole array. Its result is right, but values of
different layers meet in it, and so the optimizer may be refused.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import JaxprEqn
from jvpipe.programs.optimizer_trace import scope_of, straight_body
from jvpipe.programs.scans import scan_options
from jvpipe.trace import jaxprs
from jvpipe.trace.primitives import is_elementwise

Shape = tuple[int, ...]
Params = dict[str, Any]


@partial(jax.tree_util.register_dataclass, data_fields=["pieces"], meta_fields=["axis", "thin"])
@dataclass(frozen=True)
class Rows:
    """An array in two or more parts of equal size along an axis.

    Attributes:
        axis: the axis along which the array is cut.
        pieces: the parts; without that axis if they are thin.
        thin: whether each part has one element along the axis, and its piece lacks that axis.
    """

    axis: int
    pieces: tuple[Any, ...]
    thin: bool = False

    def is_cut(self, axis: int, count: int) -> bool:
        """Tells whether the array is cut along a given axis into a given number of parts."""
        return self.axis == axis and len(self.pieces) == count

    @cached_property
    def parts(self) -> tuple[Any, ...]:
        """The parts, all with the axis along which the array is cut."""
        if not self.thin:
            return self.pieces
        return tuple(jax.lax.expand_dims(x, (self.axis,)) for x in self.pieces)

    @cached_property
    def whole(self) -> jax.Array:
        """The array."""
        return jax.lax.concatenate(self.parts, self.axis)


@dataclass(frozen=True)
class Even:
    """An array that is the same all along some axes; along these `one` has a single element."""

    shape: Shape
    one: jax.Array

    @cached_property
    def whole(self) -> jax.Array:
        """The array."""
        return _broadcast(self.one, self.shape)


def whole(value: Any) -> Any:
    """Returns the whole array that a value stands for."""
    return value.whole if isinstance(value, Rows | Even) else value


def stacked(slices: Sequence[Any]) -> Any:
    """Returns the array that has these slices along its first axis.

    >>> import jax.numpy as jnp
    >>> whole(stacked([jnp.ones(2), jnp.zeros(2)])).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    if len(slices) == 1:
        return jax.lax.expand_dims(slices[0], (0,))
    return Rows(0, tuple(slices), thin=True)


def parts_of(value: Any, axis: int, count: int) -> Sequence[Any]:
    """Returns parts of equal size of an array along an axis.

    Args:
        value: the array.
        axis: the axis along which it is cut.
        count: the number of parts.
    """
    if isinstance(value, Rows) and value.is_cut(axis, count):
        return value.parts
    if count == 1:
        return (whole(value),)
    if isinstance(value, Even) and value.one.shape[axis] == 1:
        part = _broadcast(value.one, _cut(value.shape, axis, count))
        return (part,) * count
    array = whole(value)
    size = array.shape[axis] // count
    starts = range(0, size * count, size)
    return tuple(jax.lax.slice_in_dim(array, i, i + size, axis=axis) for i in starts)


def slices_of(value: Any, axis: int, count: int) -> Sequence[Any]:
    """Returns the slices of an array at all positions along an axis, without that axis.

    Args:
        value: the array.
        axis: the axis.
        count: the number of slices.
    """
    if isinstance(value, Rows) and value.thin and value.is_cut(axis, count):
        return value.pieces
    if isinstance(value, Even) and value.one.shape[axis] == 1:
        shape = (*value.shape[:axis], *value.shape[axis + 1 :])
        one = jax.lax.squeeze(value.one, (axis,))
        return (_broadcast(one, shape),) * count
    parts = parts_of(value, axis, count)
    return tuple(jax.lax.squeeze(x, (axis,)) for x in parts)


def apply(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Runs an equation on arrays, some of which may be `Rows` or `Even`.

    The equation comes from `straight_line`, so it has no calls and no branches.
    """
    with jax.named_scope(scope_of(eqn)):
        has_rows = any(isinstance(v, Rows) for v in values)
        results = _on_rows(eqn, values) if has_rows else _on_even(eqn, values)
        return results or _jax.bind(eqn, list(map(whole, values)))


def _on_rows(eqn: JaxprEqn, values: list[Any]) -> list[Any] | None:
    """Returns the results of an equation on `Rows`; None if it needs the whole of them."""
    name = eqn.primitive.name
    rows = next(v for v in values if isinstance(v, Rows))
    rank = len(_jax.aval(eqn.invars[0]).shape)
    along_others = name in _MATRIX and rows.axis < rank - 2  # matrices lie in the last two axes
    if is_elementwise(eqn) or along_others:
        return _on_each(
            eqn,
            values,
            rows,
            thin=rows.thin and not along_others,
        )
    # Each slice is reduced by itself, then the results are reduced in the order of the layers.
    if name in _SUMS and rows.axis in eqn.params["axes"]:
        left = [_jax.bind(eqn, [part])[0] for part in rows.parts]
        over_layers = _with(eqn, {"axes": (0,)})
        return _jax.bind(over_layers, [_stacked(left)])
    if name == "dot_general":
        return [_product(eqn, values)]
    if name == "scan":
        return _scan(eqn, values)
    arrays = len(values) - (name == "pad")  # a pad takes its padding value, too
    if name not in _SHAPED or arrays != 1:
        return None
    shaped = _SHAPED[name](eqn, rows.axis, len(rows.pieces))
    if shaped is None:
        return None
    params, axis = shaped
    of_part = _with(eqn, params)
    results = [_jax.bind(of_part, [x, *values[1:]])[0] for x in rows.parts]
    return [Rows(axis, tuple(results))]


def _on_even(eqn: JaxprEqn, values: list[Any]) -> list[Any] | None:
    """Returns the results of a broadcast, or of an elementwise equation on `Even` arrays.

    Returns None for other equations, and for a broadcast that repeats nothing.
    """
    out = _jax.aval(eqn.outvars[0])
    if eqn.primitive.name == "broadcast_in_dim" and len(values) == 1:
        one = values[0].one if isinstance(values[0], Even) else values[0]
        # The new axes have one element: the array is the same all along them.
        sizes = [1] * len(out.shape)
        axes = eqn.params["broadcast_dimensions"]
        for axis, size in zip(axes, jax.numpy.shape(one), strict=True):
            sizes[axis] = size
        if tuple(sizes) == out.shape:
            return None
        narrow = _with(eqn, {"shape": tuple(sizes)})
        return [Even(out.shape, x) for x in _jax.bind(narrow, [one])]
    # Scalars fit arrays of any shape.
    ranked = [v for v in values if _rank_of(v)]
    are_even = bool(ranked) and all(isinstance(v, Even) for v in ranked)
    if not (are_even and is_elementwise(eqn)):
        return None
    # If all operands are the same all along an axis, so is the result. Along every other axis, the
    # `one` of the result is as long as the result itself.
    shapes = [v.one.shape for v in ranked]
    sizes = tuple(map(max, zip(*shapes, strict=True)))
    ones = [_broadcast(v.one, sizes) if isinstance(v, Even) else v for v in values]
    results = _jax.bind(eqn, ones)
    return [Even(out.shape, one) for one in results]


def _on_each(
    eqn: JaxprEqn,
    values: list[Any],
    like: Rows,
    *,
    thin: bool,
) -> list[Any]:
    """Returns the results of an equation that runs on each part by itself.

    Args:
        eqn: the equation.
        values: its operands; scalars are the same for all parts.
        like: an operand that has the axis and the number of parts.
        thin: whether the equation runs on parts without that axis.
    """
    axis, count = like.axis, len(like.pieces)

    def parts(value: Any, shape: Shape) -> Sequence[Any]:
        if not shape:
            return (value,) * count
        if shape[axis] == 1:  # the same for all parts
            one = whole(value)
            return (jax.lax.squeeze(one, (axis,)) if thin else one,) * count
        return (slices_of if thin else parts_of)(value, axis, count)

    shapes = [_jax.aval(atom).shape for atom in eqn.invars]
    # The first `zip` regroups operands by part; the second regroups the parts' results by result.
    of_operands = list(map(parts, values, shapes))
    by_part = zip(*of_operands, strict=True)
    of_parts = [_jax.bind(eqn, list(operands)) for operands in by_part]
    by_result = zip(*of_parts, strict=True)
    return [Rows(axis, pieces, thin) for pieces in by_result]


_BATCH, _CONTRACTED, _FREE = range(3)
"""The roles of an axis in a product; if two operands differ, the first in this order counts."""


def _product(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Returns a product of two arrays, at least one of which is `Rows`.

    What is computed depends on the role that the axis of the layers has for the operand that is
    `Rows`. If both operands are `Rows`, the role that stands first in this list counts:

        batch         a product per layer, with that layer's part of the other operand
        contracted    the same products, which are then added up in the order of the layers
        free          a product per layer, with the whole of the other operand
    """
    contracted, batch = eqn.params["dimension_numbers"]
    sides = [side for side in (0, 1) if isinstance(values[side], Rows)]

    def rank(side: int) -> int:
        axis = values[side].axis
        if axis in batch[side]:
            return _BATCH
        return _CONTRACTED if axis in contracted[side] else _FREE

    side = min(sides, key=rank)
    rows = values[side]
    other = values[1 - side]
    meaning = rank(side)
    count = len(rows.parts)
    # The result has the batch axes first, then the free axes of the first operand, then those of
    # the second.
    if meaning == _FREE:
        others = (whole(other),) * count
        before = len(batch[0])
        if side == 1:
            before += len(_free_axes(eqn, 0))
        position = before + _free_axes(eqn, side).index(rows.axis)
    else:
        axes = batch if meaning == _BATCH else contracted
        position = list(axes[side]).index(rows.axis)
        others = parts_of(other, int(axes[1 - side][position]), count)
    results = []
    for part, of_other in zip(rows.parts, others, strict=True):
        operands = [part, of_other] if side == 0 else [of_other, part]
        results += _jax.bind(eqn, operands)
    if meaning == _CONTRACTED:
        return jax.lax.reduce_sum(_stacked(results), axes=(0,))
    return Rows(position, tuple(results))


def _free_axes(eqn: JaxprEqn, side: int) -> list[int]:
    """Returns the axes of a product's operand that are neither contracted nor batch axes.

    The result has these axes.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    others = {*contracted[side], *batch[side]}
    rank = len(_jax.aval(eqn.invars[side]).shape)
    return [axis for axis in range(rank) if axis not in others]


def _scan(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Runs a scan whose body works on parts.

    Which carries have to be `Rows` is found by running the body on shapes: if the body leaves a
    carry in parts, the carry has to begin in the same parts, and the body is run again. The loop
    ends, because each turn takes at least one more carry apart, and none is put together again.
    """
    body = straight_body(eqn)
    constants, carry, xs = _jax.scan_operands(eqn, list(map(_without_even, values)))
    # The scan runs along the first axis of xs, so that axis cannot be cut into parts.
    xs = [whole(x) if isinstance(x, Rows) and x.axis == 0 else _moved(x, 0) for x in xs]
    carry = [_moved(c, 0) for c in carry]
    results: list[Any] = []  # of the body, as it was last run

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        # An iteration sees xs without their first axis, and its ys get one.
        inner = [_moved(x, -1) for x in xs]
        results[:] = jaxprs.evaluate(
            body,
            [*constants, *carry, *inner],
            apply,
        )
        ys = [_moved(_without_even(y), 0) for y in results[len(carry) :]]
        return [_like(x, c) for x, c in zip(results, carry, strict=False)], ys

    while True:
        scanned = partial(jax.lax.scan, step, **scan_options(eqn))
        jax.eval_shape(scanned, carry, xs)
        grown, is_settled = list(carry), True
        for i, (c, x) in enumerate(zip(carry, results, strict=False)):
            if isinstance(x, Rows) and not isinstance(c, Rows):
                grown[i], is_settled = _like(c, x), False
        if is_settled:
            carry, ys = scanned(carry, xs)
            return [*carry, *(_moved(y, 1) for y in ys)]
        carry = grown


def _without_even(value: Any) -> Any:
    return whole(value) if isinstance(value, Even) else value


def _moved(value: Any, by: int) -> Any:
    """Returns a value that is cut along an axis `by` positions later (earlier if negative)."""
    return Rows(value.axis + by, value.parts) if isinstance(value, Rows) else value


def _like(value: Any, other: Any) -> Any:
    """Returns a value that is cut into parts in the same way as another one."""
    if not isinstance(other, Rows):
        return whole(value)
    parts = parts_of(value, other.axis, len(other.parts))
    return Rows(other.axis, tuple(parts))


def _with(eqn: JaxprEqn, params: Params) -> JaxprEqn:
    return eqn.replace(params={**eqn.params, **params})


def _rank_of(value: Any) -> int:
    return jax.numpy.ndim(value.one if isinstance(value, Even) else value)


def _cut(shape: Shape, axis: int, count: int) -> Shape:
    return (*shape[:axis], shape[axis] // count, *shape[axis + 1 :])


def _broadcast(array: jax.Array, shape: Shape) -> jax.Array:
    if jax.numpy.shape(array) == shape:
        return array
    return jax.lax.broadcast_in_dim(array, shape, range(len(shape)))


def _stacked(arrays: Sequence[Any]) -> jax.Array:
    rows = [jax.lax.expand_dims(x, (0,)) for x in arrays]
    return jax.lax.concatenate(rows, 0)


_Shaped = Callable[[JaxprEqn, int, int], tuple[Params, int] | None]
"""A rule for an equation that changes shapes, or works along some axes.

It takes the equation, the axis along which the operand is cut, and the number of parts. It returns
the equation's parameters for a part, and the axis along which the result is cut; None if the parts
do not stay apart.
"""


def _broadcast_in_dim(
    eqn: JaxprEqn,
    axis: int,
    count: int,
) -> tuple[Params, int]:
    target = int(eqn.params["broadcast_dimensions"][axis])
    return {"shape": _cut(eqn.params["shape"], target, count)}, target


def _reshape(
    eqn: JaxprEqn,
    axis: int,
    count: int,
) -> tuple[Params, int] | None:
    """Finds the axis of a reshaped array along which the parts of the operand stay apart.

    The sizes in front of this axis must have the same product as the sizes in front of the
    operand's axis, and the number of parts must divide the size of this axis.
    """
    # Example: [2, 6, 5] in 3 parts along axis 1 becomes [2, 3, 10] in 3 parts along axis 1. The
    # product in front of both axes is 2, and 3 parts divide the size 3.
    if eqn.params["dimensions"] is not None:
        return None
    before = math.prod(_jax.aval(eqn.invars[0]).shape[:axis])
    shape = eqn.params["new_sizes"]
    for target, size in enumerate(shape):
        is_there = math.prod(shape[:target]) == before
        if is_there and size % count == 0:
            return {"new_sizes": _cut(shape, target, count)}, target
    return None


def _transpose(
    eqn: JaxprEqn,
    axis: int,
    count: int,
) -> tuple[Params, int]:
    return {}, list(eqn.params["permutation"]).index(axis)


def _without(name: str) -> _Shaped:
    """Returns the rule for equations that remove the axes in their parameter `name`."""

    def shaped(
        eqn: JaxprEqn,
        axis: int,
        count: int,
    ) -> tuple[Params, int] | None:
        removed = eqn.params[name]
        if axis in removed:
            return None
        before = sum(int(d < axis) for d in removed)
        return {}, axis - before

    return shaped


def _along(name: str) -> _Shaped:
    """Returns the rule for equations that work along the axes in their parameter `name`."""

    def shaped(
        eqn: JaxprEqn,
        axis: int,
        count: int,
    ) -> tuple[Params, int] | None:
        axes = eqn.params[name]
        works_along = axis in axes if isinstance(axes, tuple) else axis == axes
        return None if works_along else ({}, axis)

    return shaped


def _slice(
    eqn: JaxprEqn,
    axis: int,
    count: int,
) -> tuple[Params, int] | None:
    size = _jax.aval(eqn.invars[0]).shape[axis]
    if _jax.aval(eqn.outvars[0]).shape[axis] != size:
        return None
    return {"limit_indices": _cut(eqn.params["limit_indices"], axis, count)}, axis


def _pad(
    eqn: JaxprEqn,
    axis: int,
    count: int,
) -> tuple[Params, int] | None:
    return None if any(eqn.params["padding_config"][axis]) else ({}, axis)


_SUMS = frozenset(f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum", "xor"))
_MATRIX = frozenset({"cholesky", "eigh", "lu", "qr", "svd", "triangular_solve"})
_SHAPED: dict[str, _Shaped] = {
    **dict.fromkeys([*_SUMS, "argmax", "argmin"], _without("axes")),
    **dict.fromkeys(["cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"], _along("axis")),
    "broadcast_in_dim": _broadcast_in_dim,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "slice": _slice,
    "sort": _along("dimension"),
    "squeeze": _without("dimensions"),
    "transpose": _transpose,
}
