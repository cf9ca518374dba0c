"""Cuts and fates for schedules with several chunks per device, or with split backwards.

Fates say whether a residual is kept, swapped or computed again. A search begins at several cuts:
of equal work, of the surrogate (closed forms in place of the simulator, which know the links), and
of the best plan without a limit. From these it climbs while the simulated step gets faster
(`climb.py`): a bound moves, and fates are chosen again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from jvpipe.cost.hardware import INFINITE
from jvpipe.ir.kinds import Kind
from jvpipe.planners.joint.climb import Climb
from jvpipe.planners.joint.device_fates import DeviceFates
from jvpipe.planners.joint.effort import PLAN, RULE
from jvpipe.planners.joint.order_course import Course
from jvpipe.planners.joint.order_cuts import layer_s
from jvpipe.planners.joint.order_floor import emptied
from jvpipe.planners.joint.order_loads import Loads, Order, Step, order_of
from jvpipe.planners.joint.planner import crowded, jvpipe
from jvpipe.planners.model.even import balanced
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Cuts, Segments
from jvpipe.planners.model.unfolded import on_devices


@dataclass(frozen=True)
class RuledPlan:
    """A plan with an order of tasks, where both come from, and its simulated seconds.

    `fates` chooses fates for other cuts of the same placement, if other cuts are tried.
    """

    problem: Problem
    decision: Decision
    loads: Loads
    order: Order
    family: str
    fates: DeviceFates | None = None
    step_s: float = 0.0


def under_rule(problem: Problem, begin: Sequence[Decision] = ()) -> Decision:
    """Finds the decision of the fastest simulated step under the rule of the problem's schedule.

    Args:
        problem: what is to be planned.
        begin: plans of this problem that keep the limits; a search may begin at them.

    Raises:
        Infeasible: nothing fits; it tells the smallest limit that would do.
    """
    if problem.schedule.chunks == 1 and not problem.splits:
        return jvpipe(problem, begin=begin)
    ways = _ways(problem)
    first = first_cuts(problem, Segments(problem).cuts)
    if problem.memory_limit_bytes is not None:
        first.append(under_rule(problem.unlimited).bounds)
    climb = Climb(problem, ways, RULE.simulated_tasks, around=RULE.around)
    begins = [decision for bounds in first for decision in climb.refitted(bounds)]
    best = climb.top([*begins, *_asked(problem)])
    # Nothing fits at cuts that are fast: bounds move to where devices hold less, whatever that
    # costs.
    if best is None:
        begins = list[Decision]()
        for bounds in first:
            for plan in emptied(problem, ways[-1], bounds, places=PLAN.places):
                begins += climb.refitted(plan.bounds)
        best = climb.top(begins)
    return best or on_devices(jvpipe)(problem)  # else the planner raises, and tells what would do


def _ways(problem: Problem) -> list[DeviceFates]:
    """Prepares choosers of fates: one without swaps and, if a residual can be swapped, one with."""
    plain = DeviceFates.of(problem)
    if problem.memory_limit_bytes is None:
        return [plain]
    swapping = DeviceFates.of(crowded(problem), swaps=True)
    can_swap = swapping.pricing.choices.swapped_bytes.any()
    return [plain, swapping] if can_swap else [plain]


def first_cuts(problem: Problem, cuts: Cuts) -> list[tuple[int, ...]]:
    """Lists cuts to begin with: of equal work and, where sends take time, those of the surrogate.

    Args:
        problem: whose stages and links count.
        cuts: where a stage may begin or end.
    """
    begin = [balanced(problem, cuts, layer_s(problem))]
    if problem.peer != INFINITE:
        surrogate_best = on_devices(partial(jvpipe, refine=False))
        begin.append(surrogate_best(problem.unlimited).bounds)
    return list(dict.fromkeys(begin))


def _asked(problem: Problem) -> list[Decision]:
    """Lists the plan that keeps everything with one stage per device, if there is no memory limit."""
    if problem.memory_limit_bytes is not None:
        return []
    refine = len(problem.costs.layers) <= RULE.refined_layers
    return [on_devices(partial(jvpipe, refine=refine))(problem)]


def ruled(
    problem: Problem,
    decision: Decision,
    fates: DeviceFates,
) -> Iterator[RuledPlan]:
    """Yields the rule's own order.

    Args:
        problem: whose schedule is the rule.
        decision: the plan.
        fates: for other cuts.
    """
    loads = Loads.of(problem, decision)
    schedule = problem.schedule
    one = RuledPlan(problem, decision, loads, [], schedule.name, fates)
    lists = schedule.tasks(problem.devices, problem.microbatches)
    yield from fitting(one, order_of(lists))


def fitting(
    one: RuledPlan,
    order: Order,
    family: str = "",
) -> Iterator[RuledPlan]:
    """Yields a candidate in another order, if that fits; unsplit backwards stay whole.

    Args:
        one: whose plan counts.
        order: of the tasks.
        family: where the order comes from, if not from where that of the candidate did.
    """
    loads = one.loads
    # A rule knows no stages; where one has no halves its backwards stay whole.
    if not all(loads.splits):
        order = [_whole_where_not_split(steps, loads.splits) for steps in order]
    if loads.fits(order):
        step_s = Course(loads, order).step_s
        if np.isfinite(step_s):
            yield replace(one, order=order, family=family or one.family, step_s=step_s)


def _whole_where_not_split(steps: Sequence[Step], splits: Sequence[bool]) -> list[Step]:
    """Makes backwards whole in a device's steps, for the stages that cannot be split."""
    whole = list[Step]()
    for kind, s, m in steps:
        if splits[s] or kind is Kind.F:
            whole.append((kind, s, m))
        elif kind is not Kind.W:
            whole.append((Kind.B, s, m))
    return whole
