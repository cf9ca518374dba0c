"""Receipts: a buffer that one process offers to another stays unchanged until it has arrived there.

A crossing is a copy between places of two processes: the source offers its buffer, and the target
takes a copy some time later. Until the copy has arrived, the source must not overwrite or delete
the buffer. It may drop its reference to the buffer at any time. A RECEIPT row at the source waits
for one of two signs that the copy has arrived:

    a witness   a buffer that depends on the copy and comes back to the source anyway, such as the
                cotangent of an activation that was sent
    a mark      a small array that the target sends if no witness comes back in time

Here a mark is sent for parameter p. Time runs to the right:

    process 0   U SEND(p) ............................ RECEIPT(mark)  U overwrites p
    process 1             ARRIVE(p) SEND(mark)

Crossings without other rows between them, such as those of a layer that moves, share a mark. If no
backward follows, as in an evaluation, no witness comes back. Then marks limit the number of open
offers from one process to another to `OPEN_OFFERS`.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from jvpipe.ir.buffers import Buffer, Lowered
from jvpipe.ir.kinds import KINDS, CopyLink, Kind
from jvpipe.ir.rows import ArriveRun, Row
from jvpipe.ir.values import NONE, Value, ValueKind
from jvpipe.lowering.liveness import freeing

OPEN_OFFERS = 4
"""The largest number of open offers from one process to another if no backward answers them.

A larger number lets the source run further ahead of the target.
"""
MARK_BYTES = 4


class Crossing(NamedTuple):
    """A copy of a buffer for another process.

    `row` is the number of the row that makes it. `source` and `target` are the two processes,
    `offered` is the buffer of the source and `copy` the buffer of the target.
    """

    row: int
    source: int
    target: int
    offered: int
    copy: int


class _Witness(NamedTuple):
    """A `buffer` that depends on a copy, and the first `row` at the copy's source that reads it."""

    row: int
    buffer: int


class _Deadline(NamedTuple):
    """A crossing whose copy must have arrived before row number `until`."""

    crossing: Crossing
    until: int


def crossings(lowered: Lowered, processes: Sequence[int]) -> list[Crossing]:
    """Returns the copies between places of two processes, in the order of their rows.

    Args:
        lowered: a step.
        processes: the process of each place.
    """
    result = []
    for number, row in enumerate(lowered.rows):
        if KINDS[row.kind].link is not CopyLink.PEER:
            continue
        offered = row.reads[0]
        copy = row.writes[0]
        source = processes[row.place]
        target = processes[lowered.buffers[copy].place]
        if source != target:
            result.append(
                Crossing(
                    number,
                    source,
                    target,
                    offered,
                    copy,
                )
            )
    return result


def with_receipts(lowered: Lowered, processes: Sequence[int]) -> Lowered:
    """Adds rows that wait until copies have arrived, before the offered buffers are spoiled.

    A buffer is spoiled when it is overwritten or deleted.

    Args:
        lowered: a step, with the rows of all processes.
        processes: the process of each place.
    """
    crossing = crossings(lowered, processes)
    end = len(lowered.rows)
    witnesses = _witnesses(lowered, crossing)
    spoilers = _spoilers(lowered, crossing)
    receipts = _Receipts(lowered)
    has_backward = any(KINDS[row.kind].in_flight < 0 for row in lowered.rows)
    to_mark: list[_Deadline] = []
    unanswered: dict[tuple[int, int], list[Crossing]] = defaultdict(list)
    for x in crossing:
        if x.row in spoilers or x.offered in lowered.final:
            until = spoilers.get(x.row, end)
            witness = witnesses.get(x.row)
            # The deadline of a move is far away. A witness would occupy its memory until then, so a
            # mark of a few bytes is better.
            is_move = lowered.rows[x.row].kind is Kind.MOVE
            if witness and witness.row <= until and not is_move:
                receipts.wait([x], witness.buffer, until)
            else:
                to_mark.append(_Deadline(x, until))
        elif not has_backward and x.offered not in lowered.metrics:
            unanswered[x.source, x.target].append(x)
    # Nothing comes back for these offers. So the mark of an offer has to come back before the
    # OPEN_OFFERS-th offer after it.
    for offers in unanswered.values():
        for x, later in zip(offers, offers[OPEN_OFFERS:], strict=False):
            to_mark.append(_Deadline(x, later.row))
    for copies, until in _following(lowered, to_mark):
        receipts.mark(copies, until)
    return receipts.lowered_with_them()


def _witnesses(lowered: Lowered, crossing: Sequence[Crossing]) -> dict[int, _Witness]:
    """Finds the witness of each crossing, by the crossing's row.

    The witness is the first buffer at the source that was made from the copy.

    A set of crossings is an integer with one bit per crossing. A buffer that a row writes depends
    on all crossings of the buffers that the row reads: its set is the `or` of their sets. If a row
    reads what was made from the copies of crossings that have no witness yet, a scan over all
    crossings finds these. Each scan gives some crossing its witness, so there are at most as many
    scans as crossings.
    """
    bit = {x.row: 1 << i for i, x in enumerate(crossing)}
    waiting: dict[int, int] = defaultdict(int)  # by place: the offers without a witness
    for x in crossing:
        waiting[lowered.rows[x.row].place] |= bit[x.row]
    ancestors: dict[int, int] = {}  # by buffer: the crossings that it depends on
    witnesses: dict[int, _Witness] = {}
    for number, row in enumerate(lowered.rows):
        depends = returned = 0
        local = []
        for b in row.reads:
            depends |= ancestors.get(b, 0)
            if lowered.buffers[b].memory == row.place:
                returned |= ancestors.get(b, 0)
                local.append(b)
        news = returned & waiting[row.place]
        if news:
            waiting[row.place] ^= news
            for x in crossing:
                if news & bit[x.row]:
                    behind = (b for b in local if ancestors.get(b, 0) & bit[x.row])
                    witnesses[x.row] = _Witness(number, next(behind))
        for b in row.writes:
            ancestors[b] = depends | bit.get(number, 0)
    return witnesses


def _spoilers(lowered: Lowered, crossing: Sequence[Crossing]) -> dict[int, int]:
    """Finds the row that spoils the offered buffer of each crossing; keys are the crossings' rows.

    This row overwrites or deletes the buffer. If the row of the offer itself deletes the buffer,
    `wait` postpones the deletion, so the spoiler is the end of the step. Only arrays from
    before the step are ever deleted. For any other buffer the process only drops its reference,
    which is safe at any time.
    """
    offers: dict[int, list[int]] = defaultdict(list)  # by buffer: the rows that offer it
    for x in crossing:
        offers[x.offered].append(x.row)
    spoilers: dict[int, int] = {}
    for number, row in enumerate(lowered.rows):
        deleted = [b for b in row.frees if b < lowered.persistent]
        for b in (*row.writes, *deleted):
            for offer in offers.get(b, ()):
                if offer < number:
                    spoilers.setdefault(offer, number)
                elif offer == number and b in deleted:
                    spoilers.setdefault(offer, len(lowered.rows))
    return spoilers


def _following(
    lowered: Lowered,
    deadlines: Iterable[_Deadline],
) -> list[tuple[list[Crossing], int]]:
    """Groups crossings that can share a mark.

    The crossings of a group have the same source, the same target and the same deadline. Only
    copies stand between them, so a mark after the last crossing comes only slightly later than a
    mark after the first.
    """
    # Two copies have the same number in `runs` if and only if there are only copies between them.
    are_runs = [KINDS[row.kind].link is not CopyLink.PEER for row in lowered.rows]
    runs = list(accumulate(are_runs))
    groups: dict[tuple[int, int, int, int], list[Crossing]] = defaultdict(list)
    for x, until in deadlines:
        source = lowered.rows[x.row].place
        target = lowered.buffers[x.copy].place
        groups[runs[x.row], source, target, until].append(x)
    return [(copies, until) for (*_, until), copies in groups.items()]


class _Receipts:
    """The rows to add to a step; `_before` has them by the number of the row that they precede."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.buffers = list(lowered.buffers)
        self._before: dict[int, list[Row]] = defaultdict(list)

    def wait(self, copies: Sequence[Crossing], witness: int, until: int) -> None:
        """Adds a row that waits for a witness or a returned mark.

        If an offer would free its buffer, the new row also reads the buffer, so that it lives until
        the new row.

        Args:
            copies: the crossings, all from one place to another.
            witness: the buffer to wait for, which depends on the copies.
            until: the number of the row before which the new row stands.
        """
        rows = self.lowered.rows
        row = rows[copies[-1].row]
        offered = [x.offered for x in copies if x.offered in rows[x.row].frees]
        reads = (witness, *dict.fromkeys(offered))
        self._before[until].append(
            Row(
                Kind.RECEIPT,
                row.place,
                row.stage,
                row.layer,
                row.microbatch,
                reads,
                (),
            )
        )

    def mark(self, copies: Sequence[Crossing], until: int) -> None:
        """Adds the rows that make one mark for some crossings, send it back, and wait for it.

        Args:
            copies: the crossings, all from one place to another.
            until: the number of the row before which they must have arrived.
        """
        number = copies[-1].row
        row = self.lowered.rows[number]
        here = row.place
        there = self.buffers[copies[-1].copy].place
        value = Value(ValueKind.MARK, number, row.layer, row.microbatch)
        mark = len(self.buffers)
        returned = len(self.buffers) + 1
        self.buffers += [Buffer(value, place, MARK_BYTES) for place in (there, here)]
        arrived = tuple(x.copy for x in copies)
        of = there, NONE, row.layer, row.microbatch
        self._before[number + 1] += [
            Row(Kind.ARRIVE, *of, arrived, (mark,), (), ArriveRun(copies[0].row)),
            Row(Kind.SEND, *of, (mark,), (returned,)),
        ]
        self.wait(copies, returned, until)

    def lowered_with_them(self) -> Lowered:
        """Returns the step with the added rows, and with the rows that now free its buffers."""
        if not self._before:
            return self.lowered
        lowered = self.lowered
        rows: list[Row] = []
        for number, row in enumerate(lowered.rows):
            rows += self._before.get(number, ())
            rows.append(replace(row, frees=()))
        rows += self._before.get(len(lowered.rows), ())
        rows = freeing(rows, {*lowered.final, *lowered.metrics})
        return replace(lowered, rows=tuple(rows), buffers=tuple(self.buffers))
