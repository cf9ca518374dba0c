"""Joins the halves of a backward, I and W, if running them separately gains nothing.

I computes the cotangents of the stage's inputs, and the previous stage waits for them. W adds to
the sums of gradients, and may run later.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists


def merged(lists: TaskLists) -> TaskLists:
    """Joins I and W of a micro-batch on the first stage into a whole B, if W directly follows I.

    No stage waits for cotangents of the first stage, so splitting gains nothing there. On other
    stages such pairs stay separate: the cotangents are sent after I, and need not wait for W. For
    example, take zb-v with S = 4 devices, M = 8 micro-batches, and F, I and W equally long. With
    all such pairs joined, a step would take 12% longer.

    >>> from jvpipe.ir.task import text
    >>> lists = tuple(tuple(map(Task.parse, line.split())) for line in ("0I0 0W0 0I1 3W0 0W1", "1I0 1W0"))
    >>> list(map(text, merged(lists)))
    ['0B0 0I1 3W0 0W1', '1I0 1W0']
    """
    return tuple(tuple(_merged(tasks)) for tasks in lists)


def _merged(tasks: Sequence[Task]) -> Iterator[Task]:
    """Yields the tasks of a device, with halves joined."""
    # The micro-batches whose halves are joined.
    whole = {
        task.microbatch
        for task, following in pairwise(tasks)
        if task[:2] == (0, Kind.I) and following == task._replace(kind=Kind.W)
    }
    for task in tasks:
        # In a joined pair I becomes the whole backward, and W is left out.
        is_joined = task.stage == 0 and task.microbatch in whole
        if is_joined and task.kind == Kind.I:
            yield task._replace(kind=Kind.B)
        elif not (is_joined and task.kind == Kind.W):
            yield task
