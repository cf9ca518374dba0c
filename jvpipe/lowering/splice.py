"""The task lists of a run whose plan changes at a micro-batch: what is done with each is its own plan's.

Before a forward comes what comes before it in the lists of its plan. So a change of the number of stages fills or
empties the pipeline as it goes, and lists of equal plans stay as they are.
"""

from collections.abc import Sequence

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists


def spliced(old: TaskLists, new: TaskLists, microbatch: int) -> TaskLists:
    """The lists of `old` for the micro-batches before `microbatch`, of `new` from it on.

    Args:
        old: lists of the plan before.
        new: lists of the plan after, of as many micro-batches.
        microbatch: the first one under the new plan.

    >>> from jvpipe.ir.task import text
    >>> from jvpipe.schedules.one_f_one_b import one_f_one_b
    >>> [text(tasks) for tasks in spliced(one_f_one_b(1, 3), one_f_one_b(2, 3), 1)]
    ['0F0 0F1 0B0 0F2 0B1 0B2', '1F1 1B1 1F2 1B2']
    """
    pad = [(*lists, *[()] * (max(len(old), len(new)) - len(lists))) for lists in (old, new)]
    return tuple(_stage(before, after, microbatch) for before, after in zip(*pad, strict=True))


def _stage(old: Sequence[Task], new: Sequence[Task], microbatch: int) -> tuple[Task, ...]:
    """One stage; it has no tasks in a plan that does not know it."""
    tasks_of_stage: dict[Task, None] = {}
    known = {t for t in old if t.microbatch < microbatch} | {
        t for t in new if t.microbatch >= microbatch
    }

    def add(tasks: Sequence[Task]) -> None:
        tasks_of_stage.update(dict.fromkeys(task for task in tasks if task in known))

    for m in range(1 + max((task.microbatch for task in (*old, *new)), default=-1)):
        own = old if m < microbatch else new
        forward = next(
            (i for i, task in enumerate(own) if task.kind == Kind.F and task.microbatch == m), None
        )
        if forward is not None:
            add([task for task in own[:forward] if task.kind != Kind.F])
            add([own[forward]])
    add(new or old)
    assert tasks_of_stage.keys() == known
    return tuple(tasks_of_stage)
