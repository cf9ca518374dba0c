"""What is asked of the planner of replicas, and which plans are none."""

from dataclasses import replace

import pytest

from jvpipe.cost.hardware import Cluster, Link
from jvpipe.planners.model.replicas_plan import ReplicaPlan
from jvpipe.planners.model.replicas_problem import ReplicaProblem, check
from tests.planners.joint.replicas import GPU, chain, flat, layer

COSTS = chain([layer(1.0)] * 3, [8, 8])
PROBLEM = ReplicaProblem(COSTS, flat(4, 1e9), 4, 12)


def test_orders_are_by_machine_and_across_machines() -> None:
    cluster = Cluster("two", GPU, 2, 2, peer=Link(8e9), network=Link(1e9))
    assert ReplicaProblem(COSTS, cluster, 4, 12).orders == ((0, 1, 2, 3), (0, 2, 1, 3))
    assert PROBLEM.orders == ((0, 1, 2, 3),)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (ReplicaPlan((0, 2), ((0,),), 4), "bounds"),
        (ReplicaPlan((0, 2, 3), ((0,),), 4), "of 2 stages, places of 1"),
        (ReplicaPlan((0, 2, 3), ((0, 1), (1,)), 4), "different devices of 4"),
        (ReplicaPlan((0, 2, 3), ((0, 1), (4,)), 4), "different devices of 4"),
        (ReplicaPlan((0, 3), ((0,),), 5), "must divide the batch of 12"),
        (ReplicaPlan((0, 3), ((0, 1, 2),), 2), "3 replicas cannot share micro-batches of 2"),
    ],
)
def test_what_is_no_plan(plan: ReplicaPlan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(PROBLEM, plan)


def test_what_cannot_be_asked() -> None:
    with pytest.raises(ValueError, match="use fewer devices"):
        replace(PROBLEM, devices=5)
    with pytest.raises(ValueError, match="a batch of 0"):
        replace(PROBLEM, batch=0)


def test_shapes_have_names() -> None:
    places = ((0, 1), (2,), (3,))
    shapes = [ReplicaPlan((0, 1, 2, 3)[: s + 1], places[:s], 2).shape for s in (1, 2, 3)]
    assert shapes == ["data parallel", "two stages", "hybrid"]
    assert ReplicaPlan((0, 1, 3), ((0,), (1,)), 2).shape == "straight"
