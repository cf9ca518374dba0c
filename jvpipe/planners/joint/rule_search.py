"""Searches cuts and fates for schedules with several chunks per device, or with split backwards.

The rule is the problem's schedule: it fixes the order of tasks. Fates say whether a residual is
kept, swapped or recomputed. The search climbs as long as the simulated step gets faster
(`climb.py`): a bound moves, and fates are chosen again. A climb ends where no single move helps,
although cuts farther away may be better. So the search climbs from several cuts:

    always                  cuts that give devices equal work
    if sends take time      the best cuts by the surrogate, a closed formula that counts links
    under a memory limit    the cuts that this search finds without the limit
    without a limit         the cuts that `jvpipe` (`plan_search.py`) finds as if each stage had a
                            device of its own

How long it climbs is set by `RULE` and `PLAN` (`effort.py`), which may be changed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from jvpipe.cost.hardware import INFINITE
from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.planners.joint.climb import Climb
from jvpipe.planners.joint.device_fates import DeviceFates
from jvpipe.planners.joint.effort import PLAN, RULE
from jvpipe.planners.joint.order_course import Course
from jvpipe.planners.joint.order_floor import emptied
from jvpipe.planners.joint.order_loads import Loads
from jvpipe.planners.joint.plan_search import crowded, jvpipe
from jvpipe.planners.model.even import balanced
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.unfolded import on_devices
from jvpipe.schedules.auto import given_lists


@dataclass(frozen=True)
class RuledPlan:
    """A plan with an order of tasks, and the seconds of a step in that order.

    `family` names the rule or the search that made the order. `step_s` is counted by
    `order_course.py`, which leaves out swaps and waits for shared links.

    `fates` chooses fates for other cuts of the same placement (the device of each stage). Without
    it, other cuts are tried only if there is no memory limit, because then everything is kept.
    """

    problem: Problem
    decision: Decision
    loads: Loads
    order: TaskLists
    family: str
    fates: DeviceFates | None = None
    step_s: float = 0.0

    @staticmethod
    def of(
        problem: Problem,
        decision: Decision,
        fates: DeviceFates | None = None,
    ) -> "RuledPlan":
        """Makes the plan in the rule's own order, which is not timed and may not fit.

        Args:
            problem: its schedule is the rule.
            decision: cuts and fates.
            fates: chooses fates for other cuts.
        """
        schedule = problem.schedule
        return RuledPlan(
            problem,
            decision,
            Loads.of(problem, decision),
            schedule.tasks(problem.devices, problem.microbatches),
            schedule.name,
            fates,
        )

    @property
    def listed(self) -> Problem:
        """The problem with the plan's order as its schedule."""
        return replace(self.problem, schedule=given_lists(self.order))


def under_rule(problem: Problem, begin: Sequence[Decision] = ()) -> Decision:
    """Searches for the decision with the fastest simulated step under the problem's schedule.

    If the schedule has one chunk per device and whole backwards, the planner `jvpipe` runs in place
    of this search.

    Args:
        problem: the problem to plan for; its schedule is the rule.
        begin: further plans for `jvpipe` to begin from, which keep the limits. This search ignores
            them.

    Raises:
        Infeasible: no plan fits; the error names a limit that suffices.
    """
    if problem.schedule.chunks == 1 and not problem.splits:
        return jvpipe(problem, begin=begin)
    ways = _ways(problem)
    first = first_cuts(problem)
    others = list[Decision]()
    if problem.memory_limit_bytes is not None:
        first.append(under_rule(problem.unlimited).bounds)
    else:
        # Under a limit, a plan made as if each stage had a device of its own would not help: it
        # does not count that the stages of a device share its memory.
        refine = len(problem.costs.layers) <= RULE.refined_layers
        others.append(on_devices(partial(jvpipe, refine=refine))(problem))
    climb = Climb(problem, ways, RULE.simulated_tasks, around=RULE.around)
    begins = chain.from_iterable(map(climb.refitted, first))
    best = climb.top([*begins, *others])
    # If no plan near fast cuts fits, bounds move to cuts that hold less, even if they are slow.
    if best is None:
        emptier = (
            plan.bounds
            for bounds in first
            for plan in emptied(problem, ways[-1], bounds, places=PLAN.places)
        )
        best = climb.top(chain.from_iterable(map(climb.refitted, emptier)))
    return best or on_devices(jvpipe)(problem)  # which raises Infeasible if it finds nothing either


def _ways(problem: Problem) -> list[DeviceFates]:
    """Prepares searches for fates: one without swaps and, if a residual can be swapped, one with.

    Without a memory limit everything is kept, and no search with swaps is needed.
    """
    plain = DeviceFates.of(problem)
    if problem.memory_limit_bytes is None:
        return [plain]
    swapping = DeviceFates.of(crowded(problem), swaps=True)
    can_swap = swapping.pricing.choices.swapped_bytes.any()
    return [plain, swapping] if can_swap else [plain]


def first_cuts(problem: Problem) -> list[tuple[int, ...]]:
    """Lists cuts to begin with: those of equal work and, if sends take time, the surrogate's.

    Args:
        problem: gives the layers, the stages and the links.
    """
    begin = [balanced(problem)]
    if problem.peer != INFINITE:
        surrogate_best = on_devices(partial(jvpipe, refine=False))
        begin.append(surrogate_best(problem.unlimited).bounds)
    return list(dict.fromkeys(begin))


def fitting(
    one: RuledPlan,
    order: TaskLists,
    family: str = "",
) -> Iterator[RuledPlan]:
    """Yields the candidate in another order, if that order fits.

    If the backward of a stage cannot be split, its two halves in the order become one backward.

    Args:
        one: the candidate; its cuts and fates stay the same.
        order: the order of the tasks.
        family: the family that the order comes from; if empty, that of the candidate.
    """
    loads = one.loads
    # A rule's order has halves for all stages, even those whose backwards cannot be split.
    if not all(loads.splits):
        order = tuple(tuple(_whole_where_not_split(tasks, loads.splits)) for tasks in order)
    if loads.fits(order):
        step_s = Course(loads, order).step_s
        if step_s < float("inf"):
            yield replace(
                one,
                order=order,
                family=family or one.family,
                step_s=step_s,
            )


def _whole_where_not_split(tasks: Sequence[Task], splits: Sequence[bool]) -> Iterator[Task]:
    """Yields a device's tasks, with whole backwards on the stages that cannot be split."""
    for task in tasks:
        if splits[task.stage] or task.kind is Kind.F:
            yield task
        elif task.kind is not Kind.W:
            yield task._replace(kind=Kind.B)
