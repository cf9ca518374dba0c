"""GPipe with backwards in descending order."""

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules.schedule import Schedule


def lifo(stages: int, microbatches: int) -> TaskLists:
    """All forwards, then all backwards, the last one first."""
    order = [(Kind.F, m) for m in range(microbatches)]
    order += [(Kind.B, m) for m in reversed(range(microbatches))]
    return tuple(tuple(Task(s, kind, m) for kind, m in order) for s in range(stages))


LIFO = Schedule(name="gpipe-lifo", lists=lifo)
