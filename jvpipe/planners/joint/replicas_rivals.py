"""Plans of the papers' planners as plans with replicated stages, to be simulated beside our own."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.replicas_plan import ReplicaPlan, placed
from jvpipe.planners.model.replicas_stage import Tables
from jvpipe.planners.published.dapple import dapple
from jvpipe.planners.published.pipedream import pipedream
from jvpipe.schedules import find_schedule

MOST_LAYERS, MOST_DEVICES = 64, 16
"""The papers' programs take seconds for more."""


def rivals(tables: Tables, size: int) -> Iterator[ReplicaPlan]:
    """Yields PipeDream's plan over levels and the straight ones of PipeDream and DAPPLE; none where they find none.

    Of many layers, these are cut where the tables' grids are.

    Args:
        tables: of the problem.
        size: examples of a micro-batch.
    """
    problem = tables.problem
    costs, cluster = problem.local.at(size), problem.cluster
    cuts = tables.cuts if len(tables.cuts) <= MOST_LAYERS else tables.coarse
    costs = replace(costs, together=tuple(tuple(range(a, b)) for a, b in pairwise(map(int, cuts)) if b - a > 1))
    devices, order = problem.devices, problem.orders[0]
    schedule = find_schedule("1f1b")
    for straight in (True, False):
        stages = min(devices, len(cuts) - 1) if straight else devices
        if not straight and (len(tables.cuts) > MOST_LAYERS or devices > min(MOST_DEVICES, problem.layers)):
            continue
        peer = cluster.peer if stages <= cluster.devices_per_machine else cluster.network
        asked = Problem(
            costs,
            stages,
            schedule,
            problem.batch // size,
            memory_limit_bytes=problem.memory_limit_bytes,
            peer=peer,
            peer_uses_host=False,
            cluster=cluster,
        )
        for decide in (pipedream, dapple) if straight else (_hierarchical,):
            try:
                decision = decide(asked)
            except (Infeasible, ValueError):
                continue
            replicas = list(decision.replicas or (1,) * (len(decision.bounds) - 1))
            if max(replicas) <= size:
                starts = [0, *accumulate(replicas)][:-1]
                yield ReplicaPlan(decision.bounds, placed(order, starts, replicas), size)


def _hierarchical(problem: Problem) -> Decision:
    return pipedream(problem, replicate=True)
