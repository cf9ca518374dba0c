"""Counts the bytes of a program's buffers, except those that lie in the memory of a result.

A step is a kernel, or several kernels joined into one. A buffer holds a value from the step that
writes it to the last step that reads it. The memory of a result is set aside during the whole
program. Until the result is written, other buffers can lie in that memory, and take no further
bytes. They are called its lodgers.

    step            0    1    2    3       w: a step writes it; r: the last step that reads it
    a result                  w-----
    buffer A        w----r                 lies in the result's memory: done before step 2 writes it
    buffer B             w----r            cannot: step 2 reads buffer B while it writes the result
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_SMALL = 4
"""A buffer is small if it takes less than 1 / `_SMALL` of the on-chip memory."""


class HeapBlock(NamedTuple):
    """Bytes that are in use from step `first` to step `last`, both included."""

    bytes: int
    first: int
    last: int


class Room(NamedTuple):
    """The memory of a result, which is free before the step `written` that writes the result."""

    bytes: int
    written: int


def without_lodgers(buffers: Iterable[HeapBlock], rooms: Iterable[Room]) -> list[HeapBlock]:
    """Returns the buffers that do not lie in a result.

    This is a greedy rule like a compiler's, and not a search for the best packing. Buffers are
    placed in order of falling size, and equal ones in order of falling last step. Each one goes
    into the smallest result that has room for it, if there is one. Lodgers of one result must not
    overlap in time.

    >>> without_lodgers([HeapBlock(4, 0, 1), HeapBlock(4, 1, 2), HeapBlock(2, 1, 1)], [Room(5, 2)])
    [HeapBlock(bytes=4, first=1, last=2), HeapBlock(bytes=2, first=1, last=1)]
    """
    # Results are in order of rising size, so the first one with room is the smallest.
    in_order = [(room, list[HeapBlock]()) for room in sorted(rooms)]
    left = []
    for buffer in sorted(buffers, key=lambda buffer: (-buffer.bytes, -buffer.last)):
        for room, there in in_order:
            holds = room.bytes >= buffer.bytes and buffer.last < room.written
            apart = (b.last < buffer.first or buffer.last < b.first for b in there)
            if holds and all(apart):
                there.append(buffer)
                break
        else:
            left.append(buffer)
    return left


def peak_bytes(buffers: Sequence[HeapBlock], scratch_bytes: int) -> int:
    """Counts the most bytes that buffers take at once, as if they were packed without gaps.

    Args:
        buffers: the buffers of a program that do not lie in results.
        scratch_bytes: the on-chip memory of a TPU. Small buffers lie there as far as they fit, and
            only the bytes that do not fit count.

    >>> peak_bytes([HeapBlock(4, 0, 1), HeapBlock(4, 1, 2), HeapBlock(2, 2, 2)], 0)
    8
    """
    small_changes, large_changes = Counter[int](), Counter[int]()
    for buffer in buffers:
        is_small = buffer.bytes < scratch_bytes // _SMALL
        changes = small_changes if is_small else large_changes
        changes[buffer.first] += buffer.bytes
        changes[buffer.last + 1] -= buffer.bytes
    # The sums change only at steps where a buffer begins or has just ended.
    small = large = peak = 0
    for i in sorted({*small_changes, *large_changes}):
        small += small_changes[i]
        large += large_changes[i]
        peak = max(peak, large + max(0, small - scratch_bytes))
    return peak
