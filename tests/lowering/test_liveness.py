"""Each buffer ends with the last row that touches it."""

from jvpipe.ir.buffers import Buffer
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import Row
from jvpipe.ir.values import Value, ValueKind
from jvpipe.lowering.liveness import live, renumbered

BUFFERS = [Buffer(Value(ValueKind.TENSOR, i), 0, 4) for i in range(4)]
ROWS = [
    Row(Kind.F, 0, 0, 0, 5, (0,), (1,)),
    Row(Kind.SEND, 0, 0, 0, 5, (1,), (2,)),
    Row(Kind.B, 0, 0, 0, 5, (1, 0), (0, 3)),
]


def test_what_nobody_touches_any_more_ends() -> None:
    step = live(ROWS, BUFFERS, 1, [0], [3])
    assert [row.frees for row in step.rows] == [(), (2,), (1,)]
    assert (step.persistent, step.final, step.metrics) == (1, (0,), (3,))


def test_what_a_row_makes_for_nobody_ends_with_it() -> None:
    assert [row.frees for row in live(ROWS, BUFFERS, 1, [0], ()).rows] == [(), (2,), (1, 3)]


def test_what_the_step_began_with_may_end() -> None:
    assert live(ROWS, BUFFERS, 1, (), [3]).rows[-1].frees == (0, 1)


def test_rows_get_the_new_numbers_of_their_buffers() -> None:
    (row,) = renumbered([Row(Kind.U, 0, 0, 0, -1, (1,), (1,), (1,))], {1: 7})
    assert (row.microbatch, row.reads, row.writes, row.frees) == (-1, (7,), (7,), (7,))
