"""Equations over arrays that are stacked by layers, run slice by slice.

An array whose slices lie apart travels as `Rows`. What works along other axes than that of the
layers is done to each slice, a reduction over the layers to each slice and then to what that
leaves, in the order of the layers. Whatever else is done to `Rows` takes the whole array; whether
the slices may meet is for `jvpipe.programs.ownership` to say.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import JaxprEqn
from jvpipe.programs.optimizer_trace import evaluate, scope, straight_line
from jvpipe.trace.primitives import is_elementwise

Shape = tuple[int, ...]
Params = dict[str, Any]


@partial(jax.tree_util.register_dataclass, data_fields=["given"], meta_fields=["axis", "thin"])
@dataclass(frozen=True)
class Rows:
    """An array by its parts along an axis, of equal sizes, two or more.

    `thin` ones are given without that axis.
    """

    axis: int
    given: tuple[Any, ...]
    thin: bool = False

    @cached_property
    def parts(self) -> tuple[Any, ...]:
        """The parts, with the axis."""
        if not self.thin:
            return self.given
        return tuple(jax.lax.expand_dims(x, (self.axis,)) for x in self.given)

    @cached_property
    def whole(self) -> jax.Array:
        """The array."""
        return jax.lax.concatenate(self.parts, self.axis)


@dataclass(frozen=True)
class Even:
    """An array that is the same all along some axes: along these `one` has a single element."""

    shape: Shape
    one: jax.Array

    @cached_property
    def whole(self) -> jax.Array:
        """The array."""
        return _broadcast(self.one, self.shape)


def whole(value: Any) -> Any:
    """An array, wherever its parts lie."""
    return value.whole if isinstance(value, Rows | Even) else value


def stacked(slices: Sequence[Any]) -> Any:
    """The array that has these slices along its first axis.

    >>> import jax.numpy as jnp
    >>> whole(stacked([jnp.ones(2), jnp.zeros(2)])).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    if len(slices) == 1:
        return jax.lax.expand_dims(slices[0], (0,))
    return Rows(0, tuple(slices), thin=True)


def parts_of(value: Any, axis: int, count: int) -> Sequence[Any]:
    """The parts of an array along an axis: as many as that, of equal sizes."""
    if isinstance(value, Rows) and (value.axis, len(value.parts)) == (axis, count):
        return value.parts
    if count == 1:
        return (whole(value),)
    if isinstance(value, Even) and value.one.shape[axis] == 1:
        return (_broadcast(value.one, _cut(value.shape, axis, count)),) * count
    array = whole(value)
    size = array.shape[axis] // count
    slices = (
        jax.lax.slice_in_dim(array, i * size, (i + 1) * size, axis=axis) for i in range(count)
    )
    return tuple(slices)


def slices_of(value: Any, axis: int, count: int) -> Sequence[Any]:
    """The slices of an array at all places along an axis, without it."""
    if isinstance(value, Rows) and (value.axis, len(value.given)) == (axis, count) and value.thin:
        return value.given
    if isinstance(value, Even) and value.one.shape[axis] == 1:
        shape = (*value.shape[:axis], *value.shape[axis + 1 :])
        return (_broadcast(jax.lax.squeeze(value.one, (axis,)), shape),) * count
    return tuple(jax.lax.squeeze(x, (axis,)) for x in parts_of(value, axis, count))


def apply(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Runs an equation of `straight_line` on arrays, of which some may be `Rows` or `Even`."""
    with jax.named_scope(scope(eqn)):
        of_layers = any(isinstance(value, Rows) for value in values)
        found = (_on_rows if of_layers else _on_even)(eqn, values)
        return found or _jax.bind(eqn, list(map(whole, values)))


def _on_rows(eqn: JaxprEqn, values: list[Any]) -> list[Any] | None:
    """The results of an equation on `Rows`; None if it needs the whole of them."""
    name, given = eqn.primitive.name, next(v for v in values if isinstance(v, Rows))
    along_others = name in _MATRIX and given.axis < len(_jax.aval(eqn.invars[0]).shape) - 2
    if is_elementwise(eqn) or along_others:
        return _on_each(eqn, values, given, thin=given.thin and not along_others)
    if name in _SUMS and given.axis in eqn.params["axes"]:
        left = [_jax.bind(eqn, [part])[0] for part in given.parts]
        return _jax.bind(_with(eqn, {"axes": (0,)}), [_stacked(left)])
    if name == "dot_general":
        return [_product(eqn, values)]
    if name == "scan":
        return _scan(eqn, values)
    if name in _SHAPED and len(values) - (name == "pad") == 1:
        found = _SHAPED[name](eqn, given.axis, len(given.given))
        if found is not None:
            params, axis = found
            each = _with(eqn, params)
            return [Rows(axis, tuple(_jax.bind(each, [x, *values[1:]])[0] for x in given.parts))]
    return None


def _on_even(eqn: JaxprEqn, values: list[Any]) -> list[Any] | None:
    """The results of an equation that makes or keeps what is the same along an axis, or None."""
    out = _jax.aval(eqn.outvars[0])
    if eqn.primitive.name == "broadcast_in_dim" and len(values) == 1:
        one = values[0].one if isinstance(values[0], Even) else values[0]
        sizes = [1] * len(out.shape)
        for axis, size in zip(
            eqn.params["broadcast_dimensions"], jax.numpy.shape(one), strict=True
        ):
            sizes[axis] = size
        if tuple(sizes) == out.shape:
            return None
        return [Even(out.shape, _jax.bind(_with(eqn, {"shape": tuple(sizes)}), [one])[0])]
    ranked = [v for v in values if jax.numpy.ndim(v if not isinstance(v, Even) else v.one)]
    if not ranked or not is_elementwise(eqn) or not all(isinstance(v, Even) for v in ranked):
        return None
    sizes = tuple(map(max, zip(*(v.one.shape for v in ranked), strict=True)))
    ones = [_broadcast(v.one, sizes) if isinstance(v, Even) else v for v in values]
    return [Even(out.shape, made) for made in _jax.bind(eqn, ones)]


def _on_each(eqn: JaxprEqn, values: list[Any], like: Rows, *, thin: bool) -> list[Any]:
    """The results of an equation that is done to each part alone, as `like` has them.

    Scalars are the same for all.
    """
    axis, count = like.axis, len(like.given)

    def taken(value: Any, shape: Shape) -> Sequence[Any]:
        if not shape:
            return (value,) * count
        if shape[axis] == 1:  # the same for all
            one = whole(value)
            return (jax.lax.squeeze(one, (axis,)) if thin else one,) * count
        return (slices_of if thin else parts_of)(value, axis, count)

    shapes = [_jax.aval(atom).shape for atom in eqn.invars]
    split = [taken(value, shape) for value, shape in zip(values, shapes, strict=True)]
    made = [_jax.bind(eqn, list(parts)) for parts in zip(*split, strict=True)]
    return [Rows(axis, results, thin) for results in zip(*made, strict=True)]


def _product(eqn: JaxprEqn, values: list[Any]) -> Any:
    """A product of arrays of which one or both are `Rows`."""
    contracted, batch = eqn.params["dimension_numbers"]
    sides = [side for side in (0, 1) if isinstance(values[side], Rows)]

    def rank(side: int) -> int:
        axis = values[side].axis
        return 0 if axis in batch[side] else 1 if axis in contracted[side] else 2

    side = min(sides, key=rank)
    axis, parts, other = values[side].axis, values[side].parts, values[1 - side]
    if rank(side) == 2:
        free = [
            [
                d
                for d in range(len(_jax.aval(v).shape))
                if d not in contracted[s] and d not in batch[s]
            ]
            for s, v in enumerate(eqn.invars)
        ]
        before = len(batch[0]) + (len(free[0]) if side else 0)
        others, made = (whole(other),) * len(parts), before + free[side].index(axis)
    else:
        dims = (batch, contracted)[rank(side)]
        made = list(dims[side]).index(axis)
        others = parts_of(other, int(dims[1 - side][made]), len(parts))
    pairs = zip(parts, others, strict=True) if side == 0 else zip(others, parts, strict=True)
    results = [_jax.bind(eqn, list(pair))[0] for pair in pairs]
    if rank(side) == 1:
        return jax.lax.reduce_sum(_stacked(results), axes=(0,))
    return Rows(made, tuple(results))


def _scan(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """A scan whose body works on parts, of which its carries are so many more."""
    traced = eqn.params["jaxpr"]
    body = straight_line(lambda *xs: evaluate(traced, xs), *traced.in_avals)
    values = [whole(v) if isinstance(v, Even) else v for v in values]
    constants, carry, xs = _jax.scan_operands(eqn, values)
    xs = [whole(x) if isinstance(x, Rows) and x.axis == 0 else _moved(x, 0) for x in xs]
    carry = [_moved(c, 0) for c in carry]
    made: list[Any] = []

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        inner = [_moved(x, -1) for x in xs]
        made[:] = evaluate(body, [*constants, *carry, *inner], apply)
        ys = [whole(y) if isinstance(y, Even) else _moved(y, 0) for y in made[len(carry) :]]
        return [_like(x, c) for x, c in zip(made, carry, strict=False)], ys

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    while True:
        scanned = partial(jax.lax.scan, step, **options)
        jax.eval_shape(scanned, carry, xs)
        grown = [
            _like(c, x) if isinstance(x, Rows) and not isinstance(c, Rows) else c
            for c, x in zip(carry, made, strict=False)
        ]
        if all(a is b for a, b in zip(grown, carry, strict=True)):
            carry, ys = scanned(carry, xs)
            return [*carry, *(_moved(y, 1) for y in ys)]
        carry = grown


def _moved(value: Any, by: int) -> Any:
    """A value whose parts, with their axis, have one more or less in front."""
    return Rows(value.axis + by, value.parts) if isinstance(value, Rows) else value


def _like(value: Any, other: Any) -> Any:
    """A value in such parts as another one."""
    if not isinstance(other, Rows):
        return whole(value)
    return Rows(other.axis, tuple(parts_of(value, other.axis, len(other.parts))))


def _with(eqn: JaxprEqn, params: Params) -> JaxprEqn:
    return eqn.replace(params={**eqn.params, **params})


def _cut(shape: Shape, axis: int, count: int) -> Shape:
    return (*shape[:axis], shape[axis] // count, *shape[axis + 1 :])


def _broadcast(array: jax.Array, shape: Shape) -> jax.Array:
    if jax.numpy.shape(array) == shape:
        return array
    return jax.lax.broadcast_in_dim(array, shape, range(len(shape)))


def _stacked(arrays: Sequence[Any]) -> jax.Array:
    return jax.lax.concatenate([jax.lax.expand_dims(x, (0,)) for x in arrays], 0)


# What is done to a shape: the parameters for a part, and the axis that the parts have then.
# None: they do not stay apart.

_Shaped = Callable[[JaxprEqn, int, int], tuple[Params, int] | None]


def _broadcast_in_dim(eqn: JaxprEqn, axis: int, count: int) -> tuple[Params, int]:
    made = int(eqn.params["broadcast_dimensions"][axis])
    return {"shape": _cut(eqn.params["shape"], made, count)}, made


def _reshape(eqn: JaxprEqn, axis: int, count: int) -> tuple[Params, int] | None:
    """Parts stay apart along an axis with as much before it that is a multiple of their number."""
    if eqn.params["dimensions"] is not None:
        return None
    before, shape = math.prod(_jax.aval(eqn.invars[0]).shape[:axis]), eqn.params["new_sizes"]
    fits = (d for d, n in enumerate(shape) if math.prod(shape[:d]) == before and n % count == 0)
    made = next(fits, None)
    return None if made is None else ({"new_sizes": _cut(shape, made, count)}, made)


def _transpose(eqn: JaxprEqn, axis: int, count: int) -> tuple[Params, int]:
    return {}, list(eqn.params["permutation"]).index(axis)


def _without(name: str) -> _Shaped:
    """What takes axes away; those in a parameter of this name."""

    def shaped(eqn: JaxprEqn, axis: int, count: int) -> tuple[Params, int] | None:
        gone = eqn.params[name]
        return None if axis in gone else ({}, axis - sum(int(d < axis) for d in gone))

    return shaped


def _along(name: str) -> _Shaped:
    """What is done along axes; those in a parameter of this name."""

    def shaped(eqn: JaxprEqn, axis: int, count: int) -> tuple[Params, int] | None:
        axes = eqn.params[name]
        return None if axis in (axes if isinstance(axes, tuple) else (axes,)) else ({}, axis)

    return shaped


def _slice(eqn: JaxprEqn, axis: int, count: int) -> tuple[Params, int] | None:
    size = _jax.aval(eqn.invars[0]).shape[axis]
    if _jax.aval(eqn.outvars[0]).shape[axis] != size:
        return None
    return {"limit_indices": _cut(eqn.params["limit_indices"], axis, count)}, axis


def _pad(eqn: JaxprEqn, axis: int, count: int) -> tuple[Params, int] | None:
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
