"""Cuts for orders: as balanced as any, and their neighbours."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from jvpipe.planners.joint.order_cuts import balanced, moved_bounds
from tests.planners.joint.orders import problem_of


@pytest.mark.parametrize("seed", range(4))
def test_one_stage_per_device_is_balanced_as_well_as_any(seed: int) -> None:
    problem = problem_of(9, 3, 4, seed)
    layer_s = np.array([layer.forward_s + layer.backward_s for layer in problem.costs.layers])

    def slowest(bounds: tuple[int, ...]) -> float:
        return max(layer_s[i:j].sum() for i, j in pairwise(bounds))

    every = [(0, *inner, 9) for inner in combinations(range(1, 9), 2)]
    assert slowest(balanced(problem, np.arange(10), layer_s)) == min(map(slowest, every))


def test_bounds_move_by_a_place_that_may_be_cut() -> None:
    assert moved_bounds((0, 2, 6), np.array([0, 2, 3, 6])) == [(0, 3, 6)]
