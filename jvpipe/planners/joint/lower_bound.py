"""Bounds from below the simulated step of any plan: how fast a plan can be at best.

The bounds are closed forms of the least seconds of stages and links. Tests compare them with the
simulated steps of all plans of small problems, and of plans found for larger ones
(tests/planners/joint/test_lower_bound.py).
"""

from dataclasses import replace
from itertools import accumulate

import numpy as np

from jvpipe.cost.hardware import INFINITE
from jvpipe.planners.joint.cap_search import Solution, Stages, phases
from jvpipe.planners.joint.effort import CUTS
from jvpipe.planners.joint.surrogate import pricing_of, solve
from jvpipe.planners.joint.trips import Trips
from jvpipe.planners.model.chain_dp import Matrix, least_max, least_sum
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.stage_simulation import trips_counted
from jvpipe.schedules.schedule import Schedule


def lower_bound(problem: Problem) -> float:
    """Bounds the simulated seconds per step of any plan; infinite if nothing fits.

    A stage is busy for M micro-batches of t seconds each, on its device or on its link to the host.
    A synchronous step also takes the forwards, backwards and transfers of all earlier layers: the
    first micro-batch passes them before the stage begins, and the last one returns through them at
    the end. Recomputation in earlier layers is not added, because it may run while devices wait.
    GPipe runs all forwards first, so each phase is bounded alone. An asynchronous stream also makes
    round trips (`trips.py`). Schedules with several stages per device, or with halves of backwards,
    are bounded by `_of_any_order`.

    Args:
        problem: the problem to plan for.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (Option(0),)),) * 5)
    >>> problem = Problem(costs, 2, find_schedule("1f1b"), microbatches=8)
    >>> lower_bound(problem)  # 8 * 9: three layers on the first stage
    72.0
    """
    if problem.schedule.chunks > 1 or problem.splits:
        return _of_any_order(problem)
    solution = _hidden_transfers(problem)
    if not solution.feasible:
        return np.inf
    segments = Segments(problem)
    # The least seconds t of each segment over all fates, and its other costs, transfers included.
    stages: Stages = [
        (segments.block(x.block.s, x.block.starts, x.block.ends), x.seconds)
        for x in solution.table.lower()
    ]
    m = problem.microbatches
    above_cap_s = m * solution.cap_s  # a bound for plans whose slowest stage is above the cap
    if not problem.schedule.synchronous:
        of_stream_s = max(_of_stream(problem, stages), solution.bound_s)
        return min(of_stream_s, above_cap_s)
    work_s = float(segments.least_compute_s[-1])
    if problem.phases == 2:
        above_cap_s = work_s + (m - 1) * solution.cap_s
        longest_s = float(np.diff(segments.least_compute_s).max())
        every_s = work_s + (m - 1) * max(segments.share_s, longest_s)
        return max(every_s, min(_of_two_phases(problem, stages), above_cap_s))
    # Let P_s = t_0 + ... + t_s and q = 1 - 1 / M. A step of T seconds has M t_s + P_(s-1) <= T for
    # each stage s, so P_s <= T / M + q P_(s-1), and by induction P_s <= T (1 - q^(s+1)). For the
    # last stage P_s is all the work, however it is divided: T is at least work / (1 - q^stages).
    every_s = work_s / (1 - (1 - 1 / m) ** problem.stages)
    if problem.groups:
        every_s = m * segments.share_s
    return max(every_s, min(_of_1f1b(problem, stages, segments), above_cap_s))


def _hidden_transfers(problem: Problem) -> Solution:
    """Solves the problem as an asynchronous one without transfers, which the caller adds."""
    alone = replace(problem, peer=INFINITE, peer_uses_host=False)
    # The pricing still counts the bytes of the problem's own schedule.
    schedule = problem.schedule
    stream = Schedule(name=schedule.name, lists=schedule.lists, synchronous=False)
    return solve(replace(alone, schedule=stream), pricing_of(alone))


def _of_any_order(problem: Problem) -> float:
    """Bounds any order of tasks, as if devices began as early as possible and ended together.

    A backward counts whole or in halves, whichever takes less. If devices are alike, the d-th to
    begin (d = 0, 1, ...) waits at least for the forwards of the first d layers, because d devices
    begin before it.
    """
    layers = problem.costs.layers
    layers_s = []
    for layer in layers:
        split = layer.split
        halves_s = split.input_s + split.weight_s if split else np.inf
        layers_s.append(layer.forward_s + min(layer.backward_s, halves_s))
    work_s = problem.microbatches * sum(layers_s)
    # Unlike devices share the work, if there is any, in proportion to their best speeds.
    if problem.groups and work_s:
        segments = Segments(problem)
        return work_s * segments.share_s / float(segments.compute_s[-1])
    begins_s = accumulate(layer.forward_s for layer in layers[: problem.devices - 1])
    return (work_s + sum(begins_s)) / problem.devices


def _of_stream(problem: Problem, stages: Stages) -> float:
    """Bounds a stream by the least cap of `trips.py`.

    Stages wait for each other in cycles of several micro-batches. The simulator's timing may end
    within a cycle, so the cap counts only for micro-batches of whole cycles (`trips_counted`).
    """
    m = problem.microbatches
    own_s = [np.maximum(t + x.once_s / m, x.traffic_s) for x, t in stages]
    ways_s = [np.where(np.isfinite(t), x.compute_s, np.inf) for x, t in stages]
    comm_s = [x.comm_s for x, _ in stages]
    period_s = (1 - CUTS.trip_tolerance) * Trips(ways_s, comm_s, own_s).least_cap_s()
    return m * trips_counted(problem.stages, m) * period_s


def _of_two_phases(problem: Problem, stages: Stages) -> float:
    """Bounds a step of GPipe from below.

    The first micro-batch passes all stages, and each of the other M - 1 adds the seconds of each
    phase's slowest stage.
    """
    slowest_s = sum(map(least_max, phases(problem, stages)))
    ways_s = (np.where(np.isfinite(t), x.compute_s + x.comm_s, np.inf) for x, t in stages)
    through_s, _ = least_sum(ways_s)
    return through_s + (problem.microbatches - 1) * slowest_s


def _of_1f1b(
    problem: Problem,
    stages: Stages,
    segments: Segments,
) -> float:
    """Bounds 1F1B by its slowest stage: M t + max(its all-reduce and updates, earlier layers)."""
    m = problem.microbatches
    every = list[Matrix]()
    crossed_s = np.zeros(1)  # the least seconds of the transfers up to a cut
    for x, t in stages:
        there_s = np.where(np.isfinite(t), crossed_s[:, None] + x.comm_s, np.inf)
        # Earlier layers and links run before the stage's first forward or after its last backward.
        before_s = segments.least_compute_s[x.starts][:, None] + there_s
        busy_s = m * t + np.maximum(x.once_s, before_s)
        every.append(np.maximum(busy_s, m * x.traffic_s))
        crossed_s = there_s.min(0)
    return least_max(every)
