"""Paths of replicated stages: counted as plans are."""

import numpy as np

from jvpipe.cost.hardware import Cluster, Link
from jvpipe.planners.joint.replicas_search import Ground, paths
from jvpipe.planners.model.replicas_problem import ReplicaProblem, check
from jvpipe.planners.model.replicas_stage import Tables, few_cuts, surrogate_s
from tests.planners.joint.replicas import GPU, chain, every_plan, layer

CLUSTER = Cluster("two", GPU, 2, 2, peer=Link(50.0), network=Link(5.0))
LAYERS = [layer(1.0, 2), layer(2.0, 4), layer(1.5, 40), layer(0.5, 60)]
PROBLEM = ReplicaProblem(chain(LAYERS, [6, 3, 1]), CLUSTER, 4, 8)


def test_paths_are_plans_and_the_best_of_few_micro_batches_is_found() -> None:
    tables = Tables(PROBLEM)
    for size in (8, 4):
        found = []
        for order in PROBLEM.orders:
            ground = Ground(tables, size, order, (1, 2, 3, 4), np.arange(5))
            for cap_s in (15.0, 20.0, 30.0, np.inf):
                found += list(paths(ground, cap_s, 4))
        for plan in found:
            check(PROBLEM, plan)
        best = min(surrogate_s(tables.stages(plan), 8 // size) for plan in found)
        every = (
            surrogate_s(tables.stages(plan), 8 // size)
            for plan in every_plan(PROBLEM)
            if plan.size == size
        )
        assert best <= 1.05 * min(every)


def test_few_cuts_keep_both_ends_and_where_least_crosses() -> None:
    layers = [layer(1.0, 10)] * 20
    sizes = [1 if i % 5 == 4 else 9 for i in range(19)]
    tables = Tables(ReplicaProblem(chain(layers, sizes), CLUSTER, 4, 8))
    assert few_cuts(tables.local(8, 1), 5).tolist() == [0, 5, 10, 15, 20]
    assert few_cuts(tables.local(8, 1), 40).tolist() == list(range(21))
