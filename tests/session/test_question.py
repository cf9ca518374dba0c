"""Sums that no planner can make are refused, and more stages than a cluster has devices."""

import pytest

from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.costs import Costs, LayerCost, Option
from jvpipe.planners.model.accuracy import check_sums
from jvpipe.planners.model.problem import Problem
from jvpipe.schedules import find_schedule
from jvpipe.session.question import on_cluster


def problem(seconds: float, kept_bytes: int = 0) -> Problem:
    layers = (LayerCost("block", seconds, 2 * seconds, (Option(kept_bytes),)),) * 2
    return Problem(Costs(layers), 2, find_schedule("1f1b"), microbatches=4)


def test_sums_that_no_planner_can_make_are_refused() -> None:
    check_sums(problem(1e3, 1 << 30))
    with pytest.raises(ValueError, match=r"the layers compute for 2.4e\+13 s in 4 micro-batches"):
        check_sums(problem(1e12))
    with pytest.raises(ValueError, match="bytes with 2 micro-batches in flight"):
        check_sums(problem(1.0, 1 << 62))


def test_stages_on_several_machines_are_joined_by_the_slower_link() -> None:
    cluster = find_cluster("v100-a")
    assert on_cluster(problem(1.0), cluster).peer == cluster.peer
    costs = Costs((LayerCost("block", 1.0, 2.0, (Option(0),)),) * 20)
    assert on_cluster(Problem(costs, 9, find_schedule("1f1b"), 9), cluster).peer == cluster.network
    with pytest.raises(ValueError, match="17 stages need as many devices, v100-a has 16"):
        on_cluster(Problem(costs, 17, find_schedule("1f1b"), 17), cluster)
