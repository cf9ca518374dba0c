"""Cuts and fates for orders: as balanced as any, and under the limit."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from jvpipe.planners.joint.order_cuts import balanced, moved_bounds, with_fates
from jvpipe.planners.model.stage_cost import evaluate
from jvpipe.schedules import find_schedule
from tests.planners.joint.orders import placed, problem_of


@pytest.mark.parametrize("seed", range(4))
def test_one_stage_per_device_is_balanced_as_well_as_any(seed: int) -> None:
    problem = problem_of(9, 3, 4, seed)
    layer_s = np.array([layer.forward_s + layer.backward_s for layer in problem.costs.layers])

    def slowest(bounds: tuple[int, ...]) -> float:
        return max(layer_s[i:j].sum() for i, j in pairwise(bounds))

    every = [(0, *inner, 9) for inner in combinations(range(1, 9), 2)]
    assert slowest(balanced(problem, np.arange(10), layer_s)) == min(map(slowest, every))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "v-half"])
def test_fates_keep_the_limit_or_there_are_none(name: str) -> None:
    problem, decision = placed(problem_of(12, 3, 8), find_schedule(name))
    most = evaluate(problem, decision).peak_bytes
    for part in (1.0, 0.9, 0.6):
        tight = replace(problem, memory_limit_bytes=int(part * most))
        found = with_fates(tight, decision.bounds)
        assert part < 0.8 or found is not None
        if found is not None:
            assert evaluate(tight, found).peak_bytes <= part * most
            assert (found == decision) == (part == 1.0)
    assert with_fates(replace(problem, memory_limit_bytes=1), decision.bounds) is None


def test_bounds_move_by_a_place_that_may_be_cut() -> None:
    assert moved_bounds((0, 2, 6), np.array([0, 2, 3, 6])) == [(0, 3, 6)]
