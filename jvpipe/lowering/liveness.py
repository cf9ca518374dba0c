"""Liveness: each buffer ends with the last row that touches it, unless it outlives the step.

    F     writes a
    SEND  reads a
    B     reads a, writes b         frees a; b stays if it is final or a metric

So a row says all that happens to memory: what it writes begins, what it frees ends.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from jvpipe.ir.buffers import Buffer, Lowered
from jvpipe.ir.rows import Row


def last_touches(rows: Sequence[Row]) -> dict[int, int]:
    """Returns, by buffer, the number of the last row that reads or writes it."""
    last: dict[int, int] = {}
    for number, row in enumerate(rows):
        for buffer in (*row.reads, *row.writes):
            last[buffer] = number
    return last


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
        final: those that take the place of the persistent ones after it, in their order.
        metrics: those that the step yields besides.

    >>> from jvpipe.ir.kinds import Kind
    >>> from jvpipe.ir.values import Value, ValueKind
    >>> a, b = (Buffer(Value(ValueKind.TENSOR, i), 0, 4) for i in range(2))
    >>> rows = [Row(Kind.F, 0, 0, 0, 0, (), (0,)), Row(Kind.F, 0, 0, 1, 0, (0,), (1,))]
    >>> [row.frees for row in live(rows, [a, b], 0, (), [1]).rows]
    [(), (0,)]
    """
    final, metrics = tuple(final), tuple(metrics)
    # What outlives the step is freed by none of its rows.
    rows = freeing(rows, {*final, *metrics})
    return Lowered(
        tuple(rows),
        tuple(buffers),
        persistent,
        final,
        metrics,
    )


def freeing(rows: Sequence[Row], lasting: Collection[int]) -> list[Row]:
    """Returns the rows, each with the buffers that end with it.

    A buffer that no row touches ends with none: what has to go untouched is dropped by a row of
    its own (DROP).

    Args:
        rows: in the order of their dispatch.
        lasting: buffers that end with none of them.
    """
    ending: dict[int, list[int]] = {}
    for buffer, number in last_touches(rows).items():
        if buffer not in lasting:
            ending.setdefault(number, []).append(buffer)
    result = list(rows)
    for number, buffers in ending.items():
        result[number] = replace(rows[number], frees=tuple(buffers))
    return result


def renumbered(rows: Iterable[Row], ids: Mapping[int, int], microbatches: int = 0) -> list[Row]:
    """Returns the rows over other numbers of buffers, their micro-batches counted from a later one.

    Args:
        rows: to be renumbered.
        ids: the new number of each buffer that they touch.
        microbatches: the micro-batch from which they count from now on.
    """

    def new(buffers: Iterable[int]) -> tuple[int, ...]:
        return tuple(ids[buffer] for buffer in buffers)

    result = []
    for row in rows:
        m = row.microbatch
        if m >= 0:  # NONE stays what it is
            m -= microbatches
        result.append(
            replace(
                row,
                microbatch=m,
                reads=new(row.reads),
                writes=new(row.writes),
                frees=new(row.frees),
            )
        )
    return result
