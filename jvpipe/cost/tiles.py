"""Counts the bytes of arrays in a compiler's layout, which pads two dimensions to whole tiles.

TPUs store arrays in tiles. A float32 array of 100 x 64 in tiles of 8 x 128 takes 13 tiles, one
below the other, and so 104 x 128 x 4 bytes:

    each row        64 elements of the array, then 64 of padding
    the last tile   4 rows of the array, then 4 of padding
"""

import math
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import permutations
from typing import TypeVar

from jvpipe.ir.layers import Array

T = TypeVar("T")

COLUMNS = 128
"""The columns of a tile."""

_BITS = {"pred": 8, "token": 0}
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)(?::((?:T\([\d,]*\)|\([\d,]*\))*)[^}]*)?\})?")


def laid_bytes(shape: str) -> int:
    """Counts the bytes of an array from its shape in the notation of HLO modules.

    Args:
        shape: the type, the sizes of the dimensions, and in braces the order of the dimensions and
            the tiles. The dimension whose elements are neighbors in memory is first in the order.
            Only the first tile adds padding; further tiles order the elements inside of it.

    >>> laid_bytes("f32[100,64]{1,0}"), laid_bytes("f32[100,64]{0,1:T(8,128)}")
    (25600, 32768)
    >>> laid_bytes("bf16[64]{0:T(256)(128)(2,1)}"), laid_bytes("s32[]{:T(128)}")
    (512, 512)
    """
    found = _SHAPE.match(shape)
    assert found, f"{shape} is not a shape of an array"
    kind, dimensions, minor, tiles = found.groups(default="")
    sizes, order = _numbers(dimensions), _numbers(minor)
    if tile := _numbers(tiles[tiles.find("(") + 1 : tiles.find(")")]):
        # A tile of n dimensions pads the first n dimensions of the order.
        laid = [sizes[i] for i in order] or [1]
        rest = math.prod(laid[len(tile) :])
        sizes = [rest, *map(_filled, laid, reversed(tile))]
    return -(-math.prod(sizes) * _bits(kind) // 8)


def in_tiles(value: T) -> T:
    """Returns plain data with the bytes of each array counted in tiles.

    Args:
        value: an array; a dataclass or a tuple that may contain arrays, such as a graph; or
            anything else, which stays as it is.

    >>> in_tiles((Array("logits", (8, 100), "float32", 3200), "kept"))
    (Array(name='logits', shape=(8, 100), dtype='float32', bytes=4096, spec=()), 'kept')
    """
    if isinstance(value, Array):
        size = math.prod(value.shape)
        # An array stays as it is if it is cut over devices, is empty, or has elements below a byte.
        if value.spec or not 0 < size <= value.bytes:
            return value
        return replace(value, bytes=tiled_bytes(value.shape, value.bytes // size))
    if type(value) is tuple:
        return tuple(map(in_tiles, value))
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return replace(value, **{name: in_tiles(getattr(value, name)) for name in names})
    return value


def entry_bytes(header: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Counts the bytes of each argument and each result of a program.

    Args:
        header: the first line of its HLO module.

    >>> layout = "{(f32[8]{0}, s32[]{:T(128)})->(f32[8]{0}, f32[2]{0})}"
    >>> entry_bytes(f"HloModule jit_f, entry_computation_layout={layout}")
    ((32, 512), (32, 8))
    """
    layout = header.partition("entry_computation_layout={")[2]
    arguments, _, results = layout.partition("->")
    return _all_bytes(arguments), _all_bytes(_closed(results))


def _all_bytes(shapes: str) -> tuple[int, ...]:
    """Counts the bytes of each array in a text with their shapes."""
    return tuple(laid_bytes(found.group()) for found in _SHAPE.finditer(shapes))


def tiled_bytes(sizes: Sequence[int], itemsize: int, lanes: int | None = None) -> int:
    """Counts the bytes of an array in tiles, in the most compact order of its dimensions.

    Args:
        sizes: the sizes of the dimensions.
        itemsize: the bytes of an element.
        lanes: the dimension that lies along the 128 columns of a tile; None if any dimension may.

    >>> tiled_bytes((100, 64), 4), tiled_bytes((3, 5, 7), 4), tiled_bytes((), 4)
    (32768, 10240, 512)
    >>> tiled_bytes((8, 64, 128), 4), tiled_bytes((8, 128, 64), 4), tiled_bytes((8, 128, 64), 4, 2)
    (262144, 262144, 524288)
    """
    packed = max(1, 4 // itemsize)  # elements that share the four bytes of one column
    if len(sizes) < 2:
        # A short vector is padded to one row, a longer one to tiles of eight rows.
        (size,) = sizes or (1,)
        row = COLUMNS * packed
        return itemsize * _filled(size, row if size <= row else 8 * row)
    counts = []
    for minor, second in permutations(range(len(sizes)), 2):
        if lanes in (None, minor):
            # A tile has up to 8 rows, a power of two.
            rows = min(8, max(packed, 1 << (sizes[second] - 1).bit_length()))
            rest = (size for i, size in enumerate(sizes) if i not in (minor, second))
            tiled = _filled(sizes[second], rows) * _filled(sizes[minor], COLUMNS)
            counts.append(tiled * math.prod(rest))
    return itemsize * min(counts)


def _filled(size: int, whole: int) -> int:
    """Returns the least multiple of `whole` that is at least `size`."""
    return -(-size // whole) * whole


def _closed(results: str) -> str:
    """Returns the text before its first closing brace that has no opening brace."""
    depth = 0
    for at, letter in enumerate(results):
        depth += (letter == "{") - (letter == "}")
        if depth < 0:
            return results[:at]
    return results


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _bits(kind: str) -> int:
    if kind in _BITS:
        return _BITS[kind]
    digits = re.search(r"\d+", kind)
    assert digits, f"{kind} is not a type of elements"
    return int(digits.group())
