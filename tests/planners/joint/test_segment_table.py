"""The table of segments, against all their choices."""

import numpy as np
import pytest

from jvpipe.planners.joint.segment_table import Table, cells
from jvpipe.planners.joint.surrogate import pricing_of
from tests.planners.joint.enumeration import EFFORT, every_cost, settle, tiny


@pytest.mark.parametrize("seed", range(3))
def test_a_settled_cell_takes_what_its_best_choices_take_and_no_bound_is_above(seed: int) -> None:
    problem = tiny(seed, ("1f1b", "gpipe", "pipedream")[seed])
    pricing, limit = pricing_of(problem), problem.memory_limit_bytes or 0
    middle = np.arange(1, 4)
    table = Table(pricing, [np.array([0]), middle, np.array([4])], EFFORT)
    for path in ((0, cut, 4) for cut in middle.tolist()):
        for cell in cells(path):
            _, at = table.found(cell)
            fits = [cost.seconds for cost in every_cost(problem, *cell) if cost.peak_bytes <= limit]
            least_s = min(fits, default=np.inf)
            assert float(table.lower()[cell[0]].seconds[at]) <= least_s * (1 + 1e-9)
            settle(table, cell)
            assert table.seconds(cell) == pytest.approx(least_s)
            assert np.isfinite(table.seconds(cell)) == bool(fits)
