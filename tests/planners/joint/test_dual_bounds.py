"""Lower bounds from prices, against all choices."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings

from jvpipe.planners.joint.dual_bounds import DualBounds
from jvpipe.planners.joint.lot import Lot
from jvpipe.planners.joint.min_bytes import fewest_bytes
from jvpipe.planners.joint.surrogate import pricing_of
from jvpipe.planners.model.grids import most_of
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import stage_cost
from tests.planners.joint.enumeration import choices
from tests.planners.small import problems


@settings(max_examples=20, deadline=None)
@given(problems(most_layers=4))
def test_bounds_are_never_above_what_any_choices_take(problem: Problem) -> None:
    pricing, n = pricing_of(problem), len(problem.costs.layers)
    cuts, limit = np.arange(n + 1), problem.memory_limit_bytes or 0
    for s in range(problem.stages):
        block = pricing.segments.block(s, cuts[:-1], cuts[1:])
        least_bytes = pricing.least_bytes(block)
        for i, j in pairwise(range(n + 1)) if problem.stages == n else [(0, n), (1, n), (0, 2)]:
            if i >= j:
                continue
            at = (i, j - 1)
            costs = [stage_cost(problem, s, i, j, some) for some in choices(problem, i, j)]
            assert least_bytes[at] <= min(cost.peak_bytes for cost in costs)
            lot = Lot.of_stage(problem.in_flight[s], (s, i, j))
            held = fewest_bytes(pricing, lot, exact=True).held_bytes
            assert block.fixed_bytes[at] + held == min(cost.peak_bytes for cost in costs)
            fits = [cost.seconds for cost in costs if cost.peak_bytes <= limit]
            taken = (x[at] for x in (block.fixed_bytes, block.compute_s, block.traffic_s))
            fixed, compute_s, traffic_s = map(float, taken)
            asked = pricing.relaxed((s, i, j), limit - fixed, compute_s, traffic_s)
            prices = DualBounds([asked]).solve()[0]
            bound_s = float(pricing.bound_s(block, prices)[at])
            assert bound_s <= min(fits, default=np.inf) * (1 + 1e-9)


def test_the_largest_of_each_segment() -> None:
    cuts = np.arange(5)
    grid = most_of(np.array([3.0, 1.0, 4.0, 1.0]), cuts, cuts)
    assert grid[0, 1:].tolist() == [3, 3, 4, 4]
    assert grid[3, 4:].tolist() == [1]
