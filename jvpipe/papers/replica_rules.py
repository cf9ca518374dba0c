"""PipeDream's and DAPPLE's planners of replicated stages: each plans for one size of micro-batches.

Which size is best none of the papers says: whoever asks tries all, and simulates.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from jaxtyping import Int

from jvpipe.papers.dapple_replicas import dapple_replicas
from jvpipe.papers.pipedream import pipedream
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.replicas_plan import ReplicaPlan, placed
from jvpipe.planners.model.replicas_stage import Tables
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B


def pipedream_replicas(tables: Tables, size: int) -> ReplicaPlan | None:
    """PipeDream's plan over the levels of a cluster, between the coarse cuts; None if none fits.

    Args:
        tables: of the problem.
        size: examples of a micro-batch.

    Raises:
        ValueError: the devices do not fill the machines, or there are more of them than pieces of the model.
    """
    problem, pieces = tables.problem, len(tables.coarse) - 1
    if problem.devices > pieces:
        raise ValueError(
            f"{problem.devices} devices: pipedream replicates the stages of straight pipelines, and the model has "
            f"{pieces} pieces: use at most {pieces} devices, or planner 'jvpipe'"
        )
    try:
        decision = pipedream(one_each(tables, size, problem.devices, tables.coarse), replicate=True)
    except Infeasible:
        return None
    plan = as_replicas(tables, decision, size)
    return plan if problem.pins.allow(plan) and tables.fits(tables.stages(plan)) else None


RULES: Mapping[str, Callable[[Tables, int], ReplicaPlan | None]] = {
    "pipedream": pipedream_replicas,
    "dapple": dapple_replicas,
}


def one_each(tables: Tables, size: int, stages: int, cuts: Int[np.ndarray, "n"]) -> Problem:
    """The problem of stages of one device each.

    Args:
        tables: of the problem with replicas.
        size: examples of a micro-batch.
        stages: how many.
        cuts: where they may begin and end.
    """
    problem = tables.problem
    apart = tuple(tuple(range(a, b)) for a, b in pairwise(map(int, cuts)) if b - a > 1)
    cluster = problem.cluster
    return Problem(
        replace(problem.local.at(size), together=apart),
        stages,
        ONE_F_ONE_B,
        problem.batch // size,
        memory_limit_bytes=problem.memory_limit_bytes,
        peer=cluster.peer if stages <= cluster.devices_per_machine else cluster.network,
        peer_uses_host=False,
        cluster=cluster,
    )


def as_replicas(tables: Tables, decision: Decision, size: int) -> ReplicaPlan:
    """A decision as a plan of replicated stages, machine by machine.

    Args:
        tables: of the problem.
        decision: on as many devices.
        size: examples of a micro-batch.
    """
    replicas = list(decision.replicas or (1,) * (len(decision.bounds) - 1))
    starts = [0, *accumulate(replicas)][:-1]
    return ReplicaPlan(decision.bounds, placed(tables.problem.orders[0], starts, replicas), size)
