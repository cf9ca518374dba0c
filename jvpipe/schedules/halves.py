"""Backwards in two halves: I gives the cotangents that the stage before waits for, W adds the gradients later."""

from collections.abc import Sequence
from itertools import pairwise

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists


def merged(lists: TaskLists) -> TaskLists:
    """Puts halves that follow each other together again: a W right behind its own I, on its device, is one whole B.

    >>> from jvpipe.ir.task import text
    >>> both = [Task(0, Kind.I, 0), Task(0, Kind.W, 0)]
    >>> text(merged(((*both, Task(0, Kind.I, 1), Task(1, Kind.W, 1)),))[0])
    '0B0 0I1 1W1'
    """
    return tuple(tuple(_merged(tasks)) for tasks in lists)


def _merged(tasks: Sequence[Task]) -> list[Task]:
    together = {task for task, after in pairwise(tasks) if task.kind == Kind.I and after == task._replace(kind=Kind.W)}
    inside = {task._replace(kind=Kind.W) for task in together}
    return [task._replace(kind=Kind.B) if task in together else task for task in tasks if task not in inside]
