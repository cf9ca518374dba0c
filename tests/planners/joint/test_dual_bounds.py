"""Lower bounds from prices, against all choices."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings

from jvpipe.planners.joint.dominance import Lot
from jvpipe.planners.joint.dual_bounds import DualBounds, Segment
from jvpipe.planners.joint.min_bytes import MinBytesSearch
from jvpipe.planners.joint.surrogate import pricing_of
from jvpipe.planners.joint.working_tiers import spread_max
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
        least = spread_max(pricing.choices.least_working_bytes, block)
        least_bytes = pricing.least_bytes(block, least)
        for i, j in pairwise(range(n + 1)) if problem.stages == n else [(0, n), (1, n), (0, 2)]:
            if i >= j:
                continue
            at = (i, j - 1)
            costs = [stage_cost(problem, s, i, j, some) for some in choices(problem, i, j)]
            assert least_bytes[at] <= min(cost.peak_bytes for cost in costs)
            held, _ = MinBytesSearch(pricing, Lot.of_stage(problem.in_flight[s], (s, i, j))).fewest(
                exact=True
            )
            assert block.fixed_bytes[at] + held == min(cost.peak_bytes for cost in costs)
            fits = [cost.seconds for cost in costs if cost.peak_bytes <= limit]
            bounds = []
            for tier in pricing.tiers:
                room = float(pricing.room_bytes(block, least, tier)[at])
                if np.isinf(room):
                    continue
                segment = Segment(
                    s, i, j, tier, room, float(block.compute_s[at]), float(block.traffic_s[at])
                )
                prices = DualBounds([segment.relaxed(pricing)]).solve()[0]
                bounds.append(float(pricing.bound_s(block, least, tier, *prices)[at]))
            if fits:
                assert bounds
                assert min(bounds) <= min(fits) * (1 + 1e-9)
