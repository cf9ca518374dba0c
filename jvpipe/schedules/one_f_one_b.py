"""1F1B with a flush (PipeDream-flush, DAPPLE's early backward): a stage alternates once it is warm.

    F<m>, B<m>: forward and backward of micro-batch m. S = 3, M = 4:

    stage 0  F0 F1 F2       B0 F3 B1    B2    B3
    stage 1     F0 F1    B0 F2 B1 F3 B2    B3
    stage 2        F0 B0 F1 B1 F2 B2 F3 B3

min(S - s, M) micro-batches are in flight on stage s.
"""

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules.schedule import Schedule


def one_f_one_b(stages: int, microbatches: int) -> TaskLists:
    """The task lists of 1F1B.

    >>> from jvpipe.ir.task import text
    >>> text(one_f_one_b(2, 3)[0])
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    return tuple(_stage(s, min(stages - s, microbatches), microbatches) for s in range(stages))


def _stage(s: int, warm: int, microbatches: int) -> tuple[Task, ...]:
    forwards = [Task(s, Kind.F, m) for m in range(microbatches)]
    backwards = [Task(s, Kind.B, m) for m in range(microbatches)]
    steady = [task for pair in zip(backwards, forwards[warm:], strict=False) for task in pair]
    return (*forwards[:warm], *steady, *backwards[microbatches - warm :])


ONE_F_ONE_B = Schedule(name="1f1b", lists=one_f_one_b)
