"""Rows say in their text what they are of; and what runs is told apart by its operand."""

import pytest

from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import LayerRun, PieceRun, Row, ZeroRun
from jvpipe.ir.values import NONE, ValueKind


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        (Row(Kind.F, 0, 1, 4, 2, (), ()), "1F2[layer 4]"),
        (Row(Kind.DROP, 3, NONE, NONE, NONE, (1,), ()), "DROP"),
        (Row(Kind.U, 0, 2, NONE, NONE, (), ()), "2U"),
        (Row(Kind.LOSS, 0, NONE, 5, NONE, (), ()), "LOSS[layer 5]"),
    ],
)
def test_a_row_leaves_out_what_it_is_not_of(row: Row, shown: str) -> None:
    assert str(row) == shown


def test_rows_alike_share_a_program_and_others_do_not() -> None:
    runs = [
        LayerRun(0),
        LayerRun(1),
        ZeroRun(ValueKind.DELTA),
        PieceRun(0),
        PieceRun(0, keeps=True),
    ]
    assert len(set(runs)) == len(runs)
    assert LayerRun(0) == LayerRun(0)
    assert LayerRun(0) != PieceRun(0)
