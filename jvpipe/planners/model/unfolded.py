"""Extends planners of one stage per device to several stages per device, or backwards in halves.

The problem is unfolded: each stage gets a device of its own, and has as many micro-batches in
flight as before. Each of these devices may hold only a budget, which is the same fraction of its
limit for all devices. The search halves an interval of budgets, to find the largest budget whose
plan fits the true devices.
Every plan that the search accepts was counted on the true devices, so it keeps their limits. A
better plan may exist, because the stages of a device need not hold equal parts of its limit.
"""

from dataclasses import dataclass, replace
from itertools import chain

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decide, Decision, Group, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision, needed_bytes
from jvpipe.schedules.schedule import Schedule

BUDGETS = 7
"""How many budgets are tried; 7 find the largest one to within limit / 2 ** 6."""


@dataclass(frozen=True)
class UnfoldedLists:
    """The lists of a schedule, one per stage, with a whole backward in place of each first half."""

    schedule: Schedule

    def __call__(self, stages: int, microbatches: int) -> TaskLists:
        """Makes the list of tasks of each stage."""
        lists: list[list[Task]] = [[] for _ in range(stages)]
        devices = stages // self.schedule.chunks
        for task in chain.from_iterable(self.schedule.tasks(devices, microbatches)):
            # A first half becomes the whole backward, and a second half is left out.
            half = KINDS[task.kind].between
            if half >= 0:
                lists[task.stage].append(task._replace(kind=Kind.B) if half else task)
        return tuple(map(tuple, lists))


def unfolded(problem: Problem) -> Problem:
    """Returns the problem with a device for each stage.

    >>> from jvpipe.schedules import find_schedule
    >>> from jvpipe.ir.task import text
    >>> text(UnfoldedLists(find_schedule("interleaved"))(4, 2)[3])
    '3F0 3B0 3F1 3B1'
    """
    links = [problem.link_into(s) for s in range(problem.stages)]
    groups: tuple[Group, ...] = ()
    # Devices that are alike need no groups, unless the links between them differ.
    if problem.groups or any(link != problem.peer for link in links):
        groups = tuple(replace(problem.group(s), receives=link) for s, link in enumerate(links))
    costs = replace(problem.costs, together=problem.together)
    lists = UnfoldedLists(problem.schedule)
    schedule = Schedule(name=f"{problem.schedule.name}, unfolded", lists=lists)
    return replace(problem, costs=costs, schedule=schedule, groups=groups)


def with_budget(apart: Problem, limit: int, budget: int) -> Problem:
    """Returns the unfolded problem whose stages may each hold the same fraction of their limit.

    Args:
        apart: the unfolded problem.
        limit: the bytes that the roomiest device may hold.
        budget: the bytes that one stage on the roomiest device may hold.
    """
    groups = tuple(replace(g, less_bytes=g.less_bytes * budget // limit) for g in apart.groups)
    return replace(apart, memory_limit_bytes=budget, groups=groups)


def on_devices(decide: Decide) -> Decide:
    """Makes a planner for devices of several stages from a planner that knows one stage per device.

    The result raises `Infeasible` if no budget leads to a decision that keeps the limit; the error
    names a limit under which a decision was seen to fit. If `decide` ignores limits, the result
    never raises.

    Args:
        decide: the planner that knows one stage per device.
    """

    def decided(problem: Problem) -> Decision:
        if problem.schedule.chunks == 1 and not problem.splits:
            return decide(problem)
        apart = unfolded(problem)
        limit = problem.memory_limit_bytes
        if limit is None:
            return decide(apart)
        best = refused = None
        low, high = 0, limit
        # The whole limit is tried first. If its plan fits the devices, or if it has no plan, the
        # search ends. Otherwise the interval is halved. A budget is too small if nothing fits it,
        # and too large if the stages of a device together are over the device's limit.
        budget = limit
        for _ in range(BUDGETS):
            asked = with_budget(apart, limit, budget)
            try:
                decision = decide(asked)
                over = evaluate_decision(problem, decision).limit_bytes > limit
                best = best if over else decision
            except Infeasible as error:
                over = False
                refused = refused or (asked, error)
            low, high = (low, budget) if over else (budget, high)
            if low == limit:
                break
            budget = (low + high) // 2
        if best is not None:
            return best
        if refused is None:
            asked = with_budget(apart, limit, 1)
            try:
                return decide(asked)  # a planner that ignores limits answers any problem
            except Infeasible as error:
                refused = asked, error
        raise _infeasible(problem, decide, *refused)

    return decided


def _infeasible(
    problem: Problem,
    decide: Decide,
    asked: Problem,
    refused: Infeasible,
) -> Infeasible:
    """Makes the error that no budget suffices; it names a larger limit that a decision keeps."""
    limit = problem.memory_limit_bytes
    assert limit is not None
    decision = decide(replace(asked, memory_limit_bytes=refused.smallest_limit_bytes))
    evaluation = evaluate_decision(problem, decision)
    sizes = evaluation.device_bytes
    enough = max(evaluation.limit_bytes, limit + 1)
    d = needed_bytes(problem, sizes).index(evaluation.limit_bytes)
    return Infeasible(
        f"no plan found fits {problem.limit_of(d)} bytes of device {d} under "
        f"{problem.schedule.name}: it would hold {sizes[d]} bytes. A limit that would do is "
        f"{problem.enough_said(enough)}; raise the limit, add devices, or use smaller micro-batches",
        smallest_limit_bytes=enough,
    )
