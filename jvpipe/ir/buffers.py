"""The buffer table: every array of a step, with the value that it holds, its size and its place.

A place is the number of a device, or of a mesh of devices. The rows and this table determine the
peak use of each memory before anything runs.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, assert_never

import numpy as np

from jvpipe.ir.rows import Row
from jvpipe.ir.values import VALUES, Owner, Value, ValueKind

HOST = -1
"""The number of the host's memory.

It is -1, so that it selects the last element of a list with one element per memory.
"""


class Copy(StrEnum):
    """The copies of a value that may lie at a place, or on the host of the place."""

    OWN = "own"  # the usual copy, which programs at the place read
    UNUSED = "unused"  # a program yields it, and no row reads it
    RECOMPUTED = "recomputed"  # yielded by a forward that ran again
    HOST = "host"  # swapped out: in the host's memory
    FETCHED = "fetched"  # back from the host
    AWAY = "away"  # optimizer state that lies on the host; each update fetches it from there
    STALE = "stale"  # left behind by a value that has moved

    @property
    def is_read(self) -> bool:
        """Whether programs that read the value read this copy, unless a pass redirects them."""
        match self:
            case Copy.OWN | Copy.RECOMPUTED | Copy.AWAY:
                return True
            case Copy.UNUSED | Copy.HOST | Copy.FETCHED | Copy.STALE:
                return False
            case _:
                assert_never(self)

    @property
    def is_swap(self) -> bool:
        """Whether a swap made this copy."""
        match self:
            case Copy.HOST | Copy.FETCHED:
                return True
            case Copy.OWN | Copy.UNUSED | Copy.RECOMPUTED | Copy.STALE | Copy.AWAY:
                return False
            case _:
                assert_never(self)

    @property
    def on_host(self) -> bool:
        """Whether this copy lies in the host's memory."""
        return self in (Copy.HOST, Copy.AWAY)


class Spot(NamedTuple):
    """One copy of a value at a place: the name of a buffer.

    >>> print(Spot(Value(ValueKind.TENSOR, 3, microbatch=0), 1, Copy.HOST))
    tensor 3 micro-batch 0 at 1 host
    """

    value: Value
    place: int
    copy: Copy = Copy.OWN

    def shifted(self, microbatches: int, versions: int) -> "Spot":
        """Names the corresponding copy some micro-batches and versions later in a stream."""
        return Spot(self.value.shifted(microbatches, versions), self.place, self.copy)

    def __str__(self) -> str:
        copy = "" if self.copy is Copy.OWN else f" {self.copy}"
        return f"{self.value} at {self.place}{copy}"


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array of a step: one copy of a `value` at a `place`, or on the host of the place."""

    value: Value
    place: int
    bytes: int
    copy: Copy = Copy.OWN

    @property
    def spot(self) -> Spot:
        """The name of the buffer."""
        return Spot(self.value, self.place, self.copy)

    @property
    def memory(self) -> int:
        """The memory in which the buffer lies: the number of its place, or HOST."""
        return HOST if self.copy.on_host else self.place

    @property
    def owner(self) -> Owner:
        """The account under which the buffer's bytes are counted."""
        return VALUES[self.value.kind].owner


@dataclass(frozen=True, slots=True)
class Lowered:
    """A step as rows in the order of their dispatch, over a table of buffers.

    Attributes:
        rows: the rows.
        buffers: the table of buffers; rows refer to a buffer by its position.
        persistent: how many buffers exist before the step. They are the first of the table,
            and hold the state: parameters, optimizer state and so on.
        final: the buffers that hold the state after the step, in the order of the
            persistent ones. Their arrays fill the persistent buffers of the next step.
        metrics: other buffers that outlive the step.
    """

    rows: tuple[Row, ...]
    buffers: tuple[Buffer, ...]
    persistent: int
    final: tuple[int, ...]
    metrics: tuple[int, ...]

    def changes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Returns, for each row, the buffers that begin with it and those that end with it."""
        alive = set(range(self.persistent))
        changes = []
        for row in self.rows:
            born = tuple(b for b in row.writes if b not in alive)
            alive.update(born)
            alive.difference_update(row.frees)
            changes.append((born, row.frees))
        return changes


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest number of bytes that a memory holds during a step.

    `row` is the row that runs at the peak; None if the peak is before the first row. `holders` are
    pairs of an account and its bytes, the largest first.
    """

    bytes: int
    row: Row | None
    holders: tuple[tuple[str, int], ...]

    def beside(self, owner: str, size: int) -> "Peak":
        """Returns the peak with additional bytes; their account comes first among the holders.

        Args:
            owner: the account to which the bytes are added.
            size: the additional bytes.
        """
        if not size:
            return self
        holders = ((owner, size), *self.holders)
        return replace(self, bytes=self.bytes + size, holders=holders)


def peaks(lowered: Lowered, places: int, temporary: Sequence[int] = ()) -> tuple[Peak, ...]:
    """Finds the peak of each place and, last, that of the host.

    Args:
        lowered: the step.
        places: the number of places.
        temporary: for each row, the bytes that its program holds only while it runs; empty
            if they are unknown.
    """
    live = np.zeros(places + 1, int)  # by memory; HOST is -1, which is the last element
    for buffer in lowered.buffers[: lowered.persistent]:
        live[buffer.memory] += buffer.bytes
    best = live.copy()
    best_row = [-1] * len(live)
    changed_rows = zip(lowered.rows, lowered.changes(), strict=True)
    for i, (row, (born, dead)) in enumerate(changed_rows):
        grown = {row.place}
        for b in born:
            buffer = lowered.buffers[b]
            live[buffer.memory] += buffer.bytes
            grown.add(buffer.memory)
        # Buffers that end with a row still exist while it runs.
        for d in grown:
            running = temporary[i] if temporary and d == row.place else 0
            if live[d] + running > best[d]:
                best[d] = live[d] + running
                best_row[d] = i
        for b in dead:
            live[lowered.buffers[b].memory] -= lowered.buffers[b].bytes
    result = []
    for d in (*range(places), HOST):
        i = best_row[d]
        row = lowered.rows[i] if i >= 0 else None
        running = temporary[i] if temporary and i >= 0 else 0
        result.append(Peak(int(best[d]), row, _holders(lowered, d, i, running)))
    return tuple(result)


def _holders(
    lowered: Lowered, memory: int, until: int, temporary_bytes: int
) -> tuple[tuple[str, int], ...]:
    """Counts the bytes of each account in a memory while a row runs, the largest first.

    Older versions of a parameter count under `Owner.VERSION`.

    Args:
        lowered: the step.
        memory: the number of a place, or HOST.
        until: the number of the row; -1 for the time before the first row.
        temporary_bytes: the bytes that the row's program takes at its place.
    """
    alive = set(range(lowered.persistent))
    for i, (born, dead) in enumerate(lowered.changes()[: until + 1]):
        alive.update(born)
        if i < until:
            alive.difference_update(dead)
    buffers = [lowered.buffers[b] for b in alive]
    here = [buffer for buffer in buffers if buffer.memory == memory]
    newest: dict[int, int] = {}  # by parameter: its newest version here
    for value in (buffer.value for buffer in here):
        if value.kind is ValueKind.PARAMETER:
            before = newest.get(value.index, value.version)
            newest[value.index] = max(before, value.version)
    total = Counter[Owner]()
    if temporary_bytes and lowered.rows[until].place == memory:
        total[Owner.TEMPORARY] = temporary_bytes
    for buffer in here:
        value = buffer.value
        is_older = value.kind is ValueKind.PARAMETER and value.version < newest[value.index]
        total[Owner.VERSION if is_older else buffer.owner] += buffer.bytes
    return tuple((str(owner), size) for owner, size in total.most_common())
