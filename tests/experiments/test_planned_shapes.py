"""The table of shapes beside all that there are."""

import random

import pytest

from experiments.planners.shapes import drawn, limited, table
from tests.planners.joint.shapes import best_s


@pytest.mark.thorough
def test_a_row_for_each_limit_and_each_way_to_plan() -> None:
    rows = [line.strip("| ").split(" | ") for line in list(table(problems=6, seed=5))[2:]]
    assert [row[:3] for row in rows] == [
        [limit, what, "3"] for limit in ("none", "drawn") for what in ("rough", "planned")
    ]
    assert all(float(row[5]) <= 1.03 for row in rows)


@pytest.mark.thorough
def test_a_limit_keeps_out_some_plans_and_not_all() -> None:
    draw = random.Random(5)
    shapes = drawn(draw)
    assert best_s(shapes) <= best_s(limited(shapes, draw)) < float("inf")
