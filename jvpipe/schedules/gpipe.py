"""GPipe: each stage runs all forwards, then all backwards.

F<m> and B<m> are the forward and the backward of micro-batch m. In the drawing a column is one unit
of time, and each task takes one unit. With S = 3 stages and M = 3 micro-batches:

    stage 0  F0 F1 F2             B0 B1 B2
    stage 1     F0 F1 F2       B0 B1 B2
    stage 2        F0 F1 F2 B0 B1 B2

The paper draws backwards in descending order. Here they run in ascending order, so that gradients
are summed in the same order as under every other schedule. On every stage all M micro-batches are
in flight at once, which means that their forward has run and their backward has not.
"""

from jvpipe.ir.task import TaskLists
from jvpipe.schedules.one_f_one_b import limited
from jvpipe.schedules.schedule import Schedule


def gpipe(stages: int, microbatches: int) -> TaskLists:
    """Makes the task lists of GPipe.

    >>> from jvpipe.ir.task import text
    >>> text(gpipe(2, 2)[1])
    '1F0 1F1 1B0 1B1'
    """
    return limited([microbatches] * stages, microbatches)


GPIPE = Schedule(name="gpipe", lists=gpipe)
