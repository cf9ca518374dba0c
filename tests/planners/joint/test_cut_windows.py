"""Windows of cuts, against all plans under a cap."""

import numpy as np
import pytest

from jvpipe.planners.joint.cut_windows import Reach, area, bounded, spread
from jvpipe.planners.joint.surrogate import pricing_of
from tests.planners.joint.enumeration import every_cost, tiny


@pytest.mark.parametrize("seed", range(4))
def test_no_cut_of_a_plan_under_the_cap_is_outside_its_window(seed: int) -> None:
    problem = tiny(seed, ("1f1b", "gpipe", "pipedream", "2bw")[seed])
    pricing, limit = pricing_of(problem), problem.memory_limit_bytes or 0
    reach = Reach(pricing)
    slowest = {}
    for cut in range(1, 4):
        stages = (every_cost(problem, 0, 0, cut), every_cost(problem, 1, cut, 4))
        least = (
            min((c.seconds for c in stage if c.peak_bytes <= limit), default=np.inf)
            for stage in stages
        )
        slowest[cut] = max(least)
    best_s = min(slowest.values())
    assert reach.least_cap_s() <= best_s * (1 + 1e-3)
    for cap_s in (best_s, 1.3 * best_s):
        window = reach.windows(cap_s)[1].tolist()
        assert all(cut in window for cut, taken_s in slowest.items() if taken_s <= cap_s)


def test_thinned_windows_keep_their_ends_and_few_cells() -> None:
    windows = [np.array([0]), np.arange(1, 90), np.arange(5, 95), np.array([100])]
    thin = bounded(windows, 500)
    assert area(thin) <= 500 < area(windows)
    assert [(cuts[0], cuts[-1]) for cuts in thin] == [(cuts[0], cuts[-1]) for cuts in windows]


def test_all_cuts_leave_a_layer_to_every_stage() -> None:
    segments = pricing_of(tiny(0)).segments
    assert [cuts.tolist() for cuts in segments.windows] == [[0], [1, 2, 3], [4]]
    near = spread(segments.windows, segments.compute_s, segments.crossing_bytes, 100)
    assert [cuts.tolist() for cuts in near] == [[0], [1, 2, 3], [4]]
