"""Liveness: each buffer ends with the last row that touches it, unless it outlives the step.

F  writes a      SEND  reads a      B  reads a, writes b      ->  B frees a; b stays if it is final or a metric
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from jvpipe.ir.buffers import Buffer, Lowered
from jvpipe.ir.rows import Row


def last_touches(rows: Sequence[Row]) -> dict[int, int]:
    """The number of the last row that reads or writes each buffer."""
    return {b: i for i, row in enumerate(rows) for b in (*row.reads, *row.writes)}


def live(
    rows: Sequence[Row],
    buffers: Sequence[Buffer],
    persistent: int,
    final: Iterable[int],
    metrics: Iterable[int],
) -> Lowered:
    """Makes a step of rows: every buffer is freed at the last row that touches it.

    Args:
        rows: in the order of their dispatch.
        buffers: the table.
        persistent: how many of the buffers, the first ones, exist before the step.
        final: those that hold the same things after it.
        metrics: those that the step yields beside.

    >>> from jvpipe.ir.kinds import Kind
    >>> from jvpipe.ir.values import Value, ValueKind
    >>> a, b = (Buffer(Value(ValueKind.TENSOR, i), 0, 4) for i in range(2))
    >>> rows = [Row(Kind.F, 0, 0, 0, 0, (), (0,)), Row(Kind.F, 0, 0, 1, 0, (0,), (1,))]
    >>> [row.frees for row in live(rows, [a, b], 0, (), [1]).rows]
    [(), (0,)]
    """
    final, metrics = tuple(final), tuple(metrics)
    return Lowered(
        tuple(freeing(rows, {*final, *metrics})), tuple(buffers), persistent, final, metrics
    )


def freeing(rows: Sequence[Row], lasting: Collection[int]) -> list[Row]:
    """The rows, each with the buffers that end with it; those that are lasting do not."""
    frees: dict[int, list[int]] = {}
    for b, i in last_touches(rows).items():
        if b not in lasting:
            frees.setdefault(i, []).append(b)
    return [
        replace(row, frees=tuple(frees[i])) if i in frees else row for i, row in enumerate(rows)
    ]


def renumbered(rows: Iterable[Row], ids: Mapping[int, int], microbatches: int = 0) -> list[Row]:
    """The rows over other numbers of buffers, their micro-batches counted from a later one.

    Args:
        rows: to be renumbered.
        ids: the new number of each buffer that they touch.
        microbatches: how many come before.
    """
    return [
        replace(
            row,
            microbatch=row.microbatch - microbatches if row.microbatch >= 0 else row.microbatch,
            reads=tuple(ids[b] for b in row.reads),
            writes=tuple(ids[b] for b in row.writes),
            frees=tuple(ids[b] for b in row.frees),
        )
        for row in rows
    ]
