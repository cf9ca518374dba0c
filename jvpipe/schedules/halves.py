"""Backwards in two halves: I gives the cotangents that the stage before waits for, W adds the gradients later."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.task import Task, TaskLists


def merged(lists: TaskLists) -> TaskLists:
    """Joins halves where splitting gains nothing: on the first stage, a W right behind its own I is one whole B.

    Nobody waits for the cotangents of the first stage. The cotangents of all other stages leave
    earlier if W comes after I, even right after it: under zb-v with S = 4, M = 8, whole backwards
    in their place take 28.5 units instead of 25.5.

    >>> from jvpipe.ir.task import text
    >>> lists = tuple(tuple(map(Task.parse, line.split())) for line in ("0I0 0W0 0I1 3W0 0W1", "1I0 1W0"))
    >>> list(map(text, merged(lists)))
    ['0B0 0I1 3W0 0W1', '1I0 1W0']
    """
    return tuple(tuple(_merged(tasks)) for tasks in lists)


def _merged(tasks: Sequence[Task]) -> Iterator[Task]:
    """Yields the tasks of a device, joined."""
    whole: set[int] = set()  # micro-batches
    for task, following in pairwise(tasks):
        m = task.microbatch
        if task == (0, Kind.I, m) and following == (0, Kind.W, m):
            whole.add(m)
    for task in tasks:
        # In a joined pair I becomes the whole backward, and W is left out.
        is_half = task.stage == 0 and KINDS[task.kind].between != 0
        if not is_half or task.microbatch not in whole:
            yield task
        elif task.kind == Kind.I:
            yield task._replace(kind=Kind.B)
