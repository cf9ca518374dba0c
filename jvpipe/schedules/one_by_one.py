"""The schedule with one micro-batch in flight: the slowest schedule, with the least memory.

Each micro-batch passes all stages forward and then backward before the next one begins. F<m> and
B<m> are the forward and the backward of micro-batch m. A column is one unit of time. With S = 3
stages and M = 2 micro-batches:

    stage 0  F0             B0 F1             B1
    stage 1     F0       B0       F1       B1
    stage 2        F0 B0             F1 B1

Planners use it to find the smallest memory limit that a pipeline can keep. Under every schedule, a
micro-batch that reaches the last stage is in flight on all stages at once. Here no other
micro-batch is in flight. No schedule takes longer, because here only one task runs at a time.
"""

from dataclasses import dataclass
from itertools import product

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class OneByOneLists:
    """The lists of `one_by_one`, with stages on the same devices as under the schedule `placed`.

    >>> from jvpipe.ir.task import text
    >>> from jvpipe.schedules import find_schedule
    >>> text(OneByOneLists(find_schedule("interleaved"))(2, 2)[1])
    '1F0 3F0 3B0 1B0 1F1 3F1 3B1 1B1'
    """

    placed: Schedule

    def __call__(self, devices: int, microbatches: int) -> TaskLists:
        """Makes a list per device."""
        lists: list[list[Task]] = [[] for _ in range(devices)]
        stages = range(self.placed.stages_on(devices))
        trip = [(Kind.F, s) for s in stages]
        trip += [(Kind.B, s) for s in reversed(stages)]
        # A micro-batch makes its whole trip before the next one begins.
        for m, (kind, s) in product(range(microbatches), trip):
            lists[self.placed.device_of(s, devices)].append(Task(s, kind, m))
        return tuple(map(tuple, lists))


def one_by_one(placed: Schedule) -> Schedule:
    """Makes the schedule of one micro-batch in flight, over the stages of another schedule.

    Args:
        placed: the other schedule, which says on which devices the stages lie.

    >>> from jvpipe.schedules import find_schedule
    >>> one_by_one(find_schedule("v-half")).held(2, 3)
    ((((1, 0), (1, 0)),), (((1, 0), (1, 0)),))
    """
    lists = OneByOneLists(placed)
    return Schedule(name="one by one", lists=lists, chunks=placed.chunks, vee=placed.vee)
