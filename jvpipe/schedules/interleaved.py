"""Interleaved 1F1B: each device runs several chunks of layers, with whole or split backwards (zb-h1 is one, split).

    F<m>, B<m>: forward and backward of micro-batch m; small letters: of the device's second chunk. S = 3, M = 3, v = 2,
    a chunk takes half as long as the stages of 1F1B:

    device 0  F0 F1 F2 f0 f1 f2       b0    b1    b2 B0 B1 B2
    device 1     F0 F1 F2 f0 f1 f2 b0    b1    b2 B0 B1 B2
    device 2        F0 F1 F2 f0 b0 f1 b1 f2 b2 B0 B1 B2

    and zb-h1, S = 3, M = 4, I<m>, W<m>: the halves of a backward:

    device 0  F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
    device 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    device 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

Micro-batches pass the chunks in rounds of S to 2S - 1, sizes equal to within one, so that every M >= S takes (M + (S -
1) / v) (F + B). Backwards run in ascending order per stage, as in every other schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from jvpipe.ir.kinds import Kind
from jvpipe.ir.plan import MOST_LAYERS
from jvpipe.ir.task import Task, TaskLists
from jvpipe.schedules.schedule import Schedule, at_least, numbers_of
from jvpipe.util.given import checked_flags

Work = tuple[int, int]  # a chunk and a micro-batch


@dataclass(frozen=True)
class InterleavedLists:
    """The lists of `Interleaved`.

    >>> from jvpipe.ir.task import text
    >>> text(InterleavedLists(chunks=2)(2, 2)[1])
    '1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1'
    """

    chunks: int = 1
    split: bool = False
    late: tuple[int, ...] | None = None

    def __call__(self, devices: int, microbatches: int) -> TaskLists:
        """Makes a list per device."""
        if self.late is not None and len(self.late) != devices:
            raise ValueError(
                f"late={self.late} names {len(self.late)} devices, there are {devices}: give a number each"
            )
        late = range(devices) if self.late is None else self.late
        return tuple(self._device(d, devices, microbatches, late[d]) for d in range(devices))

    def _device(self, d: int, devices: int, microbatches: int, late: int) -> tuple[Task, ...]:
        rounds = _rounds(devices, microbatches)
        forwards = [(chunk, m) for some in rounds for chunk in range(self.chunks) for m in some]
        backwards = [
            (chunk, m) for some in rounds for chunk in reversed(range(self.chunks)) for m in some
        ]
        hops = devices - 1 - d
        warm = (self.chunks - 1) * len(rounds[0]) + (
            2 * hops if self.chunks > 1 and not self.split else hops
        )
        warm = min(warm, len(forwards))
        work = [(Kind.F, one) for one in forwards[:warm]]
        split = self.split and (late > 0 or self.late is None)
        for i, one in enumerate(backwards):
            work += [(Kind.F, one) for one in forwards[warm + i : warm + i + 1]]
            work.append((Kind.I if split else Kind.B, one))
            work += [(Kind.W, backwards[i - late])] if split and i >= late else []
        work += (
            [(Kind.W, one) for one in backwards[max(0, len(backwards) - late) :]] if split else []
        )
        return tuple(Task(chunk * devices + d, kind, m) for kind, (chunk, m) in work)


def _rounds(devices: int, microbatches: int) -> Sequence[range]:
    """Splits micro-batches into as many rounds of at least one per device as there can be, the larger first."""
    count = max(1, microbatches // devices)
    least, more = divmod(microbatches, count)
    ends = accumulate([least + (i < more) for i in range(count)], initial=0)
    return [range(a, b) for a, b in pairwise(ends)]


class Interleaved(Schedule):
    """1F1B over so many chunks per device; the first, the (S + 1)-th ... stage are on the first device.

    With `split` a backward runs in two halves, and the second one comes so many backwards `late`: a number per device,
    counted from 0 (where it is 0 the backward is whole), or None: device d is d late.

    >>> Interleaved(chunks=4).name, Interleaved(chunks=1, split=True).name, Interleaved(split=True, late=(0, 1)).name
    ('interleaved-4', 'zb-h1', 'interleaved-split-late-0-1')
    """

    def __init__(
        self, *, chunks: int = 2, split: bool = False, late: Sequence[int] | None = None
    ) -> None:
        checked_flags(split=split)
        at_least(1, chunks=chunks)
        if chunks > MOST_LAYERS:
            raise ValueError(f"chunks={chunks} are more than a model has layers: use 2 or 4")
        late = None if late is None else numbers_of(0, "late", late)
        if late is not None and not split:
            raise ValueError(f"late={late} is for the second halves of backwards: add split=True")
        name = "interleaved" if chunks == 2 else f"interleaved-{chunks}"
        name = "zb-h1" if split and chunks == 1 else name + "-split" * split
        name += "" if late is None else f"-late-{'-'.join(map(str, late))}"
        super().__init__(name=name, lists=InterleavedLists(chunks, split, late), chunks=chunks)


class ZBH1(Interleaved):
    """ZB-H1 (Zero Bubble, ICLR 2024): 1F1B with backwards in two halves, of which the second ones fill the drain.

    >>> ZBH1() == ZBH1(), ZBH1(late=[0, 0]).name
    (True, 'zb-h1-late-0-0')
    """

    def __init__(self, *, late: Sequence[int] | None = None) -> None:
        super().__init__(chunks=1, split=True, late=late)
