"""A late copy holds up its own device, whoever sends to it, and whoever waits for its results;
nobody else.
"""

from collections.abc import Container, Sequence
from typing import Any

import pytest

from jvpipe import _jax
from jvpipe.ir.buffers import HOST
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import Row
from jvpipe.runtime.engine.dispatch import dispatch_ready


def row(
    kind: Kind,
    place: int,
    reads: tuple[int, ...] = (),
    writes: tuple[int, ...] = (),
    layer: int = 0,
) -> Row:
    return Row(kind, place, place, layer, 0, reads, writes)


ROWS = [
    row(Kind.F, 0, (), (0,)),
    row(Kind.OUT, 0, (0,), (1,)),
    row(Kind.FREE, 0, (0, 1), ()),  # waits
    row(Kind.F, 1, (), (2,)),
    row(Kind.F, 0, (), (3,)),
    row(Kind.SEND, 0, (3,), (4,)),
    row(Kind.F, 2, (), (5,)),
    row(Kind.F, 1, (4,), (6,)),  # what the late device sends
    row(Kind.F, 2, (), (7,)),
    row(Kind.SEND, 2, (7,), (8,)),  # to the late device
    row(Kind.F, 2, (), (9,)),
    row(Kind.F, 3, (), (10,)),
]
TARGETS = [0, HOST, 0, 1, 0, 1, 2, 1, 2, 0, 2, 3]


SWAPPING = [*TARGETS[:8], HOST, *TARGETS[9:]]
"""Device 2 swaps out what it made."""


def order(
    monkeypatch: pytest.MonkeyPatch,
    ready_after: int,
    targets: Sequence[int] = TARGETS,
    leaves_host: Container[int] = (),
) -> list[int]:
    """The order of dispatch if the copy is there once so many rows have been dispatched."""
    table: list[Any] = [None] * 11
    done: list[int] = []
    asked: list[Any] = []

    def is_ready(array: Any) -> bool:
        asked.append(array)
        return (
            len(done) >= ready_after or len(asked) > 100
        )  # at last it comes, though nothing else happens

    monkeypatch.setattr(_jax, "is_ready", is_ready)
    for index in dispatch_ready(ROWS, targets, table, leaves_host):
        done.append(index)
        for b in ROWS[index].writes:
            table[b] = b
    return done


def test_in_order_if_nothing_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    assert order(monkeypatch, 0) == list(range(len(ROWS)))


def test_the_others_go_on_until_they_need_the_late_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert order(monkeypatch, 99) == [0, 1, 3, 6, 8, 11, 2, 4, 5, 7, 9, 10]


def test_a_device_goes_on_as_soon_as_its_copy_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = order(monkeypatch, 4)
    assert found == [0, 1, 3, 6, 2, 4, 5, 7, 8, 9, 10, 11]


def test_nothing_goes_to_a_limited_host_before_what_was_to_leave_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unlimited = order(monkeypatch, 99, SWAPPING)
    assert unlimited == [0, 1, 3, 6, 8, 11, 2, 4, 5, 7, 9, 10]
    assert order(monkeypatch, 99, SWAPPING, {4}) == [
        0,
        1,
        3,
        6,
        11,
        2,
        4,
        5,
        7,
        8,
        9,
        10,
    ]  # the late device's row 4
    assert order(monkeypatch, 99, SWAPPING, {9}) == unlimited  # what leaves later is not waited for


@pytest.mark.parametrize("ready_after", range(8))
def test_each_device_keeps_its_order(monkeypatch: pytest.MonkeyPatch, ready_after: int) -> None:
    found = order(monkeypatch, ready_after)
    assert sorted(found) == list(range(len(ROWS)))
    for device in range(4):
        mine = [i for i in found if ROWS[i].place == device]
        assert mine == sorted(mine)


def test_nothing_is_dropped_before_all_that_moves_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers change places; what comes to device 0 is late. Of another device's swap nobody has to
    wait.
    """
    rows = [
        row(Kind.MOVE, 0, (0,), (2,), -1),
        row(Kind.MOVE, 1, (1,), (3,), -1),
        row(Kind.FREE, 0, (0, 2), (), -1),
        row(Kind.FREE, 1, (1, 3), (), -1),
        row(Kind.DROP, 0, (0,), (), -1),
        row(Kind.DROP, 1, (1,), (), -1),
    ]
    swap = [row(Kind.OUT, 2, (4,), (5,)), row(Kind.FREE, 2, (4, 5))]
    for late, first in ((3, rows), (5, [*swap, *rows])):
        table: list[Any] = [0, 1, None, None, 4, None]
        asked: list[int] = []

        def is_ready(array: int, late: int = late, asked: list[int] = asked) -> bool:
            asked.append(array)
            return array != late or len(asked) > 50

        monkeypatch.setattr(_jax, "is_ready", is_ready)
        done = []
        for index in dispatch_ready(first, [found.place for found in first], table):
            done.append(first[index])
            for b in first[index].writes:
                table[b] = b
        kinds = [found.kind for found in done if found.place < 2]
        assert kinds == ["MOVE", "MOVE", "FREE", "FREE", "DROP", "DROP"]
        assert (done[-1].kind == "FREE") == (late == 5), "the swap comes last"
