"""Planners for one stage per device, asked about devices of several stages, or of backwards in two halves.

Such a problem is unfolded: each stage has a device of its own, which holds as many micro-batches, and whose limit is a
budget, the same for all. The largest budget is sought at which all stages of each device keep the limit together.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate
from jvpipe.schedules.schedule import Schedule

BUDGETS = 7
"""Budgets that are tried: the last is found to within a part of 2 ** 6 of the limit."""


@dataclass(frozen=True)
class UnfoldedLists:
    """The lists of a schedule, one per stage, with whole backwards at the place of their first half."""

    schedule: Schedule

    def __call__(self, stages: int, microbatches: int) -> TaskLists:
        """Makes a list per stage."""
        lists: list[list[Task]] = [[] for _ in range(stages)]
        for tasks in self.schedule.tasks(stages // self.schedule.chunks, microbatches):
            for task in tasks:
                if info := KINDS[task.kind].between:
                    lists[task.stage] += [task._replace(kind=Kind.B)] if info > 0 else []
                else:
                    lists[task.stage].append(task)
        return tuple(map(tuple, lists))


def unfolded(problem: Problem) -> Problem:
    """The problem with a device for each stage.

    >>> from jvpipe.schedules import find_schedule
    >>> from jvpipe.ir.task import text
    >>> text(UnfoldedLists(find_schedule("interleaved"))(4, 2)[3])
    '3F0 3B0 3F1 3B1'
    """
    name = f"{problem.schedule.name}, unfolded"
    costs = replace(problem.costs, together=problem.together)
    return replace(problem, costs=costs, schedule=Schedule(name=name, lists=UnfoldedLists(problem.schedule)))


def on_devices(decide: Callable[[Problem], Decision]) -> Callable[[Problem], Decision]:
    """A planner that knows devices of several stages, from one that does not.

    It raises `Infeasible` where no budget leads to a decision that keeps the limit; what would do is what was seen to.
    What looks at no limit answers all the same.
    """

    def decided(problem: Problem) -> Decision:
        if problem.schedule.chunks == 1 and not problem.splits:
            return decide(problem)
        apart, limit = unfolded(problem), problem.memory_limit_bytes
        if limit is None:
            return decide(apart)
        best, least = None, None
        low, high = 0, limit
        for budget in [limit, *[0] * (BUDGETS - 1)]:
            budget = budget or (low + high) // 2
            try:
                found = decide(replace(apart, memory_limit_bytes=budget))
            except Infeasible as error:
                low, least = budget, least or error
                continue
            peak = evaluate(problem, found).peak_bytes
            if peak <= limit:
                best, low = found, budget
            else:
                high = budget
            if low == limit:
                break
        if best is not None:
            return best
        if least is None:
            try:
                return decide(replace(apart, memory_limit_bytes=1))  # whoever asks sees that it is over the limit
            except Infeasible as error:
                least = error
        raise _infeasible(problem, decide, apart, least)

    return decided


def _infeasible(
    problem: Problem, decide: Callable[[Problem], Decision], apart: Problem, least: Infeasible
) -> Infeasible:
    """The answer when no budget does: what the decision of the smallest budget takes on the fullest device."""
    limit = problem.memory_limit_bytes
    assert limit is not None
    found = decide(replace(apart, memory_limit_bytes=least.smallest_limit_bytes))
    peaks = evaluate(problem, found).device_bytes
    enough = max(*peaks, limit + 1)
    return Infeasible(
        f"no plan found fits {limit} bytes per device under {problem.schedule.name}: device {peaks.index(max(peaks))} "
        f"would hold {max(peaks)} bytes. Raise the limit, add devices, or use smaller micro-batches",
        stage=problem.places.index(peaks.index(max(peaks))),
        excess_bytes=enough - limit,
        smallest_limit_bytes=enough,
        decision=found,
    )
