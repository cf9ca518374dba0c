"""Finds the task lists of a plan: its own if it has some, otherwise those of its schedule."""

from collections import Counter
from itertools import chain, product

from jvpipe.ir.kinds import Kind
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules.auto import read_lines
from jvpipe.schedules.halves import merged
from jvpipe.schedules.schedule import Schedule


def pipeline_length(plan: Plan, schedule: Schedule) -> int:
    """Counts the task lists of a plan; each is run by one device, or by a group of replicas.

    Raises:
        ValueError: the number of stages is 0, or not a multiple of the schedule's chunks.

    >>> from jvpipe.schedules import find_schedule
    >>> pipeline_length(Plan.from_cuts([2, 1, 1]), find_schedule("1f1b"))
    3
    """
    if plan.tasks:
        return len(plan.tasks)
    length, rest = divmod(len(plan.stages), schedule.chunks)
    if rest or not length:
        raise ValueError(
            f"{schedule.name} runs {schedule.chunks} stages per device, "
            f"but the plan has {len(plan.stages)} stages: "
            f"their number must be a multiple of {schedule.chunks}"
        )
    return length


def lists_of(plan: Plan, schedule: Schedule, microbatches: int) -> TaskLists:
    """Returns the tasks of a plan's step, a list per device, with halves joined by `merged`.

    Args:
        plan: the plan; its own tasks are returned if it has some.
        schedule: the schedule that makes the tasks if the plan has no tasks of its own.
        microbatches: the number of micro-batches of the step.

    Raises:
        ValueError: the plan's tasks are for other micro-batches or stages, or the stages of one
            list lie on different devices.
    """
    if plan.tasks:
        lists = merged(read_lines(plan.tasks))
        _check_complete(lists, len(plan.stages), microbatches)
    else:
        lists = schedule.tasks(pipeline_length(plan, schedule), microbatches)
    for tasks in lists:
        stages = sorted({task.stage for task in tasks})
        # A list is run by one device, or by one group of replicas.
        groups = {plan.stages[s].devices for s in stages}
        if len(groups) > 1:
            devices = sorted(d for group in groups for d in group)
            raise ValueError(
                f"under {schedule.name} one device runs stages {stages}, "
                f"but in the plan they are on devices {devices}: "
                "give these stages one device, "
                "as Plan.from_cuts([1, 1, 1, 1], [0, 1, 0, 1]) does"
            )
    return lists


def _check_complete(lists: TaskLists, stages: int, microbatches: int) -> None:
    """Raises ValueError unless the lists have exactly the tasks of a step.

    Each stage needs one forward and one backward of each micro-batch; the backward may be whole or
    in two halves.

    Args:
        lists: the tasks of each device.
        stages: the number of stages.
        microbatches: the number of micro-batches of a step.
    """
    counts = Counter(chain(*lists))
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W)
    for s, m in product(range(stages), range(microbatches)):
        # Expected tasks are removed from `counts`, so any task that remains is not one of the step.
        times = [counts.pop(Task(s, kind, m), 0) for kind in kinds]
        if times not in ([1, 1, 0, 0], [1, 0, 1, 1]):
            raise ValueError(
                f"the plan's tasks have F, B, I and W {times} times for stage {s} and "
                f"micro-batch {m}: a step of {microbatches} micro-batches on {stages} "
                "stages needs F and B, or F, I and W, once each. If the plan was made for "
                "another number of micro-batches, use plan.with_schedule, which keeps only the "
                "cuts and fates"
            )
    if counts:
        raise ValueError(
            f"the plan's tasks have {next(iter(counts))}, which is not a task of a step with "
            f"{stages} stages and {microbatches} micro-batches: plan again"
        )
