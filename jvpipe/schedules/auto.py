"""The schedule "auto", whose task lists a planner finds; plans hold these lists as text."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

from jvpipe.ir.task import Task, TaskLists, text
from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.schedules.schedule import Schedule

AUTO = Schedule(name="auto", lists=one_f_one_b)
"""The schedule "auto" with the lists of 1F1B, which it has until a planner finds other lists."""


def may_split(schedule: Schedule, devices: int, microbatches: int) -> bool:
    """Tells whether a schedule runs backwards in two halves, or may do so once it is planned.

    Args:
        schedule: the schedule; a planner may give "auto" lists with halves.
        devices: the number of devices that the pipeline passes.
        microbatches: the number of micro-batches of a step.

    >>> may_split(AUTO, 2, 4)
    True
    """
    return schedule == AUTO or schedule.splits(devices, microbatches)


@dataclass(frozen=True)
class GivenLists:
    """The lists of a plan, one per device, for a fixed number of micro-batches."""

    lists: TaskLists

    @cached_property
    def _hash(self) -> int:
        return hash(self.lists)

    def __hash__(self) -> int:
        """Returns the hash of the lists, which is computed once: caches ask for it very often."""
        return self._hash

    def __call__(self, devices: int, microbatches: int) -> TaskLists:
        """Returns the lists; raises ValueError if they are for other devices or micro-batches."""
        count = 1 + max([task.microbatch for task in chain(*self.lists)], default=0)
        if (len(self.lists), count) != (devices, microbatches):
            raise ValueError(
                f"the plan's lists are for {len(self.lists)} devices and {count} micro-batches, "
                f"not for {devices} and {microbatches}: plan again"
            )
        return self.lists


def given_lists(lists: TaskLists) -> Schedule:
    """Makes the schedule of a plan that has its own lists.

    Args:
        lists: the tasks of each device.

    Raises:
        ValueError: the stages lie on the devices neither in a loop (0 1 2 0 1 2) nor there and back
            (0 1 2 2 1 0).

    >>> schedule = given_lists(read_lines(("0F0 3F0 3I0 3W0 0B0", "1F0 2F0 2B0 1B0")))
    >>> schedule.chunks, schedule.vee, schedule.device_of(2, 2)
    (2, True, 1)
    """
    places = {task.stage: d for d, tasks in enumerate(lists) for task in tasks}
    devices, stages = len(lists), 1 + max(places, default=0)
    chunks = max(1, stages // devices)
    # Both ways to place stages are tried; the lines must agree with one of them.
    for vee in (False, True):
        schedule = Schedule(name="auto", lists=GivenLists(lists), chunks=chunks, vee=vee)
        expected = {s: schedule.device_of(s, devices) for s in range(stages)}
        if places == expected and stages % devices == 0:
            return schedule
    raise ValueError(
        f"the plan's lists place stages on devices as {places}: stages must go round the devices "
        "(0 1 2 0 1 2), or there and back (0 1 2 2 1 0)"
    )


@lru_cache(maxsize=8)
def read_lines(lines: tuple[str, ...]) -> TaskLists:
    """Reads task lists from lines of text, as a plan holds them."""
    return tuple(tuple(map(Task.parse, line.split())) for line in lines)


def lines_of(lists: TaskLists) -> tuple[str, ...]:
    """Writes task lists as lines of text, as a plan holds them."""
    return tuple(map(text, lists))
