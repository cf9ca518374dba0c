"""The vees against tables made by hand, and against what their rules promise."""

from fractions import Fraction
from importlib import import_module

import pytest

from jvpipe.schedules.vee import Memory, VSchedule
from tests.schedules.units import Clock, checked_order, drawings, drawn, letters, table

ZB_V = """
0  F0 F1 F2 F3 F4 F5 F6 f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 i3 w3 F7 I0 W0 f4 i4 w4 I1 W1 f5 i5 w5 I2 W2 f6 i6 w6 \
I3 W3 f7 i7 w7 I4 W4 I5 W5 I6 W6 I7 W7
1  F0 F1 F2 F3 F4 f0 F5 f1 i0 w0 f2 i1 w1 f3 i2 w2 F6 I0 W0 f4 i3 w3 F7 I1 W1 f5 i4 w4 I2 W2 f6 i5 w5 I3 W3 \
f7 i6 w6 I4 i7 I5 W4 I6 W5 I7 W6 w7 W7
2  F0 F1 F2 f0 F3 f1 F4 f2 i0 w0 f3 i1 w1 F5 I0 W0 f4 i2 w2 F6 I1 W1 f5 i3 w3 F7 I2 W2 f6 i4 w4 I3 W3 f7 i5 \
w5 I4 i6 I5 i7 I6 W4 I7 W5 w6 w7 W6 W7
3  F0 f0 F1 f1 F2 f2 F3 f3 i0 w0 F4 I0 W0 f4 i1 w1 F5 I1 W1 f5 i2 w2 F6 I2 W2 f6 i3 w3 F7 I3 W3 f7 i4 w4 I4 \
i5 I5 i6 I6 i7 I7 W4 w5 w6 w7 W5 W6 W7
"""

V_HALF = """
0  F0 F1 f0 F2 i0 w0 f1 F3 i1 w1 f2 F4 I0 i2 W0 f3 w2 F5 I1 i3 W1 f4 w3 F6 I2 i4 W2 f5 w4 F7 I3 i5 W3 f6 w5 \
I4 i6 W4 f7 w6 I5 i7 W5 w7 I6 W6 I7 W7
1  F0 F1 f0 F2 f1 i0 w0 F3 f2 i1 w1 I0 W0 F4 f3 i2 w2 I1 W1 F5 f4 i3 w3 I2 W2 F6 f5 i4 w4 I3 W3 F7 f6 i5 w5 \
I4 W4 f7 i6 w6 I5 W5 i7 w7 I6 W6 I7 W7
2  F0 f0 F1 f1 F2 i0 w0 f2 F3 I0 i1 W0 f3 w1 F4 I1 i2 W1 f4 w2 F5 I2 i3 W2 f5 w3 F6 I3 i4 W3 f6 w4 F7 I4 i5 \
W4 f7 w5 I5 i6 W5 w6 I6 i7 W6 w7 I7 W7
3  F0 f0 F1 f1 F2 f2 i0 w0 I0 W0 F3 f3 i1 w1 I1 W1 F4 f4 i2 w2 I2 W2 F5 f5 i3 w3 I3 W3 F6 f6 i4 w4 I4 W4 F7 \
f7 i5 w5 I5 W5 i6 w6 I6 W6 i7 w7 I7 W7
"""

V_MIN = """
0  F0 F1 f0 i0 w0 F2 f1 i1 I0 w1 W0 F3 f2 i2 I1 w2 W1 F4 f3 i3 I2 w3 W2 F5 f4 i4 I3 w4 W3 F6 f5 i5 I4 w5 W4 \
F7 f6 i6 I5 w6 W5 f7 i7 I6 w7 W6 I7 W7
1  F0 f0 F1 i0 w0 f1 F2 I0 i1 W0 w1 f2 F3 I1 i2 W1 w2 f3 F4 I2 i3 W2 w3 f4 F5 I3 i4 W3 w4 f5 F6 I4 i5 W4 w5 \
f6 F7 I5 i6 W5 w6 f7 I6 i7 W6 w7 I7 W7
2  F0 f0 F1 i0 f1 w0 I0 F2 W0 i1 f2 w1 I1 F3 W1 i2 f3 w2 I2 F4 W2 i3 f4 w3 I3 F5 W3 i4 f5 w4 I4 F6 W4 i5 f6 \
w5 I5 F7 W5 i6 f7 w6 I6 W6 i7 w7 I7 W7
3  F0 f0 F1 f1 i0 I0 w0 W0 F2 f2 i1 I1 w1 W1 F3 f3 i2 I2 w2 W2 F4 f4 i3 I3 w3 W3 F5 f5 i4 I4 w4 W4 F6 f6 i5 \
I5 w5 W5 F7 f7 i6 I6 w6 W6 i7 I7 w7 W7
"""

ONCE = {"F": 1, "I": 1, "W": 1}


@pytest.mark.parametrize(("memory", "lists"), [("full", ZB_V), ("half", V_HALF), ("least", V_MIN)])
def test_lists_are_those_of_the_table(memory: Memory, lists: str) -> None:
    assert letters(VSchedule(memory=memory).lists(4, 8)) == table(lists)


def test_runs_as_its_own_documentation_draws() -> None:
    full, half = drawings(import_module("jvpipe.schedules.vee").__doc__ or "")
    for schedule, microbatches, drawing in (
        (VSchedule(), 5, full),
        (VSchedule(memory="half"), 4, half),
    ):
        lists = schedule.lists(3, microbatches)
        assert drawn(lists, Clock(lists, 2, ONCE)) == drawing


@pytest.mark.parametrize("stages", range(2, 9))
def test_zb_v_takes_what_the_formula_says(stages: int) -> None:
    for m in range(1, 4 * stages):
        clock = Clock(VSchedule().lists(stages, m), 2, ONCE)
        if m >= 2 * stages - 1:
            assert clock.step == 3 * m + Fraction(stages - 1, 2)
            assert clock.period == 3 * m
            assert clock.peaks() == [stages] * stages
        assert max(clock.peaks()) <= stages


@pytest.mark.parametrize("stages", range(2, 9))
def test_half_and_least_hold_no_more_than_they_promise(stages: int) -> None:
    for m in range(1, 4 * stages):
        half, least = (
            max(Clock(VSchedule(memory=memory).lists(stages, m), 2, ONCE).peaks())
            for memory in ("half", "least")
        )
        most = Fraction(stages, 2) + (1 if stages % 2 == 0 else Fraction(1, 2))
        assert half <= most
        assert half == most or m < stages
        assert least <= Fraction(stages, 3) + Fraction(4, 3)


@pytest.mark.parametrize("memory", ["full", "half", "least"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_every_stage_adds_its_gradients_in_ascending_order(stages: int, memory: Memory) -> None:
    for microbatches in range(1, 4 * stages):
        checked_order(VSchedule(memory=memory).lists(stages, microbatches), 2, microbatches)


def test_the_second_chunk_comes_back() -> None:
    assert [VSchedule().device_of(stage, 3) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


def test_equal_options_are_equal() -> None:
    assert VSchedule(memory="half") == VSchedule(memory="half")
    assert len({VSchedule(), VSchedule(), VSchedule(memory="half")}) == 2
