"""1F1B with a flush (PipeDream-flush, DAPPLE): forwards first, then backwards and forwards in turn.

F<m> and B<m> are the forward and the backward of micro-batch m. In the drawing a column is one unit
of time, and each task takes one unit. With S = 3 stages and M = 4 micro-batches:

    stage 0  F0 F1 F2       B0 F3 B1    B2    B3
    stage 1     F0 F1    B0 F2 B1 F3 B2    B3
    stage 2        F0 B0 F1 B1 F2 B2 F3 B3

On stage s, at most min(S - s, M) micro-batches are in flight: their forward has run there, and
their backward has not. The "eager" variant (DAPPLE's policy B) has 2 (S - s) - 1 in flight. With
it, sends cost no time in the long run if a send takes at most half as long as a forward plus a
backward.

Let K[s] be the most micro-batches in flight on stage s, and let F, B and c be the seconds of a
forward, of a backward and of a send. During a round trip from stage a to stage b and back,
stage a can start at most K[a] - K[b] + 1 micro-batches. So in the long run a micro-batch
takes the maximum, over stages a <= b, of

    ((b - a + 1) (F + B) + 2 c (b - a)) / (K[a] - K[b] + 1)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules.schedule import Schedule, check_count, numbers_of
from jvpipe.util.given import checked_flag


def one_f_one_b(stages: int, microbatches: int) -> TaskLists:
    """Makes the task lists of 1F1B.

    >>> from jvpipe.ir.task import text
    >>> text(one_f_one_b(2, 3)[0])
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    return limited(range(stages, 0, -1), microbatches)


def limited(limits: Sequence[int], microbatches: int) -> TaskLists:
    """Makes the lists of stages with at most `limits[s]` micro-batches in flight on stage s."""
    lists = []
    for s, limit in enumerate(limits):
        forwards = [Task(s, Kind.F, m) for m in range(microbatches)]
        backwards = [Task(s, Kind.B, m) for m in range(microbatches)]
        lists.append(device_list(forwards, backwards, limit - 1))
    return tuple(lists)


def device_list(
    forwards: Sequence[Task],
    backwards: Sequence[Task],
    warm: int,
    halves: Sequence[Task | None] = (),
) -> tuple[Task, ...]:
    """Makes a device's list: `warm` forwards, then the kinds in turn, until all tasks have run.

    Args:
        forwards: the forwards of the device, in order.
        backwards: its backwards, whole or first halves.
        warm: the number of forwards before the first turn.
        halves: its second halves, with None for each turn in which none runs yet.
    """
    turns = zip_longest(forwards[warm:], backwards, halves)
    tasks = chain(forwards[:warm], *turns)
    return tuple(task for task in tasks if task)


@dataclass(frozen=True)
class EagerLists:
    """The lists of `OneFOneB`.

    `most` is the largest number of micro-batches in flight on each device. By default, it is
    2 (S - d) - 1 on device d of S.

    >>> from jvpipe.ir.task import text
    >>> text(EagerLists()(2, 4)[0]), text(EagerLists((2, 1))(2, 4)[0])
    ('0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3', '0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3')
    """

    most: tuple[int, ...] | None = None

    def __call__(self, devices: int, microbatches: int) -> TaskLists:
        """Makes a list per device."""
        if self.most is None:
            return limited(range(2 * devices - 1, 0, -2), microbatches)
        check_count("most", self.most, devices)
        return limited(self.most, microbatches)


class OneFOneB(Schedule):
    """The schedule of 1F1B with a chosen number of micro-batches in flight on each device.

    More micro-batches in flight hide the time of sends, but take more memory. With `eager`, device
    d of S has at most 2 (S - d) - 1 in flight; with `most`, device d has at most `most[d]`. Without
    these two options, the schedule is plain 1F1B.

    >>> OneFOneB(eager=True).name, OneFOneB(most=[3, 2, 1]).name
    ('1f1b-eager', '1f1b-most-3-2-1')
    """

    def __init__(self, *, eager: bool = False, most: Sequence[int] | None = None) -> None:
        checked_flag("eager", eager)
        most = numbers_of("most", most)
        if eager and most is not None:
            raise ValueError(
                "eager=True chooses 2 (S - d) - 1 micro-batches in flight for device d, and "
                f"most={list(most)} chooses other numbers: give only one of the two"
            )
        # If a device has fewer micro-batches in flight than the next device, the next device waits.
        # The 1 at the end stands for the least that the last device may have.
        if most is not None and (not most or any(a < b for a, b in pairwise((*most, 1)))):
            raise ValueError(
                f"most={list(most)} must not rise from one device to the next, which would then "
                "wait, and every number must be at least 1"
            )
        name = "1f1b-eager" if eager else "1f1b"
        if most is not None:
            name = "-".join(["1f1b-most", *map(str, most)])
        lists = EagerLists(most) if eager or most is not None else one_f_one_b
        super().__init__(name=name, lists=lists)


ONE_F_ONE_B = Schedule(name="1f1b", lists=one_f_one_b)
