"""A stream of steps without a flush between them: its lists step by step, and the version that each task reads.

A stage's part of a step ends before its first task on a micro-batch of the next one. So a step ends with S - 1 - s
micro-batches in flight on stage s, and the next one finds them there:

    S = 2, M = 2   step 0          step 1                drain
    stage 0        F0 F1 B0 U0     F2 B1 U1 F3 B2 U2     B3 U3
    stage 1        F0 B0 U0 F1 B1 U1   F2 B2 U2 F3 B3 U3
"""

from dataclasses import dataclass
from itertools import pairwise

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
    newest = {kind: [_counted(tasks, kind) for tasks in lists] for kind in "FB"}
    every, count = schedule.period(microbatches), len(newest["F"][0])
    match schedule.rule:
        case "first stage":
            forward = [newest["F"][0]] * len(lists)
        case "one behind":
            forward = [[max(0, i // every - 1) for i in range(count)]] * len(lists)
        case _:
            forward = newest["F"]
    backward = forward if schedule.stash else newest["B"]
    return Versions(tuple(map(tuple, forward)), tuple(map(tuple, backward)))


def _counted(tasks: tuple[Task, ...], kind: str) -> list[int]:
    """For each micro-batch, the updates before its task of a kind."""
    done, found = 0, []
    for task in tasks:
        done += task.kind == "U"
        if task.kind == kind:
            found.append(done)
    return found


def parts(longer: TaskLists, microbatches: int, steps: int, ended: TaskLists | None = None) -> list[TaskLists]:
    """The lists of the first steps of a stream, from those of at least one step more.

    With those of a stream that has `ended` after these steps, also what is left to do then.

    >>> from jvpipe.ir.task import text
    >>> from jvpipe.schedules import find_schedule
    >>> lists = [find_schedule("pipedream").with_updates(2, 2, steps) for steps in (2, 3)]
    >>> [text(part[0]) for part in parts(lists[1], 2, 2, ended=lists[0])]
    ['0F0 0F1 0B0 0U0', '0F2 0B1 0U1 0F3 0B2 0U2', '0B3 0U3']
    """
    found: list[list[tuple[Task, ...]]] = [[] for _ in range(steps)]
    for tasks in longer:
        forwards = [(task.microbatch, at) for at, task in enumerate(tasks) if task.kind == "F"]
        bounds = [next((at for m, at in forwards if m >= n * microbatches), len(tasks)) for n in range(steps + 1)]
        for part, (a, b) in zip(found, pairwise([0, *bounds[1:]]), strict=True):
            part.append(tasks[a:b])
    if ended:
        done = {task for part in found for tasks in part for task in tasks}
        found.append([tuple(task for task in tasks if task not in done) for tasks in ended])
    return [tuple(part) for part in found]
