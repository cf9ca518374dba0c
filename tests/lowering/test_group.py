"""Rows of consecutive layers become one row, which does what they do."""

from collections.abc import Sequence

import pytest

from jvpipe.ir.buffers import Buffer, Lowered
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import Row
from jvpipe.ir.values import NONE, Value, ValueKind
from jvpipe.lowering.group import grouped
from jvpipe.lowering.liveness import live


def row(kind: str, layer: int, reads: Sequence[int], writes: Sequence[int], m: int = 0) -> Row:
    """A row at the place of its layer's ten."""
    place = layer // 10
    return Row(Kind(kind), place, place, layer, m, tuple(reads), tuple(writes))


def rows_of(*rows: Row, final: Sequence[int] = (0,), metrics: Sequence[int] = ()) -> list[str]:
    """The rows in groups, each with what it reads, writes and ends; buffer 0 is there before."""
    count = 1 + max(b for row in rows for b in (*row.reads, *row.writes))
    buffers = [Buffer(Value(ValueKind.TENSOR, i), 0, 4) for i in range(count)]
    step = grouped(live(rows, buffers, 1, final, metrics))
    assert sorted(b for row in step.rows for b in row.frees) == sorted(
        {b for row in step.rows for b in (*row.reads, *row.writes)} - {*final, *metrics}
    ), "what is read or written ends once, and nothing else does"
    return [f"{row} {row.reads} {row.writes} {row.frees}" for row in step.rows]


def test_what_one_layer_makes_for_the_next_alone_is_no_buffer() -> None:
    found = rows_of(
        row("F", 3, [0], [1, 2]), row("F", 4, [1], [3, 4]), row("B", 4, [2, 3, 4], [5]), metrics=[5]
    )
    assert found == [
        "0F0[layers 3 to 4] (0,) (2, 3, 4) ()",
        "0B0[layer 4] (2, 3, 4) (5,) (2, 3, 4)",
    ]


def test_copies_follow_the_group_and_what_is_fed_precedes_it() -> None:
    found = rows_of(
        row("F", 3, [0], [1]),
        row("SEND", 3, [1], [2]),
        row("FEED", 4, [], [3]),
        row("F", 4, [1, 3], [4]),
        metrics=[2, 4],
    )
    assert [each.split()[0] for each in found] == ["0FEED0[layer", "0F0[layers", "0SEND0[layer"]
    assert found[2].endswith("(1,) (2,) (1,)"), "a copy that comes later ends what it reads"


def test_what_a_copy_has_yet_to_read_is_not_overwritten_before_it() -> None:
    found = rows_of(
        row("B", 4, [0], [1]),
        row("SEND", 4, [1], [2]),
        row("B", 3, [1], [1]),
        metrics=[1, 2],
    )
    assert [each.split(" ")[0] for each in found] == ["0B0[layer", "0SEND0[layer", "0B0[layer"]


def test_a_recomputed_forward_joins_the_backward_that_it_is_for() -> None:
    found = rows_of(
        row("F", 4, [0], [1]),
        row("R", 4, [0], [2]),
        row("B", 4, [1, 2], [3]),
        row("R", 3, [0], [4]),
        row("B", 3, [3, 4], [5]),
        metrics=[5],
    )
    assert found == ["0F0[layer 4] (0,) (1,) ()", "0B0[layers 4 to 3] (0, 1) (5,) (1,)"]


@pytest.mark.parametrize(
    "second",
    [row("F", 4, [1], [2], m=1), row("B", 4, [1], [2]), row("F", 14, [1], [2])],
    ids=["another micro-batch", "another direction", "another stage"],
)
def test_a_group_is_of_one_task(second: Row) -> None:
    assert len(rows_of(row("F", 3, [0], [1]), second, metrics=[2])) == 2


def test_places_have_groups_of_their_own_until_one_reads_what_the_other_makes() -> None:
    def at(place: int, layer: int, reads: Sequence[int], writes: Sequence[int]) -> Row:
        return Row(Kind.F, place, 0, layer, 0, tuple(reads), tuple(writes))

    send = Row(Kind.SEND, 0, 0, 2, 0, (4,), (5,))
    found = rows_of(
        at(0, 1, [0], [1]),
        at(1, 1, [0], [2]),
        at(0, 2, [1], [4]),
        send,
        at(1, 2, [2, 5], [3]),
        metrics=[3],
    )
    assert [each.split(" (")[0] for each in found] == [
        "0F0[layers 1 to 2]",
        "0SEND0[layer 2]",
        "0F0[layers 1 to 2]",
    ]


def test_what_a_group_overwrites_leads_what_it_yields() -> None:
    found = rows_of(row("B", 4, [0, 1], [1, 2]), row("B", 3, [2, 3], [4, 3]), metrics=[1, 3, 4])
    assert found == ["0B0[layers 4 to 3] (0, 1, 3) (1, 3, 4) ()"]


def test_rows_that_may_not_join_stay() -> None:
    rows = [row("F", layer, [layer], [layer + 1]) for layer in range(4)]
    buffers = [Buffer(Value(ValueKind.TENSOR, i), 0, 4) for i in range(5)]
    step = live(rows, buffers, 1, [0], [4])
    found = grouped(step, joins=lambda row: row.layer != 2)
    assert [str(each) for each in found.rows] == [
        "0F0[layers 0 to 1]",
        "0F0[layer 2]",
        "0F0[layer 3]",
    ]
    assert isinstance(found, Lowered)
    assert found.rows[2].microbatch != NONE
