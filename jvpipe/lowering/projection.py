"""Projecting: of a step that all processes lower alike, the rows that one of them runs.

    all          0F0  0SEND0(t0 -> place 1)  1F0  1B0  1SEND0(g -> place 0)  0B0
    process 0    0F0  0SEND0: offer t0                 1SEND0: ask for g     0B0
    process 1         0SEND0: ask for t0     1F0  1B0  1SEND0: offer g

A copy between two processes is one row of which each runs its half, at its place in the list.
"""

from collections.abc import Sequence
from dataclasses import replace

from jvpipe.ir.buffers import Buffer, Lowered
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import AskRun, OfferRun, Row
from jvpipe.ir.values import NONE
from jvpipe.lowering.receipts import crossings


def projected(lowered: Lowered, processes: Sequence[int], own: int) -> Lowered:
    """The rows of one process; the buffer table stays that of all, so that numbers mean the same everywhere.

    Args:
        lowered: a step with its receipts.
        processes: of each place.
        own: the process.
    """
    crossing = {x.row: x for x in crossings(lowered, processes)}
    rows: list[Row] = []
    for i, row in enumerate(lowered.rows):
        frees = tuple(b for b in row.frees if processes[lowered.buffers[b].place] == own)
        x = crossing.get(i)
        if x is None:
            if processes[row.place] == own:
                rows += _as_received(replace(row, frees=frees), lowered, processes)
        elif x.source == own:
            rows.append(replace(row, writes=(), frees=frees, run=OfferRun(i, x.target)))
        elif x.target == own:
            place = lowered.buffers[x.copy].place
            rows.append(replace(row, place=place, reads=(), frees=frees, run=AskRun(i, x.source)))
    metrics = tuple(b for b in lowered.metrics if processes[lowered.buffers[b].place] == own)
    return replace(lowered, rows=tuple(rows), metrics=metrics)


def _as_received(row: Row, lowered: Lowered, processes: Sequence[int]) -> list[Row]:
    """A row; one that waits until another process has a copy only ends what is left, for the receipt has waited."""
    if (
        row.kind is not Kind.FREE
        or processes[lowered.buffers[row.reads[1]].place] == processes[row.place]
    ):
        return [row]
    return [replace(row, kind=Kind.DROP, reads=row.reads[:1])] if row.frees else []


def telling_all(lowered: Lowered, processes: Sequence[int]) -> Lowered:
    """Adds what tells every process the metrics of a step: copies of those that lie elsewhere, at its first place.

    Args:
        lowered: a step that yields each of its metrics at one place.
        processes: of each place.
    """
    rows, buffers, metrics = list(lowered.rows), list(lowered.buffers), list[int]()
    for process in dict.fromkeys(processes):
        there = processes.index(process)
        for b in lowered.metrics:
            if processes[buffers[b].place] != process:
                rows.append(
                    Row(Kind.SEND, buffers[b].place, NONE, NONE, NONE, (b,), (len(buffers),))
                )
                buffers.append(Buffer(buffers[b].value, there, buffers[b].bytes))
                b = len(buffers) - 1
            metrics.append(b)
    return replace(lowered, rows=tuple(rows), buffers=tuple(buffers), metrics=tuple(metrics))
