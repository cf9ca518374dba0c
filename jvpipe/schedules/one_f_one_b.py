"""1F1B with a flush (PipeDream-flush, DAPPLE): forwards first, then backwards and forwards in turn.

F<m> and B<m> are the forward and the backward of micro-batch m. In the drawing a column is one unit
of time, and each task takes one unit. With S = 3 stages and M = 4 micro-batches:

    stage 0  F0 F1 F2       B0 F3 B1    B2    B3
    stage 1     F0 F1    B0 F2 B1 F3 B2    B3
    stage 2        F0 B0 F1 B1 F2 B2 F3 B3

On stage s, at most min(S - s, M) micro-batches are in flight: their forward has run there, and
their backward has not. "Eager" (DAPPLE's policy B) has 2 (S - s) - 1 in flight. Then sends
cost no time in the long run if a send takes at most half as long as a forward plus a backward.

Let K[s] be the most micro-batches in flight on stage s, and let F, B and c be the seconds of a
forward, of a backward and of a send. During a round trip from stage a to stage b and back,
stage a can start at most K[a] - K[b] + 1 micro-batches. So in the long run a micro-batch
takes the maximum, over stages a <= b, of

    ((b - a + 1) (F + B) + 2 c (b - a)) / (K[a] - K[b] + 1)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from jvpipe.ir.kinds import Kind
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules.schedule import Schedule, numbers_of
from jvpipe.util.given import checked_flag


def one_f_one_b(stages: int, microbatches: int) -> TaskLists:
    """Makes the task lists of 1F1B.

    >>> from jvpipe.ir.task import text
    >>> text(one_f_one_b(2, 3)[0])
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    limits = [min(stages - s, microbatches) for s in range(stages)]
    return tuple(_stage(s, warm, microbatches) for s, warm in enumerate(limits))


def _stage(s: int, warm: int, microbatches: int) -> tuple[Task, ...]:
    """Makes a stage's list: `warm` forwards, then B and F in turn, then the remaining B.

    Args:
        s: the stage.
        warm: the number of forwards before the first backward.
        microbatches: the number of micro-batches.
    """
    forwards = [Task(s, Kind.F, m) for m in range(microbatches)]
    backwards = [Task(s, Kind.B, m) for m in range(microbatches)]
    # Each backward makes room for one more forward. The last `warm` backwards have no partner.
    pairs = zip(backwards, forwards[warm:], strict=False)
    steady = chain(*pairs)
    rest = backwards[microbatches - warm :]
    return (*forwards[:warm], *steady, *rest)


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
        limits = self.most
        if limits is None:
            limits = [2 * (devices - d) - 1 for d in range(devices)]
        if len(limits) != devices:
            raise ValueError(
                f"most={limits} names {len(limits)} devices, there are {devices}: "
                "give a number for each"
            )
        warm = [min(limit, microbatches) for limit in limits]
        return tuple(_stage(d, count, microbatches) for d, count in enumerate(warm))


class OneFOneB(Schedule):
    """The schedule of 1F1B with a choice of how many micro-batches are in flight.

    More micro-batches in flight hide sends, and take more memory. With `eager`, device d of
    S has at most 2 (S - d) - 1 in flight; with `most`, device d has at most `most[d]`.
    Without these two options, the schedule is plain 1F1B.

    >>> OneFOneB(eager=True).name, OneFOneB(most=[3, 2, 1]).name
    ('1f1b-eager', '1f1b-most-3-2-1')
    """

    def __init__(self, *, eager: bool = False, most: Sequence[int] | None = None) -> None:
        checked_flag("eager", eager)
        most = None if most is None else numbers_of("most", most)
        if eager and most is not None:
            raise ValueError(
                "eager means 2 (S - d) - 1 micro-batches in flight on device d, "
                f"and most={list(most)} gives other numbers: use one of the two"
            )
        # If a device has fewer micro-batches in flight than the next one, the next one waits.
        rises = most is not None and any(a < b for a, b in pairwise(most))
        if most is not None and (rises or min(most, default=0) < 1):
            raise ValueError(
                f"most={list(most)} must be at least 1, and must not rise from device to device: "
                "the next device would wait"
            )
        words = ["1f1b"]
        if eager:
            words.append("eager")
        if most is not None:
            words += ["most", *map(str, most)]
        lists = EagerLists(most) if len(words) > 1 else one_f_one_b
        super().__init__(name="-".join(words), lists=lists)


ONE_F_ONE_B = Schedule(name="1f1b", lists=one_f_one_b)
