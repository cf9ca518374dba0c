"""The neighbors of cuts."""

import numpy as np

from jvpipe.planners.joint.order_cuts import moved_bounds


def test_bounds_move_by_a_place_that_may_be_cut() -> None:
    assert moved_bounds((0, 2, 6), np.array([0, 2, 3, 6]), 1, run=1, distances=(1,)) == [(0, 3, 6)]
