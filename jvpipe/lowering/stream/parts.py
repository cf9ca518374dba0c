"""A stream of steps without a flush between them: its lists step by step, and the version that each task reads.

A stage's part of a step ends before its first task on a micro-batch of the next one. So a step ends with S - 1 - s
micro-batches in flight on stage s, and the next one finds them there:

    S = 2, M = 2   step 0          step 1                drain
    stage 0        F0 F1 B0 U0     F2 B1 U1 F3 B2 U2     B3 U3
    stage 1        F0 B0 U0 F1 B1 U1   F2 B2 U2 F3 B3 U3
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import assert_never

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class Versions:
    """The versions that tasks read and make, by stage and micro-batch; counted in updates of the stage."""

    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]  # the stage's newest, for those that do not stash


def versions(schedule: Schedule, lists: TaskLists, microbatches: int) -> Versions:
    """The version that each task of a stream reads.

    Args:
        schedule: whose rule.
        lists: with the updates, from the start of the stream.
        microbatches: of a step.

    >>> from jvpipe.schedules import find_schedule
    >>> pipedream = find_schedule("pipedream")
    >>> versions(pipedream, pipedream.with_updates(3, 5), 5).forward
    ((0, 0, 0, 1, 2), (0, 0, 1, 2, 3), (0, 1, 2, 3, 4))
    """
    newest = {kind: [_counted(tasks, kind) for tasks in lists] for kind in (Kind.F, Kind.B)}
    every, count = schedule.period(microbatches), len(newest[Kind.F][0])
    match schedule.rule:
        case "first stage":
            forward = [newest[Kind.F][0]] * len(lists)
        case "one behind":
            forward = [[max(0, i // every - 1) for i in range(count)]] * len(lists)
        case "newest":
            forward = newest[Kind.F]
        case _:
            assert_never(schedule.rule)
    backward = forward if schedule.stash else newest[Kind.B]
    return Versions(tuple(map(tuple, forward)), tuple(map(tuple, backward)))


def _counted(tasks: tuple[Task, ...], kind: Kind) -> list[int]:
    """Counts, for each micro-batch, the updates before its task of a kind."""
    done, counts = 0, []
    for task in tasks:
        done += task.kind == Kind.U
        if task.kind == kind:
            counts.append(done)
    return counts


def parts(
    lists: Callable[[int], TaskLists],
    microbatches: int,
    steps: int,
    ended: TaskLists,
    early: Callable[[TaskLists, TaskLists], Collection[Task]] = lambda part, rest: (),
) -> list[TaskLists]:
    """The lists of the first steps of a stream; last what it has left to do once it has `ended`.

    Args:
        lists: from the number of a step, what is known then of the whole stream, of at least one step more.
        microbatches: of a step.
        steps: how many.
        ended: the lists of a stream of just so many steps.
        early: from a step's lists and the rest, what of the rest must be done within the step.

    >>> from jvpipe.ir.task import text
    >>> from jvpipe.schedules import find_schedule
    >>> two, three = (find_schedule("pipedream").with_updates(2, 2, steps) for steps in (2, 3))
    >>> [text(part[0]) for part in parts(lambda n: three, 2, 2, ended=two)]
    ['0F0 0F1 0B0 0U0', '0F2 0B1 0U1 0F3 0B2 0U2', '0B3 0U3']
    """
    steps_parts: list[TaskLists] = []
    done: set[Task] = set()
    for n in range(steps):
        left = [[task for task in tasks if task not in done] for tasks in lists(n)]
        ends = [
            next(
                (
                    i
                    for i, t in enumerate(tasks)
                    if t.kind == Kind.F and t.microbatch >= (n + 1) * microbatches
                ),
                None,
            )
            for tasks in left
        ]
        part = tuple(tuple(tasks[:end]) for tasks, end in zip(left, ends, strict=True))
        rest = tuple(
            () if end is None else tuple(tasks[end:]) for tasks, end in zip(left, ends, strict=True)
        )
        brought = early(part, rest)
        part = tuple((*a, *(t for t in b if t in brought)) for a, b in zip(part, rest, strict=True))
        done |= {task for tasks in part for task in tasks}
        steps_parts.append(part)
    steps_parts.append(tuple(tuple(task for task in tasks if task not in done) for tasks in ended))
    return steps_parts
