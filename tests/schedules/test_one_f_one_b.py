"""1F1B against timelines drawn by hand; every task takes one slot."""

from importlib import import_module

import pytest

from jvpipe.ir.kinds import Kind
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B, OneFOneB, one_f_one_b
from tests.schedules.drawing import parse, started

TWO = """
stage 0  F0 F1    B0 F2 B1 F3 B2    B3
stage 1     F0 B0 F1 B1 F2 B2 F3 B3
"""

THREE = """
stage 0  F0 F1 F2       B0 F3 B1    B2    B3
stage 1     F0 F1    B0 F2 B1 F3 B2    B3
stage 2        F0 B0 F1 B1 F2 B2 F3 B3
"""

FOUR = """
stage 0  F0 F1 F2 F3          B0    B1    B2    B3
stage 1     F0 F1 F2       B0 F3 B1    B2    B3
stage 2        F0 F1    B0 F2 B1 F3 B2    B3
stage 3           F0 B0 F1 B1 F2 B2 F3 B3
"""


@pytest.mark.parametrize(("stages", "drawing"), [(2, TWO), (3, THREE), (4, FOUR)])
def test_runs_as_drawn(stages: int, drawing: str) -> None:
    assert started(one_f_one_b(stages, 4)) == parse(drawing)


def test_runs_as_its_own_documentation_draws() -> None:
    assert started(one_f_one_b(3, 4)) == parse(
        import_module("jvpipe.schedules.one_f_one_b").__doc__ or ""
    )


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_keeps_as_many_in_flight_as_stages_follow(stages: int, microbatches: int) -> None:
    for stage, tasks in enumerate(one_f_one_b(stages, microbatches)):
        in_flight = most = 0
        for task in tasks:
            in_flight += 1 if task.kind == "F" else -1
            most = max(most, in_flight)
        assert most == min(stages - stage, microbatches)
        assert in_flight == 0
        for kind in (Kind.F, Kind.B):
            assert [task.microbatch for task in tasks if task.kind == kind] == list(
                range(microbatches)
            )


def test_eager_holds_twice_as_many_but_one() -> None:
    assert OneFOneB(eager=True).in_flight(3, 8) == (5, 3, 1)
    assert OneFOneB(most=[4, 2, 1]).in_flight(3, 8) == (4, 2, 1)
    assert OneFOneB(most=[3, 2, 1]).lists(3, 5) == OneFOneB().lists(3, 5) == ONE_F_ONE_B.lists(3, 5)
    assert OneFOneB(most=[4, 2, 1]) == OneFOneB(most=(4, 2, 1)) != OneFOneB(eager=True)


def test_numbers_in_flight_that_would_stop_the_pipeline_are_refused() -> None:
    with pytest.raises(ValueError, match=r"most=\[1, 2\] must be at least 1, and must not rise"):
        OneFOneB(most=[1, 2])
    with pytest.raises(ValueError, match=r"most=\(2, 1\) names 2 devices, there are 3"):
        OneFOneB(most=[2, 1]).lists(3, 3)
