"""Splicing: joins the task lists of two plans, for a run whose plan changes at a micro-batch.

Here micro-batch 0 belongs to the old plan, and micro-batches 1 and 2 belong to the new one. Each
line is the list of one stage. 1F2 is the forward of micro-batch 2 on stage 1:

    old, 1 stage     0F0 0B0 0F1 0B1 0F2 0B2
    new, 2 stages    0F0 0F1 0B0 0F2 0B1 0B2
                     1F0 1B0 1F1 1B1 1F2 1B2
    spliced          0F0 0F1 0B0 0F2 0B1 0B2
                     1F1 1B1 1F2 1B2

A stage's list is built forward by forward. The tasks that precede a forward in the list of the
forward's plan come first, unless the spliced list has them already. Then comes the forward. So the
pipeline fills or drains gradually if the number of stages changes. Splicing a list with itself
returns the same list.
"""

from collections.abc import Sequence
from itertools import zip_longest

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists


def spliced(old: TaskLists, new: TaskLists, microbatch: int) -> TaskLists:
    """Returns lists with the tasks of `old` before a micro-batch and those of `new` from it on.

    Args:
        old: the lists of the old plan.
        new: the lists of the new plan, for the same number of micro-batches.
        microbatch: the first micro-batch that belongs to the new plan.

    >>> from jvpipe.ir.task import text
    >>> from jvpipe.schedules.one_f_one_b import one_f_one_b
    >>> [text(tasks) for tasks in spliced(one_f_one_b(1, 3), one_f_one_b(2, 3), 1)]
    ['0F0 0F1 0B0 0F2 0B1 0B2', '1F1 1B1 1F2 1B2']
    """
    pairs = zip_longest(old, new, fillvalue=())  # a stage that a plan lacks has no tasks there
    return tuple(_stage(before, after, microbatch) for before, after in pairs)


def _stage(old: Sequence[Task], new: Sequence[Task], microbatch: int) -> tuple[Task, ...]:
    """Splices the lists of one stage.

    Args:
        old: the stage's list under the old plan.
        new: its list under the new plan.
        microbatch: the first micro-batch that belongs to the new plan.
    """
    remaining = {task for task in old if task.microbatch < microbatch}
    remaining |= {task for task in new if task.microbatch >= microbatch}
    order: list[Task] = []

    def append(tasks: Sequence[Task]) -> None:
        for task in tasks:
            if task in remaining:
                remaining.remove(task)
                order.append(task)

    last = max((task.microbatch for task in (*old, *new)), default=-1)
    for m in range(last + 1):
        plan = old if m < microbatch else new
        forwards = (i for i, t in enumerate(plan) if t.kind == Kind.F and t.microbatch == m)
        forward = next(forwards, None)
        if forward is None:
            continue
        # Forwards are left out here: each is appended in its own turn, from the list of its plan.
        append([task for task in plan[:forward] if task.kind != Kind.F])
        append([plan[forward]])
    # The tasks after the last forward remain. They get the order of the new plan or, if the new
    # plan lacks this stage, of the old plan.
    append(new or old)
    assert not remaining, f"{remaining} belong to neither list"
    return tuple(order)
