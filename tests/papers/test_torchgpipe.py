"""torchgpipe's block partition keeps its bound, on any sequence."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.cost.costs import Costs, LayerCost, Option
from jvpipe.papers.torchgpipe import block_partition, torchgpipe, torchgpipe_size
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import check
from jvpipe.schedules import find_schedule
from tests.planners.small import problems as whole_problems


def blocks(costs: list[float], cuts: list[int]) -> list[float]:
    return [
        float(np.sum(costs[a:b]))
        for a, b in zip(np.cumsum([0, *cuts]), np.cumsum(cuts), strict=False)
    ]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], int]:
    number = st.one_of(st.integers(0, 9).map(float), st.floats(0.001, 1000.0))
    costs = draw(st.lists(number, min_size=1, max_size=14))
    return costs, draw(st.integers(1, len(costs)))


@settings(max_examples=160, deadline=None)
@given(problems())
def test_no_two_blocks_differ_by_more_than_the_costliest_layer(
    problem: tuple[list[float], int],
) -> None:
    costs, stages = problem
    cuts = block_partition(costs, stages)
    assert len(cuts) == stages
    assert sum(cuts) == len(costs)
    assert min(cuts) >= 1
    sizes = blocks(costs, cuts)
    assert max(sizes) - min(sizes) <= max(costs) * (1 + 1e-6)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_the_largest_block_is_the_smallest_there_is(problem: tuple[list[float], int]) -> None:
    costs, stages = problem
    n = len(costs)
    bounds = ([0, *inner, n] for inner in combinations(range(1, n), stages - 1))
    best = min(max(sum(costs[a:b]) for a, b in pairwise(b)) for b in bounds)
    assert max(blocks(costs, block_partition(costs, stages))) <= best * (1 + 1e-6)


@pytest.mark.parametrize(
    ("costs", "stages", "cuts"),
    [
        ([1.0] * 6, 2, [3, 3]),
        ([1, 2, 3, 4, 5, 6], 2, [4, 2]),  # the example of torchgpipe's own documentation
        ([5, 1, 1, 1, 1, 1], 2, [1, 5]),
        ([1, 1, 1, 1, 1, 5], 2, [5, 1]),
        ([9, 9, 1, 1, 1, 1, 1, 1], 3, [1, 1, 6]),
        ([0, 0, 0], 3, [1, 1, 1]),
        ([3], 1, [1]),
    ],
)
def test_partitions_that_are_plain_to_see(costs: list[float], stages: int, cuts: list[int]) -> None:
    assert block_partition([float(c) for c in costs], stages) == cuts


def costing(forward_s: float, backward_s: float, parameter_bytes: int) -> LayerCost:
    return LayerCost("layer", forward_s, backward_s, (Option(8),), parameter_bytes=parameter_bytes)


def test_seconds_are_those_of_forward_and_backward_and_bytes_those_of_parameters() -> None:
    layers = (costing(1.0, 3.0, 1), *[costing(0.5, 0.5, 1)] * 3, costing(0.5, 0.5, 9))
    problem = Problem(Costs(layers), 2, find_schedule("gpipe"), 4)
    assert torchgpipe(problem) == Decision.keeping_all((0, 1, 5))
    assert torchgpipe_size(problem) == Decision.keeping_all((0, 4, 5))


def test_layers_that_stay_together_are_one() -> None:
    layers = tuple(costing(s, 0.0, 0) for s in (1.0, 1.0, 1.0, 9.0, 1.0))
    assert torchgpipe(Problem(Costs(layers), 2, find_schedule("gpipe"), 4)).bounds == (0, 3, 5)
    together = Costs(layers, together=((2, 3),))
    assert torchgpipe(Problem(together, 2, find_schedule("gpipe"), 4)).bounds == (0, 2, 5)


@settings(max_examples=20, deadline=None)
@given(whole_problems(most_layers=8, tight=False))
def test_every_decision_is_valid_and_keeps_all(problem: Problem) -> None:
    for decision in (torchgpipe(problem), torchgpipe_size(problem)):
        check(problem, decision)
        assert set(decision.choices) == {0}
