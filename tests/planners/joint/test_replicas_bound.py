"""No plan is below the bound."""

import random
from dataclasses import replace

import pytest

from jvpipe.cost.hardware import Cluster, Link
from jvpipe.planners.joint.replicas_bound import least_bottleneck_s, lower_bound_s, replica_counts
from jvpipe.planners.model.replicas_problem import ReplicaProblem
from jvpipe.planners.model.replicas_stage import Tables
from jvpipe.planners.model.replicas_step import simulated_s
from tests.planners.joint.replicas import GPU, chain, every_plan, flat, layer


def test_counts_with_the_same_largest_slice_are_one() -> None:
    problem = ReplicaProblem(chain([layer(1.0)], []), flat(16, 1.0), 16, 16)
    assert replica_counts(problem, 16) == (1, 2, 3, 4, 6, 8, 16)
    assert replica_counts(problem, 2) == (1, 2)


TWO = Cluster("two", GPU, 2, 2, peer=Link(100.0), network=Link(10.0), networks=2)


@pytest.mark.parametrize("overlaps", [False, True])
def test_no_plan_is_below_the_bound_and_the_least_bottleneck_is_reached(overlaps: bool) -> None:
    draw = random.Random(0)
    for cluster in (flat(3, 10.0), flat(3, 10.0), TWO, flat(3, 1.0)):
        layers = [layer(draw.uniform(0.5, 2.0), draw.randint(0, 50)) for _ in range(4)]
        costs = chain(layers, [draw.randint(1, 9) for _ in layers[1:]])
        problem = ReplicaProblem(costs, cluster, cluster.devices, 6, overlaps=overlaps)
        tables = Tables(problem)
        plans = [(plan, tables.stages(plan)) for plan in every_plan(problem)]
        for size in problem.sizes:
            mine = [(plan, stages) for plan, stages in plans if plan.size == size]
            slowest_s = least_bottleneck_s(tables, size, tables.cuts)
            reached = min(max(x.forward_s + x.backward_s for x in stages) for _, stages in mine)
            assert slowest_s <= reached == pytest.approx(slowest_s, rel=1e-3)
        bound_s = lower_bound_s(tables)
        assert all(
            simulated_s(problem, plan, stages) >= bound_s * (1 - 1e-9) for plan, stages in plans
        )


def test_what_data_parallelism_cannot_be_below_counts_its_all_reduce() -> None:
    problem = ReplicaProblem(chain([layer(1.0, 30)], []), flat(4, 10.0), 4, 4)
    assert lower_bound_s(Tables(problem)) == pytest.approx(3.0 + 2 * 3 / 4 * 30 / 10.0, rel=1e-3)
    assert lower_bound_s(Tables(replace(problem, overlaps=True))) == pytest.approx(
        2 * 3 / 4 * 30 / 10.0, rel=1e-3
    )
