"""Buffers of a program's steps: what they take at once,
and which of them lie where a result will be.

By the number of the step:

step            0    1    2    3
a result                  w-----
a buffer        w----r                lies in the result, which nobody has written yet
another              w----r           does not: the result is written while it is read
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_SMALL = 4
"""A small buffer takes less than this part of the memory beside the cores."""


class Buffer(NamedTuple):
    """Bytes that are taken from one step to another, both included."""

    bytes: int
    first: int
    last: int


class Room(NamedTuple):
    """A result, whose memory is free before the step that writes it."""

    bytes: int
    written: int


def without_lodgers(buffers: Iterable[Buffer], rooms: Iterable[Room]) -> list[Buffer]:
    """Returns the buffers that do not lie in a result.

    The largest find room first, in the smallest result that holds them; of equal ones those that
    are read last.

    >>> without_lodgers([Buffer(4, 0, 1), Buffer(4, 1, 2), Buffer(2, 1, 1)], [Room(5, 2)])
    [Buffer(bytes=4, first=1, last=2), Buffer(bytes=2, first=1, last=1)]
    """
    # By rising size: the first that holds a buffer is the smallest.
    lodgers: list[tuple[Room, list[Buffer]]] = [(room, []) for room in sorted(rooms)]
    left = []
    for buffer in sorted(buffers, key=lambda buffer: (-buffer.bytes, -buffer.last)):
        for room, there in lodgers:
            # In a room buffers follow one another, and all have gone when the result is written.
            holds = room.bytes >= buffer.bytes and buffer.last < room.written
            if holds and all(b.last < buffer.first or buffer.last < b.first for b in there):
                there.append(buffer)
                break
        else:
            left.append(buffer)
    return left


def peak_bytes(buffers: Sequence[Buffer], scratch_bytes: int) -> int:
    """Counts the most bytes that buffers take at once.

    Args:
        buffers: of a program.
        scratch_bytes: of the memory beside the cores, where small buffers lie while there is room.

    >>> peak_bytes([Buffer(4, 0, 1), Buffer(4, 1, 2), Buffer(2, 2, 2)], 0)
    8
    """
    changes: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    for buffer in buffers:
        is_small = buffer.bytes < scratch_bytes // _SMALL
        changes[is_small][buffer.first] += buffer.bytes
        changes[is_small][buffer.last + 1] -= buffer.bytes
    # Only where a buffer begins or ends can the sums change.
    small = large = peak = 0
    for i in sorted({*changes[True], *changes[False]}):
        small += changes[True][i]
        large += changes[False][i]
        peak = max(peak, large + max(0, small - scratch_bytes))
    return peak
