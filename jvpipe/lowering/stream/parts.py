"""The parts of a stream: task lists that are cut into steps, and the versions that tasks read.

A stream is a run of steps without a flush between them. A stage's part of a step ends just before
the stage's first forward for the next step. On stage s of S, S - 1 - s micro-batches are then in
flight; their backwards belong to later steps. With two stages and two micro-batches per step:

               step 0                  step 1                  drain
    stage 0    F0 F1 B0 U0             F2 B1 U1 F3 B2 U2       B3 U3
    stage 1    F0 B0 U0 F1 B1 U1       F2 B2 U2 F3 B3 U3

F1, B1 and U1 are the forward, the backward and the update of micro-batch 1. The columns are not to
scale: they show which tasks belong to which step.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import assert_never

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class Versions:
    """The versions that tasks read, by stage and micro-batch.

    A version is the number of updates that the stage has had. If the schedule stashes older
    versions, a backward reads the version that its forward has read. If not, it reads the newest
    version of its stage.
    """

    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]


def versions(schedule: Schedule, lists: TaskLists, microbatches: int) -> Versions:
    """Returns the version that each task of a stream reads.

    Args:
        schedule: the schedule, whose `rule` and `stash` determine the versions.
        lists: the tasks of each stage, with the updates, from the start of the stream.
        microbatches: the number of micro-batches of a step.

    >>> from jvpipe.schedules import find_schedule
    >>> pipedream = find_schedule("pipedream")
    >>> versions(pipedream, pipedream.with_updates(3, 5), 5).forward
    ((0, 0, 0, 1, 2), (0, 0, 1, 2, 3), (0, 1, 2, 3, 4))
    """
    newest = [_updates_before(tasks, Kind.F) for tasks in lists]
    match schedule.rule:
        case "first stage":
            forward = [newest[0]] * len(lists)
        case "one behind":
            # Update k changes version k. The forwards of its micro-batches read version k - 1.
            every = schedule.period(microbatches)
            behind = tuple(max(0, m // every - 1) for m in range(len(newest[0])))
            forward = [behind] * len(lists)
        case "newest":
            forward = newest
        case _:
            assert_never(schedule.rule)
    backward = forward
    if not schedule.stash:
        backward = [_updates_before(tasks, Kind.B) for tasks in lists]
    return Versions(tuple(forward), tuple(backward))


def _updates_before(tasks: tuple[Task, ...], kind: Kind) -> tuple[int, ...]:
    """Counts, for each micro-batch, the updates before its task of a kind."""
    updates = 0
    counts = []
    for task in tasks:
        updates += task.kind == Kind.U
        if task.kind == kind:
            counts.append(updates)
    return tuple(counts)


def parts(
    lists: Callable[[int], TaskLists],
    microbatches: int,
    steps: int,
    ended: TaskLists,
    early: Callable[[TaskLists, TaskLists], Collection[Task]] = lambda part, rest: (),
) -> list[TaskLists]:
    """Cuts a stream's lists into the lists of its first steps, followed by those of its drain.

    Args:
        lists: a function from the number of a step to the lists of the whole stream. They include
            only the changes of plan up to that step, and reach at least to the end of the next
            step.
        microbatches: the number of micro-batches of a step.
        steps: the number of steps to cut.
        ended: the lists of a stream that ends after `steps` steps. The drain is taken from them.
        early: a function that takes a step's lists and the rest. It returns the tasks of the rest
            that must run within the step.

    >>> from jvpipe.ir.task import text
    >>> from jvpipe.schedules import find_schedule
    >>> two, three = (find_schedule("pipedream").with_updates(2, 2, count) for count in (4, 6))
    >>> [text(part[0]) for part in parts(lambda n: three, 2, 2, ended=two)]
    ['0F0 0F1 0B0 0U0', '0F2 0B1 0U1 0F3 0B2 0U2', '0B3 0U3']
    """
    result: list[TaskLists] = []
    done: set[Task] = set()
    for n in range(steps):
        first: list[tuple[Task, ...]] = []
        rest: list[tuple[Task, ...]] = []
        for tasks in _without(done, lists(n)):
            # A stage's part of the step ends before its first forward for the next step.
            at = (n + 1) * microbatches
            following = (i for i, t in enumerate(tasks) if t.kind == Kind.F and t.microbatch >= at)
            end = next(following, len(tasks))
            first.append(tasks[:end])
            rest.append(tasks[end:])
        # Tasks that are needed early follow the step's own tasks, in the order of the list.
        moved = early(tuple(first), tuple(rest))
        part: list[tuple[Task, ...]] = []
        for tasks, later in zip(first, rest, strict=True):
            needed = [task for task in later if task in moved]
            part.append((*tasks, *needed))
            done.update(part[-1])
        result.append(tuple(part))
    result.append(_without(done, ended))
    return result


def _without(done: Collection[Task], lists: TaskLists) -> TaskLists:
    """Returns the lists without the tasks that are done."""
    return tuple(tuple(task for task in tasks if task not in done) for tasks in lists)
