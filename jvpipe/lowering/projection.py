"""Projection: selects the rows of one process from a step, which each process lowers as a whole.

In this example process 0 has place (device) 0, and process 1 has place 1:

    all          0F0  0SEND0(t0 -> place 1)  1F0  1B0  1SEND0(g -> place 0)  0B0
    process 0    0F0  0SEND0: offer t0                 1SEND0: ask for g     0B0
    process 1         0SEND0: ask for t0     1F0  1B0  1SEND0: offer g

A copy between two processes is one row of the whole step, and each of the two processes runs its
half of the copy. No deadlock is possible, because every process keeps the order of the whole step.
Consider the earliest row with a half that waits. The process of the other half waits for no earlier
row. So it reaches its half, and the waiting ends.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from jvpipe.ir.buffers import Buffer, Lowered
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import AskRun, OfferRun, Row
from jvpipe.ir.values import NONE
from jvpipe.lowering.receipts import crossings


def projected(lowered: Lowered, processes: Sequence[int], process: int) -> Lowered:
    """Returns a step with the rows of one process.

    The step keeps the buffer table of all processes, so that a number means the same buffer in
    every process.

    Args:
        lowered: a step with its receipts (receipts.py).
        processes: the process of each place.
        process: the process whose rows are returned.
    """

    def local(buffers: Iterable[int]) -> tuple[int, ...]:
        return tuple(b for b in buffers if processes[lowered.buffers[b].place] == process)

    crossing = {x.row: x for x in crossings(lowered, processes)}
    rows: list[Row] = []
    for number, row in enumerate(lowered.rows):
        x = crossing.get(number)
        here = processes[row.place] == process
        if not here and (x is None or x.target != process):
            continue
        row = replace(row, frees=local(row.frees))
        if x is None:
            rows += _as_received(row, lowered, processes)
        elif here:  # the source's half: another process makes the copy
            rows.append(replace(row, writes=(), run=OfferRun(number, x.target)))
        else:  # the target's half, at the place of the copy
            place = lowered.buffers[x.copy].place
            run = AskRun(number, x.source)
            rows.append(replace(row, place=place, reads=(), run=run))
    return replace(lowered, rows=tuple(rows), metrics=local(lowered.metrics))


def _as_received(row: Row, lowered: Lowered, processes: Sequence[int]) -> list[Row]:
    """Returns a row in the form in which its process runs it, or no row.

    FREE waits for a copy and then frees the buffer that was copied. If the copy went to another
    process, a receipt has already waited for it. Then FREE becomes DROP, which only frees the
    buffer.

    Args:
        row: a row of the process.
        lowered: the step of all processes.
        processes: the process of each place.
    """
    if row.kind is not Kind.FREE:
        return [row]
    source, copy = row.reads
    if processes[lowered.buffers[copy].place] == processes[row.place]:
        return [row]
    return [replace(row, kind=Kind.DROP, reads=(source,))] if row.frees else []


def telling_all(lowered: Lowered, processes: Sequence[int]) -> Lowered:
    """Adds the copies by which every process gets all metrics of a step.

    A process that lacks a metric gets a copy at its first place.

    Args:
        lowered: a step that yields each of its metrics at one place.
        processes: the process of each place.
    """
    rows = list(lowered.rows)
    buffers = list(lowered.buffers)
    metrics: list[int] = []
    for process in dict.fromkeys(processes):
        target = processes.index(process)
        for b in lowered.metrics:
            metric = buffers[b]
            if processes[metric.place] == process:
                metrics.append(b)
                continue
            copy = len(buffers)  # the next number of the table
            rows.append(
                Row(
                    Kind.SEND,
                    metric.place,
                    NONE,
                    NONE,
                    NONE,
                    (b,),
                    (copy,),
                )
            )
            buffers.append(Buffer(metric.value, target, metric.bytes))
            metrics.append(copy)
    return replace(
        lowered,
        rows=tuple(rows),
        buffers=tuple(buffers),
        metrics=tuple(metrics),
    )
