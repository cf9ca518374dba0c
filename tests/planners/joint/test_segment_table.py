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


def test_a_narrowed_table_forgets_no_cell_that_is_left() -> None:
    table = Table(pricing_of(tiny(2)), [np.array([0]), np.arange(1, 4), np.array([4])], EFFORT)
    settle(table, (0, 0, 2))
    before = table.seconds((0, 0, 2))
    table.narrow([np.array([0]), np.array([1]), np.array([0])])
    assert [cuts.tolist() for cuts in table.cuts] == [[0], [2], [4]]
    assert table.seconds((0, 0, 2)) == before
    assert table.open_cells((0, 2, 4)) in ([], [(1, 2, 4)])
