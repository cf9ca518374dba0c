"""The buffer table: every array of a step, whose it is, how large, and where it lies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, assert_never

import numpy as np

from jvpipe.ir.rows import Row
from jvpipe.ir.values import VALUES, Owner, Value, ValueKind

HOST = -1
"""Stands for the host's memory where a place's number would.

Tables by place have a last row for it.
"""


class Copy(StrEnum):
    """The copies of a value that may lie at a place."""

    OWN = "own"  # what reads it there reads this one
    UNUSED = "unused"  # a program yields it and nobody reads it
    RECOMPUTED = "recomputed"  # yielded by a forward that was recomputed
    HOST = "host"  # swapped out: in the host's memory
    FETCHED = "fetched"  # back from the host
    AWAY = "away"  # on the host between the rows that read the value there, each of which has it fetched
    STALE = "stale"  # left behind by what has moved

    @property
    def is_read(self) -> bool:
        """Tells whether a program that reads the value there reads this copy, unless it is redirected."""
        match self:
            case Copy.OWN | Copy.RECOMPUTED | Copy.AWAY:
                return True
            case Copy.UNUSED | Copy.HOST | Copy.FETCHED | Copy.STALE:
                return False
            case _:
                assert_never(self)

    @property
    def is_swap(self) -> bool:
        """Tells whether a swap made it."""
        match self:
            case Copy.HOST | Copy.FETCHED:
                return True
            case Copy.OWN | Copy.UNUSED | Copy.RECOMPUTED | Copy.STALE | Copy.AWAY:
                return False
            case _:
                assert_never(self)

    @property
    def on_host(self) -> bool:
        """Tells whether it lies in the host's memory."""
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
        """Names the same copy in another round of a stream, a number of micro-batches and versions later."""
        return Spot(self.value.shifted(microbatches, versions), self.place, self.copy)

    def __str__(self) -> str:
        return f"{self.value} at {self.place}" + ("" if self.copy is Copy.OWN else f" {self.copy}")


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array of a step: one copy of a `value`, at or beside a `place`."""

    value: Value
    place: int
    bytes: int
    copy: Copy = Copy.OWN

    @property
    def spot(self) -> Spot:
        """Its name."""
        return Spot(self.value, self.place, self.copy)

    @property
    def memory(self) -> int:
        """The memory that it takes: that of its place, or the host's."""
        return HOST if self.copy.on_host else self.place

    @property
    def owner(self) -> Owner:
        """On whose account its bytes are."""
        return VALUES[self.value.kind].owner


@dataclass(frozen=True, slots=True)
class Lowered:
    """A step as rows in the order of their dispatch; a place's own list is the rows that run there.

    The first `persistent` buffers exist before the step; `final` are the buffers that hold the same
    things after it.
    """

    rows: tuple[Row, ...]
    buffers: tuple[Buffer, ...]
    persistent: int
    final: tuple[int, ...]
    metrics: tuple[int, ...]

    def changes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Returns, per row, the buffers that are born and those that die at it."""
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
    """The most bytes that a device holds in a step, at which row, and who holds them."""

    bytes: int
    row: Row | None
    holders: tuple[tuple[str, int], ...]

    def beside(self, owner: str, size: int) -> "Peak":
        """Returns the peak while an owner holds more.

        Args:
            owner: who does.
            size: the additional bytes.
        """
        if not size:
            return self
        holders = ((owner, size), *self.holders)
        return replace(self, bytes=self.bytes + size, holders=holders)


def peaks(lowered: Lowered, places: int, temporary: Sequence[int] = ()) -> tuple[Peak, ...]:
    """Counts the peak of each place, and last that of the host.

    Args:
        lowered: the step.
        places: how many there are.
        temporary: bytes that the program of each row takes while it runs.
    """
    live = np.zeros(places + 1, int)  # HOST, -1, is the last one
    for buffer in lowered.buffers[: lowered.persistent]:
        live[buffer.memory] += buffer.bytes
    best = live.copy()
    best_row = [-1] * len(live)
    for i, (row, (born, dead)) in enumerate(zip(lowered.rows, lowered.changes(), strict=True)):
        grown = {row.place}
        for b in born:
            buffer = lowered.buffers[b]
            live[buffer.memory] += buffer.bytes
            grown.add(buffer.memory)
        # What dies with a row is still there while it runs.
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
    """Counts the bytes by owner in a memory while a row runs, the largest first; older versions are their own owner.

    Args:
        lowered: the step.
        memory: of a place, or HOST.
        until: the row; -1: before the first one.
        temporary_bytes: what its program takes, at its place.
    """
    alive = set(range(lowered.persistent))
    for i, (born, dead) in enumerate(lowered.changes()[: until + 1]):
        alive.update(born)
        if i < until:
            alive.difference_update(dead)
    here = [lowered.buffers[b] for b in alive if lowered.buffers[b].memory == memory]
    newest: dict[int, int] = {}  # by parameter: its newest version here
    for buffer in here:
        kind, p, _, _, version, _ = buffer.value
        if kind is ValueKind.PARAMETER:
            newest[p] = max(newest.get(p, version), version)
    total: dict[Owner, int] = {}
    if temporary_bytes and lowered.rows[until].place == memory:
        total[Owner.TEMPORARY] = temporary_bytes
    for buffer in here:
        kind, p, _, _, version, _ = buffer.value
        is_older = kind is ValueKind.PARAMETER and version < newest[p]
        owner = Owner.VERSION if is_older else buffer.owner
        total[owner] = total.get(owner, 0) + buffer.bytes
    largest_first = sorted(total.items(), key=lambda item: -item[1])
    return tuple((str(owner), size) for owner, size in largest_first)
