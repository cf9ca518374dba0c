"""Planners of stages that may have several devices, by name."""

import time
from collections.abc import Callable
from dataclasses import replace

from jvpipe.papers.registry import find_planner
from jvpipe.papers.replica_rules import RULES
from jvpipe.planners.joint.replicas_bound import lower_bound_s
from jvpipe.planners.joint.replicas_planner import plan_replicas
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.replicas_answer import ReplicaAnswer, Simulated, of_each_shape
from jvpipe.planners.model.replicas_plan import ReplicaPlan
from jvpipe.planners.model.replicas_problem import ReplicaProblem
from jvpipe.planners.model.replicas_stage import Tables
from jvpipe.planners.model.replicas_step import simulated_s

REPLICA_PLANNERS = ("jvpipe", *RULES)
"""Names of the planners that give stages several devices."""


def ask_replicas(planner: str, problem: ReplicaProblem) -> ReplicaAnswer:
    """Asks a planner; one of the papers for every size of micro-batches, and its plan of the fastest simulated step.

    Args:
        planner: one of `REPLICA_PLANNERS`.
        problem: what is asked.

    Raises:
        Infeasible: no plan keeps the memory limit; with one that would do.
        ValueError: something is pinned that the planner decides, or it cannot use so many devices.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.cost.cluster_file import find_cluster
    >>> from jvpipe.planners.model.replicas_costs import LocalCosts
    >>> costs = LocalCosts((1,), (Costs((LayerCost("block", 1.0, 2.0, (Option(8),)),) * 4),))
    >>> ask_replicas("dapple", ReplicaProblem(costs, find_cluster("v100-b"), 4, 8)).best.plan
    4 of 4 layers, micro-batches of 8
    """
    if not find_planner(planner).as_paper:
        return plan_replicas(problem)
    start_s, rule = time.perf_counter(), RULES[planner]
    if problem.pins.count is not None:
        raise ValueError(
            f"planner '{planner}' decides stages, replicas and cuts itself: leave them out, or use planner 'jvpipe'"
        )
    every = sorted(_simulated(rule, problem), key=lambda x: x.step_s)
    if not every:
        raise _nothing_fits(planner, problem)
    bound_s = lower_bound_s(Tables(problem))
    return ReplicaAnswer(
        every[0], of_each_shape(every), bound_s, time.perf_counter() - start_s, planner
    )


def _simulated(
    rule: Callable[[Tables, int], ReplicaPlan | None], problem: ReplicaProblem
) -> list[Simulated]:
    """The rule's plan for each size for which it has one."""
    tables = Tables(problem)
    plans = [plan for size in problem.sizes if (plan := rule(tables, size)) is not None]
    counted = [(plan, tables.stages(plan)) for plan in plans]
    return [
        Simulated(plan, stages, simulated_s(problem, plan, stages, closely=True))
        for plan, stages in counted
    ]


def _nothing_fits(planner: str, problem: ReplicaProblem) -> Infeasible:
    """The error when no plan fits: it names a limit under which the planner has one."""
    limit = problem.memory_limit_bytes
    assert limit is not None, "without a limit every planner has a plan"
    roomy = _simulated(RULES[planner], replace(problem, memory_limit_bytes=None, recomputes=True))
    enough = min(max(stage.peak_bytes for stage in each.stages) for each in roomy)
    while not _simulated(RULES[planner], replace(problem, memory_limit_bytes=enough)):
        enough += enough // 8 + 1
    return Infeasible(
        f"{planner} has no plan that fits into {limit} bytes per device: with {enough} bytes it has, {enough - limit} "
        "more. Use more devices, or planner 'jvpipe'",
        stage=0,
        excess_bytes=enough - limit,
        smallest_limit_bytes=enough,
    )
