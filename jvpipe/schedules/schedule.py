"""A schedule: the order of tasks on each stage, and what that order costs in memory."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from jvpipe.ir.task import TaskLists


def one_version(stage: int, stages: int) -> int:
    """Parameters that are updated only when nothing is in flight."""
    return 1


@dataclass(frozen=True)
class Schedule:
    """A family of task lists.

    `lists` makes them for a number of stages and micro-batches: of a step if the schedule is `synchronous`, of a
    whole stream with its warm-up and drain if it is not. `versions` are the versions of its parameters that a stage
    (counted from 0) holds.
    """

    name: str
    lists: Callable[[int, int], TaskLists]
    synchronous: bool = True
    versions: Callable[[int, int], int] = one_version

    def in_flight(self, stages: int, microbatches: int) -> tuple[int, ...]:
        """The most micro-batches between their forward and their backward, on each stage; counted from the lists.

        >>> from jvpipe.schedules import find_schedule
        >>> find_schedule("1f1b").in_flight(3, 8), find_schedule("gpipe").in_flight(3, 8)
        ((3, 2, 1), (8, 8, 8))
        """
        return _in_flight(self.lists, stages, microbatches if self.synchronous else max(microbatches, 2 * stages))


@lru_cache(maxsize=256)
def _in_flight(lists: Callable[[int, int], TaskLists], stages: int, microbatches: int) -> tuple[int, ...]:
    steps = {"F": 1, "B": -1}
    return tuple(max(accumulate(steps.get(task.kind, 0) for task in tasks)) for tasks in lists(stages, microbatches))
