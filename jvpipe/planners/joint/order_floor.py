"""Finds the plans that need the least memory, to see whether some order of tasks keeps a limit.

Devices hold the least in the order with one micro-batch in flight at a time (the schedule
`one_by_one`). A plan that keeps a limit in some order also keeps it in this one. So it is enough to
find the emptiest plan in this order: the plan whose fullest device holds the least.

    one stage per device     `min_bytes_plan` (`smallest_limit.py`) finds it
    several, few cuts        all choices of cuts are tried
    several, many cuts       one stage bound moves at a time while the fullest devices get emptier;
                             a plan that needs less may be missed

Several stages of a device work one at a time, and share the bytes that a stage needs only while it
works. So what a stage adds depends on the other stages of its device. `min_bytes_plan` counts each
stage alone, and is not enough. How many cuts are tried is set by `LIMIT` in `effort.py`.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from math import comb

from jvpipe.planners.joint.device_fates import DeviceFates
from jvpipe.planners.joint.effort import LIMIT
from jvpipe.planners.joint.order_cuts import all_cuts, moved_bounds
from jvpipe.planners.joint.smallest_limit import min_bytes_plan
from jvpipe.planners.model.even import busiest_s, even
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision, needed_bytes
from jvpipe.schedules.one_by_one import one_by_one
from jvpipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class OrderFloor:
    """The emptiest plan of a placement, its schedule, and the least limit that the plan keeps."""

    schedule: Schedule
    decision: Decision
    limit_bytes: int


def order_floors(
    problem: Problem,
    placements: Iterable[Schedule],
) -> Iterator[OrderFloor]:
    """Yields the emptiest plan of each placement; no plan swaps if the host has a limit.

    Args:
        problem: its schedule and its memory limit are ignored.
        placements: schedules, of which only the devices of the stages are used.
    """
    for placed in placements:
        schedule = one_by_one(placed)
        stages = schedule.stages_on(problem.devices)
        alone = replace(
            problem,
            stages=stages,
            schedule=schedule,
            memory_limit_bytes=None,
        )
        decision = _emptiest(alone)
        yield OrderFloor(
            schedule,
            decision,
            evaluate_decision(alone, decision).limit_bytes,
        )


def _emptiest(problem: Problem) -> Decision:
    """Returns the emptiest plan found for a problem with one micro-batch in flight at a time."""
    fates = DeviceFates.of(problem, swaps=problem.host_limit_bytes is None)
    least = min_bytes_plan(fates.pricing).decision
    if problem.schedule.chunks == 1:
        return least
    # `least` counts each stage as if it had a device of its own. Its bounds need not be the best
    # ones for stages that share a device, but the search may begin at them.
    cuts = fates.pricing.segments.cuts
    if comb(len(cuts) - 2, problem.stages - 1) <= LIMIT.cuts:
        every = all_cuts(problem.stages, cuts, busiest_s(problem))
        plans = (fates.emptiest(problem, bounds) for bounds in every)
    else:
        starts = dict.fromkeys((least.bounds, even(problem).bounds))
        plans = chain.from_iterable(
            emptied(problem, fates, bounds, tries=LIMIT.moved_cuts) for bounds in starts
        )
    return min(plans, key=partial(_fullness, problem))


def emptied(
    problem: Problem,
    fates: DeviceFates,
    bounds: Sequence[int],
    places: int = 1,
    tries: int = sys.maxsize,
) -> Iterator[Decision]:
    """Yields emptier and emptier plans, with one bound moved from each plan to the next.

    Ends when no such move makes the fullest devices emptier, or when `tries` plans were counted.

    Args:
        problem: gives the order of tasks.
        fates: chooses what each layer keeps, recomputes or swaps.
        bounds: the bounds of the stages, at which the search begins.
        places: the most cuts by which a bound moves at once.
        tries: the most plans whose bytes are counted.
    """
    cuts = fates.pricing.segments.cuts
    best = fates.emptiest(problem, bounds)
    yield best
    while tries > 0:
        inner = range(1, problem.stages)
        distances = range(1, places + 1)
        moved = chain.from_iterable(moved_bounds(best.bounds, cuts, s, 1, distances) for s in inner)
        some = list(islice(moved, tries))
        tries -= len(some)
        plans = [best, *(fates.emptiest(problem, bounds) for bounds in some)]
        emptier = min(plans, key=partial(_fullness, problem))
        if emptier is best:
            return
        best = emptier
        yield best


def _fullness(problem: Problem, decision: Decision) -> list[int]:
    """Lists for each device the smallest limit under which the plan fits it, the largest first."""
    device_sizes = evaluate_decision(problem, decision).device_bytes
    return sorted(needed_bytes(problem, device_sizes), reverse=True)
