"""torchgpipe's block partition keeps its bound, on any sequence."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.planners.torchgpipe import torchgpipe


def blocks(costs: list[float], cuts: list[int]) -> list[float]:
    return [float(np.sum(costs[a:b])) for a, b in zip(np.cumsum([0, *cuts]), np.cumsum(cuts), strict=False)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], int]:
    number = st.one_of(st.integers(0, 9).map(float), st.floats(0.001, 1000.0))
    costs = draw(st.lists(number, min_size=1, max_size=14))
    return costs, draw(st.integers(1, len(costs)))


@settings(max_examples=400, deadline=None)
@given(problems())
def test_no_two_blocks_differ_by_more_than_the_costliest_layer(problem: tuple[list[float], int]) -> None:
    costs, stages = problem
    cuts = torchgpipe(costs, stages)
    assert len(cuts) == stages
    assert sum(cuts) == len(costs)
    assert min(cuts) >= 1
    sizes = blocks(costs, cuts)
    assert max(sizes) - min(sizes) <= max(costs) * (1 + 1e-6)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_largest_block_is_the_smallest_there_is(problem: tuple[list[float], int]) -> None:
    costs, stages = problem
    n = len(costs)
    bounds = ([0, *inner, n] for inner in combinations(range(1, n), stages - 1))
    best = min(max(sum(costs[a:b]) for a, b in pairwise(b)) for b in bounds)
    assert max(blocks(costs, torchgpipe(costs, stages))) <= best * (1 + 1e-6)


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
    assert torchgpipe([float(c) for c in costs], stages) == cuts
