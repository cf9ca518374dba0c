"""Arrays that are represented by their parts (`Rows`), or by one slice that repeats (`Even`).

Three forms of the array [[1, 1], [2, 2]]:

    whole    [[1, 1], [2, 2]]
    Rows     [[1, 1]] and [[2, 2]], cut along axis 0; if they are thin, [1, 1] and [2, 2]
    Even     [[1], [2]], repeated along axis 1

The functions of this file accept a value in any of these forms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax

Shape = tuple[int, ...]


@partial(jax.tree_util.register_dataclass, data_fields=["pieces"], meta_fields=["axis", "thin"])
@dataclass(frozen=True)
class Rows:
    """An array in two or more parts of equal size along an axis.

    Attributes:
        axis: the axis along which the array is cut.
        pieces: the parts, without that axis if `thin`.
        thin: whether the pieces lack the axis; each part then has length 1 along it.
    """

    axis: int
    pieces: tuple[Any, ...]
    thin: bool = False

    def is_cut(self, axis: int, count: int) -> bool:
        """Tells whether the array is cut along a given axis into a given number of parts."""
        return self.axis == axis and len(self.pieces) == count

    @cached_property
    def parts(self) -> tuple[Any, ...]:
        """The parts, which always have the axis along which the array is cut."""
        if not self.thin:
            return self.pieces
        axes = (self.axis,)
        return tuple(jax.lax.expand_dims(piece, axes) for piece in self.pieces)

    @cached_property
    def whole(self) -> jax.Array:
        """The array."""
        return jax.lax.concatenate(self.parts, self.axis)


@dataclass(frozen=True)
class Even:
    """An array of a given shape that repeats `one` along the axes in which `one` has length 1."""

    shape: Shape
    one: jax.Array

    @cached_property
    def whole(self) -> jax.Array:
        """The array."""
        return broadcast(self.one, self.shape)


def whole(value: Any) -> Any:
    """Returns a value of any form as a whole array."""
    return value.whole if isinstance(value, Rows | Even) else value


def stacked(slices: Sequence[Any]) -> Any:
    """Returns the array that has these slices along its first axis.

    >>> import jax.numpy as jnp
    >>> whole(stacked([jnp.ones(2), jnp.zeros(2)])).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    # `Rows` has two or more parts. Its parts are joined only if `whole` is asked for.
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
    # Cheap cases come first: parts that exist already, no cut, and one part that stands for all.
    if isinstance(value, Rows) and value.is_cut(axis, count):
        return value.parts
    if count == 1:
        return (whole(value),)
    if isinstance(value, Even) and value.one.shape[axis] == 1:
        # Along this axis all parts are equal, so one array serves for all of them.
        part = broadcast(value.one, cut_shape(value.shape, axis, count))
        return (part,) * count
    array = whole(value)
    size = array.shape[axis] // count
    parts = []
    for start in range(0, size * count, size):
        part = jax.lax.slice_in_dim(array, start, start + size, axis=axis)
        parts.append(part)
    return tuple(parts)


def slices_of(value: Any, axis: int, count: int) -> Sequence[Any]:
    """Returns the slices of an array at all positions along an axis.

    Args:
        value: the array.
        axis: the axis, which the slices lack.
        count: the number of slices, which is the length of the axis.
    """
    # Thin pieces lack the axis already: nothing is computed.
    if isinstance(value, Rows) and value.thin and value.is_cut(axis, count):
        return value.pieces
    if isinstance(value, Even) and value.one.shape[axis] == 1:
        before = value.shape[:axis]
        behind = value.shape[axis + 1 :]
        shape = (*before, *behind)
        one = jax.lax.squeeze(value.one, (axis,))
        return (broadcast(one, shape),) * count
    parts = parts_of(value, axis, count)
    return tuple(jax.lax.squeeze(x, (axis,)) for x in parts)


def cut_shape(shape: Shape, axis: int, count: int) -> Shape:
    """Returns the shape of each part of an array that is cut into parts along an axis.

    Args:
        shape: the shape of the whole array.
        axis: the axis that is cut.
        count: how many parts there are; it divides the size of the axis.

    >>> cut_shape((6, 4), 0, 3)
    (2, 4)
    """
    sizes = list(shape)
    sizes[axis] //= count
    return tuple(sizes)


def broadcast(array: jax.Array, shape: Shape) -> jax.Array:
    """Repeats an array along its axes of length 1, so that it has a given shape."""
    if jax.numpy.shape(array) == shape:
        return array
    return jax.lax.broadcast_in_dim(array, shape, range(len(shape)))
