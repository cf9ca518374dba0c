"""The slice-by-slice evaluation of equations on arrays that stack parameters of several layers.

The optimizer sees a stacked array, and each layer owns a slice of it. `Rows` represents an array by
its separate slices (see `jvpipe.programs.cut_arrays`). How an equation runs on `Rows` depends on
its work along the axis of the layers:

    the equation ...              runs on ...                             and yields
    works along other axes        each slice                              Rows
    reduces over the layers       each slice, then the stacked results    an array
    does anything else            the whole array                         an array

`Even` represents an array that repeats one slice along an axis, so that its slices are available
without computing the whole array.

An equation without a rule, here or in `jvpipe.programs.shape_rules`, runs on the whole array. The
result is correct, but it combines values of different layers. If these values are large,
`jvpipe.programs.ownership` refuses the optimizer.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import JaxprEqn
from jvpipe.programs.cut_arrays import Even, Rows, Shape, broadcast, parts_of, slices_of, whole
from jvpipe.programs.scans import scan_options
from jvpipe.programs.shape_rules import REDUCTIONS, on_a_part
from jvpipe.programs.straight_line import straight_body
from jvpipe.programs.transformations import scope_of
from jvpipe.trace import jaxprs
from jvpipe.trace.axes import along_after
from jvpipe.trace.primitives import is_elementwise

_MATRIX = frozenset({"cholesky", "eigh", "lu", "qr", "svd", "triangular_solve"})
"""Equations that work on matrices, which are the last two axes of their operands."""


def apply(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Runs an equation on arrays, some of which may be `Rows` or `Even`.

    The equation comes from `straight_line`, so it has no calls and no branches.
    """
    with jax.named_scope(scope_of(eqn)):
        has_rows = any(isinstance(v, Rows) for v in values)
        results = _on_rows(eqn, values) if has_rows else _on_even(eqn, values)
        return results or _jax.bind(eqn, list(map(whole, values)))


def _on_rows(eqn: JaxprEqn, values: list[Any]) -> list[Any] | None:
    """Returns the results of an equation on `Rows`; None if it needs the whole array."""
    name = eqn.primitive.name
    rows = next(v for v in values if isinstance(v, Rows))
    rank = len(_jax.aval(eqn.invars[0]).shape)
    along_others = name in _MATRIX and rows.axis < rank - 2
    if is_elementwise(eqn) or along_others:
        return _on_each(
            eqn,
            values,
            rows,
            thin=rows.thin and not along_others,
        )
    # Each slice is reduced separately, then the results are reduced in the order of the layers.
    if name in REDUCTIONS and rows.axis in eqn.params["axes"]:
        left: list[Any] = []
        for part in rows.parts:
            left += _jax.bind(eqn, [part])
        over_layers = _with(eqn, {"axes": (0,)})
        return _jax.bind(over_layers, [_stacked(left)])
    if name == "dot_general":
        return [_product(eqn, values)]
    if name == "scan":
        return _scan(eqn, values)
    arrays = len(values) - (name == "pad")  # the second operand of a pad is its padding value
    of_part = on_a_part(eqn, rows.axis, len(rows.pieces)) if arrays == 1 else None
    if of_part is None:
        return None
    params, axis = of_part
    narrowed = _with(eqn, params)
    results: list[Any] = []
    for part in rows.parts:
        results += _jax.bind(narrowed, [part, *values[1:]])
    return [Rows(axis, tuple(results))]


def _on_even(eqn: JaxprEqn, values: list[Any]) -> list[Any] | None:
    """Returns the results of a broadcast, or of an elementwise equation on `Even` arrays.

    Returns None for other equations, and for a broadcast that repeats nothing.
    """
    out = _jax.aval(eqn.outvars[0])
    if eqn.primitive.name == "broadcast_in_dim" and len(values) == 1:
        (operand,) = values
        one = operand.one if isinstance(operand, Even) else operand
        # The new axes have length 1, because the array repeats along them.
        sizes = [1] * len(out.shape)
        axes = eqn.params["broadcast_dimensions"]
        for axis, size in zip(axes, jax.numpy.shape(one), strict=True):
            sizes[axis] = size
        if tuple(sizes) == out.shape:
            return None
        narrow = _with(eqn, {"shape": tuple(sizes)})
        return [Even(out.shape, x) for x in _jax.bind(narrow, [one])]
    # Scalars combine with arrays of any shape.
    ranked = [v for v in values if _rank_of(v)]
    are_even = bool(ranked) and all(isinstance(v, Even) for v in ranked)
    if not (are_even and is_elementwise(eqn)):
        return None
    # If all operands repeat along an axis, so does the result. Along every other axis, the `one` of
    # the result is as long as the result itself.
    shapes = [v.one.shape for v in ranked]
    sizes = tuple(map(max, zip(*shapes, strict=True)))
    ones = [broadcast(v.one, sizes) if isinstance(v, Even) else v for v in values]
    results = _jax.bind(eqn, ones)
    return [Even(out.shape, one) for one in results]


def _on_each(
    eqn: JaxprEqn,
    values: list[Any],
    like: Rows,
    *,
    thin: bool,
) -> list[Any]:
    """Returns the results of an equation that runs on each part separately.

    Args:
        eqn: the equation.
        values: its operands; scalars are the same for all parts.
        like: an operand with the axis and the number of parts of the results.
        thin: whether the equation runs on parts without that axis.
    """
    axis, count = like.axis, len(like.pieces)

    def parts(value: Any, shape: Shape) -> Sequence[Any]:
        """Returns the operand for each part."""
        if not shape:
            return (value,) * count
        if shape[axis] == 1:  # the same for all parts
            one = whole(value)
            if thin:
                one = jax.lax.squeeze(one, (axis,))
            return (one,) * count
        if thin:
            return slices_of(value, axis, count)
        return parts_of(value, axis, count)

    shapes = [_jax.aval(atom).shape for atom in eqn.invars]
    # The first `zip` regroups operands by part; the second regroups the parts' results by result.
    of_operands = list(map(parts, values, shapes))
    by_part = zip(*of_operands, strict=True)
    of_parts = [_jax.bind(eqn, list(operands)) for operands in by_part]
    by_result = zip(*of_parts, strict=True)
    return [Rows(axis, pieces, thin) for pieces in by_result]


_BATCH, _CONTRACTED, _FREE = range(3)
"""The roles of an axis in a product, in the order of precedence (see `_product`)."""


def _product(eqn: JaxprEqn, values: list[Any]) -> Any:
    """Returns a product of two arrays, at least one of which is `Rows`.

    The computation depends on the role of the axis along which the operand is cut, the axis of the
    layers. If both operands are `Rows`, the role that comes first in this list counts:

        batch         a product per layer, with that layer's part of the other operand
        contracted    the same products, which are then added up in the order of the layers
        free          a product per layer, with the whole other operand
    """
    contracted, batch = eqn.params["dimension_numbers"]
    sides = [side for side in (0, 1) if isinstance(values[side], Rows)]

    def role(side: int) -> int:
        axis = values[side].axis
        if axis in batch[side]:
            return _BATCH
        return _CONTRACTED if axis in contracted[side] else _FREE

    side = min(sides, key=role)
    role_of_axis = role(side)
    rows = values[side]
    other = values[1 - side]
    count = len(rows.parts)
    if role_of_axis == _FREE:
        others = (whole(other),) * count
        axes = [rows.axis, None] if side == 0 else [None, rows.axis]
        position = along_after(eqn, axes, [None])[0]
        assert isinstance(position, int), position
    else:
        # Batch axes and contracted axes come in pairs: each operand has one axis of a pair.
        axes = batch if role_of_axis == _BATCH else contracted
        position = list(axes[side]).index(rows.axis)
        axis_of_other = int(axes[1 - side][position])
        others = parts_of(other, axis_of_other, count)
    results = []
    for part, of_other in zip(rows.parts, others, strict=True):
        operands = [part, of_other] if side == 0 else [of_other, part]
        results += _jax.bind(eqn, operands)
    if role_of_axis == _CONTRACTED:
        return jax.lax.reduce_sum(_stacked(results), axes=(0,))
    return Rows(position, tuple(results))


def _scan(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Runs a scan whose body works on parts.

    The body first runs on shapes, to find the carries that have to be `Rows`. If the body returns a
    carry in parts, the carry has to begin in the same parts, and the body runs on shapes again. The
    loop ends, because each iteration turns another carry into `Rows`, and never turns one back.
    """
    body = straight_body(eqn)
    arrays = [_without_even(value) for value in values]
    constants, carry, xs = _jax.scan_operands(eqn, arrays)
    # The scan runs along the first axis of xs, so that axis cannot be cut into parts.
    xs = [whole(x) if isinstance(x, Rows) and x.axis == 0 else _moved(x, 0) for x in xs]
    carry = [_moved(c, 0) for c in carry]
    results: list[Any] = []  # the results of the body's last run

    def step(
        carry: list[Any],
        xs: list[Any],
    ) -> tuple[list[Any], list[Any]]:
        # An iteration gets xs without their first axis. The scan adds that axis to its ys.
        inner = [_moved(x, -1) for x in xs]
        operands = [*constants, *carry, *inner]
        results[:] = jaxprs.evaluate_jaxpr(body, operands, apply)
        pairs = zip(results, carry, strict=False)
        new_carry = [_like(x, c) for x, c in pairs]
        ys = [_without_even(y) for y in results[len(carry) :]]
        return new_carry, [_moved(y, 0) for y in ys]

    while True:
        scanned = partial(jax.lax.scan, step, **scan_options(eqn))
        jax.eval_shape(scanned, carry, xs)
        grown = list(carry)
        is_settled = True
        for i, (c, x) in enumerate(zip(carry, results, strict=False)):
            if isinstance(x, Rows) and not isinstance(c, Rows):
                grown[i] = _like(c, x)
                is_settled = False
        if is_settled:
            carry, ys = scanned(carry, xs)
            return [*carry, *(_moved(y, 1) for y in ys)]
        carry = grown


def _without_even(value: Any) -> Any:
    return whole(value) if isinstance(value, Even) else value


def _moved(value: Any, by: int) -> Any:
    """Returns `Rows` with `by` added to their axis; other values are returned unchanged."""
    return Rows(value.axis + by, value.parts) if isinstance(value, Rows) else value


def _like(value: Any, other: Any) -> Any:
    """Returns a value in the form of another value: as the same `Rows`, or as a whole array."""
    if not isinstance(other, Rows):
        return whole(value)
    parts = parts_of(value, other.axis, len(other.parts))
    return Rows(other.axis, tuple(parts))


def _with(eqn: JaxprEqn, params: dict[str, Any]) -> JaxprEqn:
    return eqn.replace(params={**eqn.params, **params})


def _rank_of(value: Any) -> int:
    return jax.numpy.ndim(value.one if isinstance(value, Even) else value)


def _stacked(arrays: Sequence[Any]) -> jax.Array:
    rows = [jax.lax.expand_dims(x, (0,)) for x in arrays]
    return jax.lax.concatenate(rows, 0)
