"""Interleaved 1F1B: each device runs several chunks (stages), with whole or split backwards.

F<m> and B<m> are the forward and the backward of micro-batch m. Small letters stand for the
device's second chunk. In the drawings a column is one unit of time, and each task takes one unit.
With S = 3 devices, M = 3 micro-batches and v = 2 chunks per device:

    device 0  F0 F1 F2 f0 f1 f2       b0    b1    b2 B0 B1 B2
    device 1     F0 F1 F2 f0 f1 f2 b0    b1    b2 B0 B1 B2
    device 2        F0 F1 F2 f0 b0 f1 b1 f2 b2 B0 B1 B2

zb-h1 has one chunk per device, and backwards in two halves, I<m> and W<m>. With S = 3 and M = 4:

    device 0  F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
    device 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    device 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

Micro-batches pass the chunks in rounds. If M >= S, a round has at least S micro-batches, so that no
device has to wait for the round's first micro-batch to come back from the last device. There are as
many rounds as possible, and their sizes differ by at most one. Let F be the seconds of the forwards
of one micro-batch on all chunks of a device, and B those of its backwards. Then for every M >= S a
step with whole backwards takes (M + (S - 1) / v) (F + B). On each stage backwards run in ascending
order of micro-batches, as under every other schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from jvpipe.ir.kinds import Kind
from jvpipe.ir.plan import MOST_LAYERS
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules.one_f_one_b import device_list
from jvpipe.schedules.schedule import Schedule, at_least, check_count, numbers_of
from jvpipe.util.given import checked_flag


@dataclass(frozen=True)
class InterleavedLists:
    """The lists of `Interleaved`, which has the same options.

    >>> from jvpipe.ir.task import text
    >>> text(InterleavedLists(chunks=2)(2, 2)[1])
    '1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1'
    """

    chunks: int = 1
    split: bool = False
    late: tuple[int, ...] | None = None

    def __call__(self, devices: int, microbatches: int) -> TaskLists:
        """Makes a list per device."""
        if self.late is not None:
            check_count("late", self.late, devices)
        late = self.late or range(devices)
        lists = [self._device(d, devices, microbatches, late[d]) for d in range(devices)]
        return tuple(lists)

    def _device(
        self,
        d: int,
        devices: int,
        microbatches: int,
        late: int,
    ) -> tuple[Task, ...]:
        """Makes the list of a device: some forwards, then one forward and one backward in turn.

        Args:
            d: the number of the device.
            devices: the number of devices.
            microbatches: the number of micro-batches.
            late: if backwards are split, how many later first halves run before a second half.
        """
        count = max(1, microbatches // devices)
        rounds = [part.tolist() for part in np.array_split(range(microbatches), count)]
        passes = [(c, m) for batch in rounds for c, m in product(range(self.chunks), batch)]
        # If a user gives 0 for a device in `late`, the device runs whole backwards.
        split = self.split and (late > 0 or self.late is None)
        kind = Kind.I if split else Kind.B
        last = self.chunks - 1  # backwards pass the chunks from the last to the first
        forwards = [Task(c * devices + d, Kind.F, m) for c, m in passes]
        backwards = [Task((last - c) * devices + d, kind, m) for c, m in passes]
        halves: list[Task | None] = []
        if split:
            halves += [None] * min(late, len(passes))
            halves += [task._replace(kind=Kind.W) for task in backwards]
        # The first backward belongs to the last chunk, so the whole first round passes all earlier
        # chunks before it. In the last chunk, micro-batch 0 goes through the later devices and comes
        # back. While it goes there, this device runs other forwards. With several chunks and whole
        # backwards, it also runs other forwards while micro-batch 0 comes back.
        hops = devices - 1 - d
        warm = last * len(rounds[0]) + hops
        if self.chunks > 1 and not self.split:
            warm += hops
        return device_list(forwards, backwards, warm, halves)


class Interleaved(Schedule):
    """The schedule of 1F1B over several chunks per device.

    Device d of S, counted from 0, has the stages d, d + S, and so on. With `split` a backward runs
    in two halves. On device d, the second half runs after the first halves of `late[d]` later
    backwards. If a user gives 0 for a device, the device runs whole backwards. By default,
    `late[d]` is d.

    >>> Interleaved(chunks=4).name, Interleaved(chunks=1, split=True).name, Interleaved(split=True, late=(0, 1)).name
    ('interleaved-4', 'zb-h1', 'interleaved-split-late-0-1')
    """

    def __init__(
        self,
        *,
        chunks: int = 2,
        split: bool = False,
        late: Sequence[int] | None = None,
    ) -> None:
        checked_flag("split", split)
        at_least(1, chunks=chunks)
        if chunks > MOST_LAYERS:
            raise ValueError(f"chunks={chunks} is more than any model has layers: use 2 or 4")
        late = numbers_of("late", late)
        if late is not None and not split:
            raise ValueError(f"late={late} delays second halves of backwards: add split=True")
        words = ["interleaved"]
        if chunks != 2:
            words.append(str(chunks))
        if split:
            words.append("split")
        if split and chunks == 1:
            words = ["zb-h1"]
        if late is not None:
            words += ["late", *map(str, late)]
        lists = InterleavedLists(chunks, split, late)
        super().__init__(name="-".join(words), lists=lists, chunks=chunks)


class ZBH1(Interleaved):
    """The schedule ZB-H1 (Zero Bubble, ICLR 2024): 1F1B whose second halves fill the drain.

    >>> ZBH1() == ZBH1(), ZBH1(late=[0, 0]).name
    (True, 'zb-h1-late-0-0')
    """

    def __init__(self, *, late: Sequence[int] | None = None) -> None:
        super().__init__(chunks=1, split=True, late=late)
