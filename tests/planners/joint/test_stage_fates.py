"""The fastest choices of a segment, against all of them."""

import numpy as np
import pytest

from jvpipe.cost.costs import Costs, LayerCost, Option
from jvpipe.planners.joint.lot import Lot
from jvpipe.planners.joint.segment_table import Table
from jvpipe.planners.joint.stage_fates import FateQuery, FateSearch
from jvpipe.planners.joint.surrogate import pricing_of
from jvpipe.planners.model.problem import Problem
from jvpipe.schedules import find_schedule
from tests.planners.joint.enumeration import EFFORT, every_cost, settle, tiny


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_no_choices_that_fit_are_faster(seed: int, share: float) -> None:
    problem = tiny(seed, share=share)
    pricing, limit = pricing_of(problem), problem.memory_limit_bytes or 0
    for s, i, j in ((0, 0, 3), (1, 1, 4), (1, 2, 4)):
        block = pricing.segments.block(s, np.array([i]), np.array([j]))
        room = pricing.limit_bytes - float(block.fixed_bytes[0, 0])
        lot = Lot.of_stage(problem.in_flight[s], (s, i, j))
        query = FateQuery(lot, float(block.compute_s[0, 0]), float(block.traffic_s[0, 0]), room)
        found_s = FateSearch(pricing, query, (1.0, 0.0)).least_seconds(4000).seconds
        fits = [cost.seconds for cost in every_cost(problem, s, i, j) if cost.peak_bytes <= limit]
        assert found_s == pytest.approx(min(fits, default=np.inf))


@pytest.mark.parametrize("compute_s", [0.54, 0.545, 0.55])
def test_estimates_that_round_to_nothing_are_not_scaled(compute_s: float) -> None:
    # A choice of 1 s counts exp(-1 / (0.01 compute_s / 4)) in estimates, about 1e-320.
    keep, again = Option(8), Option(0, extra_s=1.0, extra_bytes=8)
    costs = Costs((LayerCost("block", 1.0, 2.0, (keep, again)),) * 4)
    problem = Problem(costs, 1, find_schedule("1f1b"), microbatches=1, memory_limit_bytes=24)
    lot = Lot.of_stage(problem.in_flight[0], (0, 0, 4))
    query = FateQuery(lot, compute_s, 0.0, 24.0)
    search = FateSearch(pricing_of(problem), query, (1.0, 1e-6))
    assert all(np.isfinite(estimate).all() for estimate in search.expected)


def test_what_a_stage_may_swap_is_kept() -> None:
    problem = tiny(1, share=0.3)
    pricing = pricing_of(problem)
    for most in (0.0, 8.0):
        table = Table(pricing, [np.array([0]), np.array([2]), np.array([4])], EFFORT, (most, most))
        for cell in ((0, 0, 2), (1, 2, 4)):
            settle(table, cell)
            if np.isfinite(table.seconds(cell)):
                swapped = sum(
                    pricing.choices.swapped_bytes[cell[1] + at, choice]
                    for at, choice in enumerate(table.cell_choices(cell))
                )
                assert swapped <= most
