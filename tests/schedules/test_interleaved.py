"""Interleaved 1F1B and ZB-H1 against tables made by hand, and against what their rules promise."""

from fractions import Fraction
from importlib import import_module

import pytest

from jvpipe.schedules.interleaved import ZBH1, Interleaved
from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.schedules.schedule import Schedule, numbers_of
from tests.schedules.units import Clock, checked_order, drawings, drawn, letters, table

INTERLEAVED = """
0  F0 F1 F2 F3 f0 f1 f2 f3 F4 F5 F6 b0 F7 b1 f4 b2 f5 b3 f6 B0 f7 B1 B2 B3 b4 b5 b6 b7 B4 B5 B6 B7
1  F0 F1 F2 F3 f0 f1 f2 f3 F4 b0 F5 b1 F6 b2 F7 b3 f4 B0 f5 B1 f6 B2 f7 B3 b4 b5 b6 b7 B4 B5 B6 B7
2  F0 F1 F2 F3 f0 f1 f2 b0 f3 b1 F4 b2 F5 b3 F6 B0 F7 B1 f4 B2 f5 B3 f6 b4 f7 b5 b6 b7 B4 B5 B6 B7
3  F0 F1 F2 F3 f0 b0 f1 b1 f2 b2 f3 b3 F4 B0 F5 B1 F6 B2 F7 B3 f4 b4 f5 b5 f6 b6 f7 b7 B4 B5 B6 B7
"""

ZB_H1 = """
0  F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
1  F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
2  F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
3  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7
"""

ONCE = {"F": 1, "B": 1, "I": 1, "W": 1}
STAGES = range(2, 9)
CHUNKS = (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("schedule", "lists"), [(Interleaved(), INTERLEAVED), (ZBH1(), ZB_H1)], ids=["v = 2", "zb-h1"]
)
def test_lists_are_those_of_the_table(schedule: Schedule, lists: str) -> None:
    assert letters(schedule.lists(4, 8)) == table(lists)


def test_runs_as_its_own_documentation_draws() -> None:
    chunks, split = drawings(import_module("jvpipe.schedules.interleaved").__doc__ or "")
    for schedule, microbatches, drawing in ((Interleaved(), 3, chunks), (ZBH1(), 4, split)):
        lists = schedule.lists(3, microbatches)
        assert drawn(lists, Clock(lists, schedule.chunks, ONCE)) == drawing


@pytest.mark.parametrize("stages", STAGES)
def test_one_whole_chunk_is_1f1b(stages: int) -> None:
    for microbatches in range(1, 4 * stages):
        assert Interleaved(chunks=1).lists(stages, microbatches) == one_f_one_b(
            stages, microbatches
        )


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("stages", STAGES)
def test_whole_backwards_take_what_the_formula_says(stages: int, chunks: int) -> None:
    for m in range(1, 4 * stages):
        clock = Clock(Interleaved(chunks=chunks).lists(stages, m), chunks, {"F": 1, "B": 2})
        if m >= stages:
            assert clock.step == 3 * (m + Fraction(stages - 1, chunks))
        if m % stages == 0 and chunks > 1:
            most = [
                Fraction((chunks - 1) * stages + 2 * (stages - 1 - d) + 1, chunks)
                for d in range(stages)
            ]
            assert clock.peaks() == [min(k, Fraction(m)) for k in most]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("stages", STAGES)
def test_split_backwards_take_what_the_formula_says(stages: int, chunks: int) -> None:
    for m in range(1, 4 * stages):
        clock = Clock(Interleaved(chunks=chunks, split=True).lists(stages, m), chunks, ONCE)
        if m >= stages:
            assert clock.step == 3 * m + Fraction(stages - 1, chunks)
        if m % stages == 0:
            assert clock.peaks() == [stages] * stages


@pytest.mark.parametrize(("F", "I", "W"), [(2, 3, 2), (1, 4, 1), (5, 3, 1)])
@pytest.mark.parametrize("stages", STAGES)
def test_zb_h1_takes_what_the_formula_says_of_uneven_halves(
    stages: int,
    F: int,
    I: int,  # noqa: E741 - the papers' letter
    W: int,
) -> None:
    for m in range(stages, 4 * stages):
        clock = Clock(ZBH1().lists(stages, m), 1, {"F": F, "I": I, "W": W})
        assert clock.step == m * (F + I + W) + (stages - 1) * (F + I - W)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_every_stage_adds_its_gradients_in_ascending_order(
    stages: int, chunks: int, split: bool
) -> None:
    for microbatches in range(1, 4 * stages):
        checked_order(
            Interleaved(chunks=chunks, split=split).lists(stages, microbatches),
            chunks,
            microbatches,
        )


def test_lateness_is_chosen_per_device() -> None:
    lists = ZBH1(late=[0, 0, 2]).lists(3, 3)
    assert letters(lists)[1:] == ["F0 F1 B0 F2 B1 B2", "F0 I0 F1 I1 F2 I2 W0 W1 W2"]
    with pytest.raises(ValueError, match=r"late=\(0, 1\) has 2 numbers, but there are 3 devices"):
        ZBH1(late=[0, 1]).lists(3, 3)


def test_bad_options_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"late=\(1,\) delays second halves of backwards: add split=True"
    ):
        Interleaved(late=[1])
    with pytest.raises(
        ValueError, match="each of late must be a whole number of at least 0, not -1"
    ):
        ZBH1(late=[-1, 0])
    with pytest.raises(ValueError, match=r"late must be whole numbers, .* not \{0: 1\}"):
        ZBH1(late={0: 1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunks must be a whole number of at least 1, not 0"):
        Interleaved(chunks=0)
    with pytest.raises(
        ValueError, match="chunks=1000000000 is more than any model has layers: use 2 or 4"
    ):
        Interleaved(chunks=10**9)
    with pytest.raises(
        ValueError, match=r"late must be whole numbers, such as \(0, 1\), not \[0.5, 1\]"
    ):
        numbers_of("late", [0.5, 1])


def test_schedules_of_equal_options_are_equal() -> None:
    some = [
        Interleaved(),
        Interleaved(chunks=3),
        Interleaved(split=True),
        ZBH1(),
        ZBH1(late=(0, 1)),
    ]
    again = [
        Interleaved(),
        Interleaved(chunks=3),
        Interleaved(split=True),
        ZBH1(),
        ZBH1(late=[0, 1]),
    ]
    assert some == again
    assert len({*some, *again}) == len({schedule.name for schedule in some}) == 5
    assert ZBH1(late=[0, 1]).options["late"] == [0, 1]
