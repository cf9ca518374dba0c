"""GPipe against timelines drawn by hand; every task takes one slot."""

from importlib import import_module

import pytest

from jvpipe.schedules.gpipe import gpipe
from tests.schedules.drawing import parse, started

TWO = """
stage 0  F0 F1 F2 F3       B0 B1 B2 B3
stage 1     F0 F1 F2 F3 B0 B1 B2 B3
"""

THREE = """
stage 0  F0 F1 F2 F3             B0 B1 B2 B3
stage 1     F0 F1 F2 F3       B0 B1 B2 B3
stage 2        F0 F1 F2 F3 B0 B1 B2 B3
"""

FOUR = """
stage 0  F0 F1 F2 F3                   B0 B1 B2 B3
stage 1     F0 F1 F2 F3             B0 B1 B2 B3
stage 2        F0 F1 F2 F3       B0 B1 B2 B3
stage 3           F0 F1 F2 F3 B0 B1 B2 B3
"""


@pytest.mark.parametrize(("stages", "drawing"), [(2, TWO), (3, THREE), (4, FOUR)])
def test_runs_as_drawn(stages: int, drawing: str) -> None:
    assert started(gpipe(stages, 4)) == parse(drawing)


def test_runs_as_its_own_documentation_draws() -> None:
    assert started(gpipe(3, 3)) == parse(import_module("jvpipe.schedules.gpipe").__doc__ or "")


def test_one_stage_has_nothing_to_wait_for() -> None:
    assert started(gpipe(1, 2)) == parse("stage 0  F0 F1 B0 B1")
