"""Receipts: what one process offers to another stays as it is until it has arrived there.

A copy between places of two processes is offered by one and taken by the other, some time later. Who offers may let go
of it at once, but not overwrite or delete it before it has arrived. That is seen by something that was made of the copy
and came back, or else by a mark that is made for that:

    process 0   U SEND(p) ............................ RECEIPT(mark)  B(p) overwrites p
    process 1             ARRIVE(p) SEND(mark)

Copies that follow one another share a mark. So do those of layers that move: what is left of them is dropped after it.
Where no backward comes back, as in an evaluation, at most four offers are open between two processes.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from jvpipe.ir.buffers import Buffer, Lowered
from jvpipe.ir.kinds import KINDS, Kind, Link
from jvpipe.ir.rows import ArriveRun, Row
from jvpipe.ir.values import NONE, Value, ValueKind
from jvpipe.lowering.liveness import freeing

OPEN_OFFERS = 4
MARK_BYTES = 4


class Crossing(NamedTuple):
    """The copy that a `row`, by its number, makes of a buffer for another process."""

    row: int
    source: int
    target: int
    offered: int
    copy: int


def crossings(lowered: Lowered, processes: Sequence[int]) -> list[Crossing]:
    """The copies between places of two processes, in the order of their rows.

    Args:
        lowered: a step.
        processes: of each place.
    """
    return [
        Crossing(
            i,
            processes[row.place],
            processes[lowered.buffers[row.writes[0]].place],
            row.reads[0],
            row.writes[0],
        )
        for i, row in enumerate(lowered.rows)
        if KINDS[row.kind].link is Link.PEER
        and processes[row.place] != processes[lowered.buffers[row.writes[0]].place]
    ]


def with_receipts(lowered: Lowered, processes: Sequence[int]) -> Lowered:
    """Adds the rows that wait for the arrival of what was offered, before it is overwritten or deleted.

    Args:
        lowered: a step, as one process would run it.
        processes: of each place.
    """
    crossing, end = crossings(lowered, processes), len(lowered.rows)
    witnesses, spoilers = _witnesses(lowered, crossing), _spoilers(lowered, crossing)
    receipts = _Receipts(lowered)
    answered = any(KINDS[row.kind].in_flight < 0 for row in lowered.rows)
    marked: list[tuple[Crossing, int]] = []
    unanswered: dict[tuple[int, int], list[Crossing]] = defaultdict(list)
    for x in crossing:
        until = spoilers.get(x.row, end)
        if x.row in spoilers or x.offered in lowered.final:
            row, witness = witnesses.get(x.row, (end, NONE))
            moves = (
                lowered.rows[x.row].kind is Kind.MOVE
            )  # its end is far, and a witness would be held till then
            if row <= until and row < end and not moves:
                receipts.wait([x], witness, until)
            else:
                marked.append((x, until))
        elif not answered and x.offered not in lowered.metrics:
            unanswered[x.source, x.target].append(x)
    for offers in unanswered.values():
        marked += [(x, later.row) for x, later in zip(offers, offers[OPEN_OFFERS:], strict=False)]
    for copies, until in _following(lowered, marked):
        receipts.mark(copies, until)
    return receipts.added()


def _witnesses(lowered: Lowered, crossing: Sequence[Crossing]) -> dict[int, tuple[int, int]]:
    """By the row of each crossing, the first row at its source that reads what was made of the copy, and which buffer
    that is.
    """
    bit = {x.row: 1 << i for i, x in enumerate(crossing)}
    waiting = defaultdict[int, int](
        int
    )  # by place, the offers of which nothing has come back: bits of a number
    for x in crossing:
        waiting[lowered.rows[x.row].place] |= bit[x.row]
    made: dict[int, int] = {}  # by buffer, the offers that it depends on
    witnesses: dict[int, tuple[int, int]] = {}
    for i, row in enumerate(lowered.rows):
        here = [b for b in row.reads if lowered.buffers[b].memory == row.place]
        back = depends = 0
        for b in row.reads:
            depends |= made.get(b, 0)
        for b in here:
            back |= made.get(b, 0)
        if news := back & waiting[row.place]:
            waiting[row.place] &= ~news
            for x in (x for x in crossing if news & bit[x.row]):
                witnesses[x.row] = i, next(b for b in here if made.get(b, 0) & bit[x.row])
        for b in row.writes:
            made[b] = depends | bit.get(i, 0)
    return witnesses


def _spoilers(lowered: Lowered, crossing: Sequence[Crossing]) -> dict[int, int]:
    """By the row of each crossing, the row before which what it offers must have arrived: that overwrites it, or
    deletes it; the end where it is deleted once it has been offered.
    """
    offers = defaultdict[int, list[int]](list)
    for x in crossing:
        offers[x.offered].append(x.row)
    spoilers: dict[int, int] = {}
    for i, row in enumerate(lowered.rows):
        deleted = [b for b in row.frees if b < lowered.persistent]
        for b in (*row.writes, *deleted):
            for offer in offers.get(b, ()):
                if offer < i:
                    spoilers.setdefault(offer, i)
                elif offer == i and b in deleted:
                    spoilers.setdefault(offer, len(lowered.rows))
    return spoilers


def _following(
    lowered: Lowered, marked: Iterable[tuple[Crossing, int]]
) -> list[tuple[list[Crossing], int]]:
    """The copies from one place to another that follow one another and must have arrived before the same row."""
    runs = list(accumulate(KINDS[row.kind].link is not Link.PEER for row in lowered.rows))
    groups: dict[tuple[int, int, int, int], list[Crossing]] = defaultdict(list)
    for x, until in marked:
        groups[runs[x.row], lowered.rows[x.row].place, lowered.buffers[x.copy].place, until].append(
            x
        )
    return [(copies, until) for (*_, until), copies in groups.items()]


class _Receipts:
    """The rows that are added to a step, by the row before which they stand."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered, self.buffers = lowered, list(lowered.buffers)
        self._before: dict[int, list[Row]] = defaultdict(list)

    def wait(self, copies: Sequence[Crossing], witness: int, until: int) -> None:
        """Waits for a buffer that depends on copies; what would end with its offer is held till then.

        Args:
            copies: from one place to another.
            witness: the buffer.
            until: the row before which that is.
        """
        rows, row = self.lowered.rows, self.lowered.rows[copies[-1].row]
        held = dict.fromkeys(x.offered for x in copies if x.offered in rows[x.row].frees)
        reads = (witness, *held)
        self._before[until].append(
            Row(Kind.RECEIPT, row.place, row.stage, row.layer, row.microbatch, reads, ())
        )

    def mark(self, copies: Sequence[Crossing], until: int) -> None:
        """Makes one mark of copies, sends it back, and waits for it before row `until`."""
        number, row = copies[-1].row, self.lowered.rows[copies[-1].row]
        here, there = row.place, self.buffers[copies[-1].copy].place
        value = Value(ValueKind.MARK, number, row.layer, row.microbatch)
        made, returned = len(self.buffers), len(self.buffers) + 1
        self.buffers += [Buffer(value, there, MARK_BYTES), Buffer(value, here, MARK_BYTES)]
        arrived, run = tuple(x.copy for x in copies), ArriveRun(copies[0].row)
        self._before[number + 1] += [
            Row(Kind.ARRIVE, there, NONE, row.layer, row.microbatch, arrived, (made,), (), run),
            Row(Kind.SEND, there, NONE, row.layer, row.microbatch, (made,), (returned,)),
        ]
        self.wait(copies, returned, until)

    def added(self) -> Lowered:
        """The step with these rows; every buffer ends with the last row that touches it."""
        if not self._before:
            return self.lowered
        lowered, rows = self.lowered, list[Row]()
        for i in range(len(lowered.rows) + 1):
            rows += self._before.get(i, ())
            rows += (replace(row, frees=()) for row in lowered.rows[i : i + 1])
        rows = freeing(rows, {*lowered.final, *lowered.metrics})
        return replace(lowered, rows=tuple(rows), buffers=tuple(self.buffers))
