"""Liveness: each buffer is freed by the last row that touches it, unless it outlives the step.

A row is one program or one copy. To touch a buffer is to read it or to write it.

    row    touches               frees
    F      writes a
    SEND   reads a
    B      reads a, writes b     a; also b, unless b outlives the step

So the rows determine which buffers a memory holds, and when. A buffer begins with the first row
that writes it, unless it exists before the step. It ends with the row that frees it. If a pass
needs a buffer longer, it lets a later row touch the buffer.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from jvpipe.ir.buffers import Buffer, Lowered
from jvpipe.ir.rows import Row


def last_touches(rows: Sequence[Row]) -> dict[int, int]:
    """Returns, for each buffer, the number of the last row that reads or writes it."""
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
    """Makes a step of rows, in which the last row that touches a buffer frees it.

    Args:
        rows: the rows in the order of their dispatch.
        buffers: the table of all buffers; rows refer to buffers by their positions.
        persistent: how many buffers exist before the step; they are the first of the table.
        final: the buffers that hold the state after the step, in the order of the persistent ones.
            The next step begins with them.
        metrics: the other buffers that outlive the step.

    >>> from jvpipe.ir.kinds import Kind
    >>> from jvpipe.ir.values import Value, ValueKind
    >>> a, b = (Buffer(Value(ValueKind.TENSOR, i), 0, 4) for i in range(2))
    >>> rows = [Row(Kind.F, 0, 0, 0, 0, (), (0,)), Row(Kind.F, 0, 0, 1, 0, (0,), (1,))]
    >>> [row.frees for row in live(rows, [a, b], 0, (), [1]).rows]
    [(), (0,)]
    """
    final, metrics = tuple(final), tuple(metrics)
    # Final buffers and metrics outlive the step, so no row frees them.
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

    A buffer that no row touches is never freed. To free it, a pass adds a DROP row that touches it.

    Args:
        rows: the rows in the order of their dispatch.
        lasting: the buffers that no row may free.
    """
    ending: dict[int, list[int]] = {}
    for buffer, number in last_touches(rows).items():
        if buffer not in lasting:
            ending.setdefault(number, []).append(buffer)
    result = list(rows)
    for number, buffers in ending.items():
        result[number] = replace(rows[number], frees=tuple(buffers))
    return result


def renumbered(rows: Iterable[Row], ids: Mapping[int, int]) -> Iterator[Row]:
    """Yields the rows with new numbers of buffers.

    Args:
        rows: the rows to renumber.
        ids: the new number of each buffer that the rows touch.
    """

    def new(buffers: Iterable[int]) -> tuple[int, ...]:
        return tuple(ids[buffer] for buffer in buffers)

    for row in rows:
        yield replace(row, reads=new(row.reads), writes=new(row.writes), frees=new(row.frees))
