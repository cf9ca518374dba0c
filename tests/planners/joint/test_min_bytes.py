"""The fewest bytes of a segment, against all its choices."""

import numpy as np
import pytest

from jvpipe.planners.joint.lot import Lot
from jvpipe.planners.joint.min_bytes import fewest_bytes
from jvpipe.planners.joint.surrogate import pricing_of
from jvpipe.planners.model.stage_cost import stage_cost
from tests.planners.joint.enumeration import every_cost, tiny


@pytest.mark.parametrize("seed", range(4))
def test_no_choices_take_fewer_bytes(seed: int) -> None:
    problem = tiny(seed, ("gpipe", "1f1b", "pipedream", "2bw")[seed])
    pricing = pricing_of(problem)
    for s, i, j in ((0, 0, 4), (1, 1, 4), (0, 0, 2)):
        fixed = float(pricing.segments.fixed_bytes(s, np.array([i]), np.array([j]))[0, 0])
        lot = Lot.of_stage(problem.in_flight[s], (s, i, j))
        held, chosen, bound = fewest_bytes(pricing, lot, exact=True)
        least = min(cost.peak_bytes for cost in every_cost(problem, s, i, j))
        assert fixed + held == fixed + bound == least
        assert stage_cost(problem, s, i, j, [*[0] * i, *chosen, *[0] * (4 - j)]).peak_bytes == least


def test_nothing_below_what_is_possible_is_promised() -> None:
    problem = tiny(0)
    pricing, lot = pricing_of(problem), Lot.of_stage(problem.in_flight[0], (0, 0, 3))
    held = fewest_bytes(pricing, lot, exact=True).held_bytes
    assert fewest_bytes(pricing, lot, exact=True, below=held) == (held, (), held)
