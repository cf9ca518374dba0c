"""Finds shapes and their cuts together, for one micro-batch size and one order of devices.

This is a dynamic program. A way H_e(i, m) divides the layers after cut i into e stages, which have
the last m devices of the order. If its first stage has the layers between cuts i and j on r
devices, the rest of the way is H_(e-1)(j, m - r).

    cuts      0 ....... i ------- j ----------------- end
    devices   ......... [   r    ][      m - r      ]
    stages              [ first  ][      e - 1      ]

Ways grow from the last stage to the first. So the distance of a new stage from the end is known,
which gives its micro-batches in flight; m and r give its devices and so its links. Below, all but M
are seconds:

    M          the number of micro-batches
    t          of the first stage, per micro-batch
    c          of the link after the first stage, in both directions, per micro-batch
    A          by how much the first stage's all-reduce takes longer than the shortest possible
               backwards of the layers before cut i, which run at the same time
    floor      the expected seconds of the stages before cut i: later stages need not be faster

    sum of H_e(i, m)     = t(i, j, r) + A(i, j, r, m) + c + sum of H_(e-1)(j, m - r)
    slowest of H_e(i, m) = max(t, c, slowest of H_(e-1)(j, m - r))

Of all j and r, the way with the least sum + (M - 1) max(slowest, floor) is kept. This is not exact,
because a way that is worse alone may be part of a better path, and because seconds are rough
(`local_segments.py`). So the paths that are found are counted again exactly (`stage_cost.py`) and
simulated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jvpipe.planners.model.grids import sums
from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.shapes import Path, Shape
from jvpipe.planners.model.spans import Cuts, Grid

OverM = Float[np.ndarray, "n m"]


@dataclass(frozen=True)
class Ground:
    """The data for one search for paths: cuts, and devices in an order.

    Attributes:
        segments: the rough seconds and bytes of all segments.
        size: examples of a micro-batch.
        order: the devices, in the order in which micro-batches pass them.
        counts: the possible numbers of devices of a stage, all multiples of `unit`.
        cuts: where stages may begin or end.
        unit: how many devices are placed together. In the module's formulas, m counts units.
    """

    segments: LocalSegments
    size: int
    order: tuple[int, ...]
    counts: tuple[int, ...]
    cuts: Cuts
    unit: int = 1

    @property
    def places(self) -> int:
        """The number of values that m can have: 0 to the number of units."""
        return len(self.order) // self.unit + 1

    def here(self, grid: Grid) -> Grid:
        """Picks the entries between this ground's cuts from a grid of all coarse cuts."""
        at = np.searchsorted(self.segments.coarse, self.cuts)
        return grid[at[:, None], at]

    def devices(self, m: int, replicas: int) -> tuple[int, ...]:
        """Returns the first `replicas` devices of the last m units."""
        start = len(self.order) - m * self.unit
        return self.order[start : start + replicas]

    @cached_property
    def crossing_bytes(self) -> Grid:
        """The bytes of a micro-batch that each segment receives, plus those that it returns."""
        return self.here(self.segments.crossing_bytes(self.size))

    @cached_property
    def shown_s(self) -> list[Float[np.ndarray, "n n m"]]:
        """For each number of replicas, the module's A by i, j and m."""
        segments = self.segments
        reducing = segments.shapes.cluster.reducing
        shares = [segments.share(self.size, r) for r in self.counts]
        _, backward_s = segments.layer_s(shares[-1])
        hidden_s = sums(backward_s)[self.cuts][:, None]
        every = []
        for r, b in zip(self.counts, shares, strict=True):
            links = [reducing(self.devices(m, r)) for m in range(self.places)]
            # Many m have equal links for the all-reduce. The seconds of a link are counted once.
            shown_s = {}
            for link in set(links):
                reduce_s = self.here(segments.reduce_s(b, link))
                shown_s[link] = np.maximum(reduce_s - hidden_s, 0)
            by_m = [shown_s[link] for link in links]
            every.append(np.stack(by_m, axis=-1))
        return every

    @cached_property
    def ways_s(self) -> tuple[Float[np.ndarray, "m k k"], Float[np.ndarray, "m k k"]]:
        """The link after a stage: its latency in both directions, and its seconds per byte.

        Both arrays have three indices: first m, then the position in `counts` of the stage's number
        of replicas, then the position of the next stage's number.
        """
        way = self.segments.shapes.cluster.way
        kinds = len(self.counts)
        latency_s = np.zeros((self.places, kinds, kinds))
        byte_s = np.zeros_like(latency_s)
        numbers = list(enumerate(self.counts))
        for m, (k, r), (after, readers) in product(range(self.places), numbers, numbers):
            behind = m - r // self.unit
            if behind * self.unit >= readers:
                link = way(self.devices(m, r), self.devices(behind, readers))
                latency_s[m, k, after] = 2 * link.latency_s
                byte_s[m, k, after] = 1 / link.bytes_per_s
        return latency_s, byte_s


class _Ways(NamedTuple):
    """The ways of e stages: rows are i, columns are m; `key_s` is infinite if there is no way.

    Ways are compared by their `key_s`. The first stage of a way ends at the cut with index `cut`,
    and has the number of replicas with index `kth`.
    """

    key_s: OverM
    sum_s: OverM
    slowest_s: OverM
    kth: Int[np.ndarray, "n m"]
    cut: Int[np.ndarray, "n m"]

    @staticmethod
    def none(rows: int, columns: int) -> "_Ways":
        """Makes a table without any way."""
        shape = rows, columns
        never_s = np.full(shape, np.inf)
        first = np.zeros(shape, dtype=int)
        return _Ways(never_s, never_s.copy(), np.zeros(shape), first, first.copy())


def paths(
    ground: Ground,
    stages: int,
    floor_s: float,
) -> Iterator[Path]:
    """Yields the best way found for each number of stages.

    Args:
        ground: the cuts and devices of the search.
        stages: the most stages of a path.
        floor_s: the floor of the module.
    """
    levels = [_Ways.none(len(ground.cuts), ground.places)]
    levels[0].sum_s[-1, 0] = 0.0
    asked = ground.segments.pins.count
    for e in range(1, stages + 1):
        longer = _longer(ground, levels[-1], e, floor_s)
        levels.append(longer)
        if not np.isfinite(longer.key_s).any():
            return
        whole_s = longer.key_s[0]  # of the whole model
        if np.isfinite(whole_s).any() and asked in (None, e):
            yield _path(ground, levels, int(whole_s.argmin()))


def _longer(
    ground: Ground,
    after: _Ways,
    e: int,
    floor_s: float,
) -> _Ways:
    """Finds the ways of e stages from those of e - 1 stages (`after`)."""
    best = _Ways.none(*after.sum_s.shape)
    replicas = ground.segments.pins.replicas
    rows = np.arange(len(ground.cuts))[:, None]
    rest = ground.segments.shapes.batch // ground.size - 1
    for k, r in enumerate(ground.counts):
        units = r // ground.unit
        if units >= ground.places or (replicas and r != replicas[-e]):
            continue
        # A way of e stages on m units begins with a stage on `units` of them. On the others it
        # continues with a way of e - 1 stages.
        m = slice(units, None)
        behind = slice(ground.places - units)
        readers = after.kth[:, behind]
        sizes = ground.crossing_bytes[rows, after.cut[:, behind]]
        begins = np.arange(units, ground.places)
        latency_s, byte_s = (way[begins, k, readers] for way in ground.ways_s)
        sends = (sizes > 0) & (e > 1)
        c = np.where(sends, latency_s + sizes * byte_s, 0.0)
        fitting_s = ground.segments.fitting_s(ground.size, r, e)
        t = ground.here(fitting_s)[:, :, None]
        sum_s = t + ground.shown_s[k][:, :, m] + (after.sum_s[:, behind] + c)
        slowest_s = np.maximum(t, np.maximum(after.slowest_s[:, behind], c))
        # The period must be finite, because `rest` may be 0, and 0 times infinity is not a number.
        period_s = np.clip(slowest_s, floor_s, 1e300)
        key_s = sum_s + rest * period_s
        cut = key_s.argmin(1)
        at_cut = cut[:, None]
        numbers = key_s, sum_s, slowest_s
        ways = (np.take_along_axis(x, at_cut, 1)[:, 0] for x in numbers)
        new = (*ways, np.full_like(cut, k), cut)
        # One way stays for each i and m: the best over the numbers of replicas tried so far.
        better = new[0] < best.key_s[:, m]
        for old, found in zip(best, new, strict=True):
            np.copyto(old[:, m], found, where=better)
    return best


def _path(
    ground: Ground,
    levels: Sequence[_Ways],
    m: int,
) -> Path:
    """Makes the path of one way of the last level: the one that has all layers on m units."""
    i = 0
    bounds = [0]
    places = []
    for level in reversed(levels[1:]):
        r = ground.counts[level.kth[i, m]]
        places.append(tuple(sorted(ground.devices(m, r))))
        i = int(level.cut[i, m])
        m = m - r // ground.unit
        bounds.append(int(ground.cuts[i]))
    return Shape(tuple(places), ground.size), tuple(bounds)
