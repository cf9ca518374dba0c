"""Finds shapes and their cuts together, for one micro-batch size and one order of devices.

A way H_e(i, m) puts the layers from cut i on into e stages, on the last m devices of the order. Its
first stage has the layers from i to j on r devices; the rest of the way is H_(e-1)(j, m - r).
Stages are added from the last to the first, so that a stage's distance from the end, and with it
its micro-batches in flight, is known when it is added. Its devices, and so its links, follow from
m and r. In seconds, t is what the first stage takes per micro-batch, c what the link after it takes
in both directions, and A what shows of its all-reduce. M is the number of micro-batches.

    sum of H_e(i, m)     = t(i, j, r) + A(i, j, r, m) + c + sum of H_(e-1)(j, m - r)
    slowest of H_e(i, m) = max(t, c, slowest of H_(e-1)(j, m - r))

Of all j and r, the way with the least

    sum + (M - 1) max(slowest, floor)

is kept, one for each (e, i, m). The floor is a number of seconds that stages before i may take
anyway, so that it is worth nothing to be below it. A counts the part of the all-reduce that is not
hidden by the backwards of the layers before i, at their shortest.

The search is not exact: one way is kept for each (e, i, m), and seconds are rough
(`local_segments.py`). The paths it finds are counted again exactly (`stage_cost.py`) and simulated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.segments import Cuts, Grid, sums
from jvpipe.planners.model.shapes import Path, Shape

OverM = Float[np.ndarray, "n m"]


@dataclass(frozen=True)
class Ground:
    """The ground that paths are searched on.

    Attributes:
        segments: with the rough seconds.
        size: examples of a micro-batch.
        order: of the devices.
        counts: the numbers of devices that a stage may have.
        cuts: where stages may begin or end.
        unit: how many devices are counted as one: m of the legend counts units.
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
        """The bytes that each segment receives and returns of a micro-batch."""
        return self.here(self.segments.crossing_bytes(self.size))

    @cached_property
    def shown_s(self) -> list[Float[np.ndarray, "n n m"]]:
        """A of the legend, for each number of replicas."""
        segments = self.segments
        reducing = segments.shapes.cluster.reducing
        shares = [segments.share(self.size, r) for r in self.counts]
        _, backward_s = segments.layer_s(shares[-1])
        hidden_s = sums(backward_s)[self.cuts][:, None]
        every = []
        for r, b in zip(self.counts, shares, strict=True):
            links = [reducing(self.devices(m, r)) for m in range(self.places)]
            # Many m lead to equal links for the all-reduce: each different link is counted once.
            shown_s = {}
            for link in links:
                if link not in shown_s:
                    reduce_s = self.here(segments.reduce_s(b, link))
                    shown_s[link] = np.maximum(reduce_s - hidden_s, 0)
            every.append(np.stack([shown_s[link] for link in links], axis=-1))
        return every

    @cached_property
    def ways_s(self) -> tuple[Float[np.ndarray, "m k k"], Float[np.ndarray, "m k k"]]:
        """The latency, in both directions, and the seconds of a byte of the link after a stage.

        Indices are m, the number of replicas of the stage, and that of the stage after it.
        """
        way = self.segments.shapes.cluster.way
        kinds = len(self.counts)
        latency_s = np.zeros((self.places, kinds, kinds))
        byte_s = np.zeros_like(latency_s)
        for m in range(self.places):
            for k, r in enumerate(self.counts):
                behind = m - r // self.unit
                for after, readers in enumerate(self.counts):
                    if behind * self.unit >= readers:
                        link = way(self.devices(m, r), self.devices(behind, readers))
                        latency_s[m, k, after] = 2 * link.latency_s
                        byte_s[m, k, after] = 1 / link.bytes_per_s
        return latency_s, byte_s


class _Ways(NamedTuple):
    """The ways of e stages: rows are i, columns are m; `key_s` is infinite if there is no way.

    `key_s` is the number by which ways are chosen. The first stage of a way ends at `cut` and has
    the `kth` number of replicas.
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
        return _Ways(
            key_s=np.full(shape, np.inf),
            sum_s=np.full(shape, np.inf),
            slowest_s=np.zeros(shape),
            kth=np.zeros(shape, dtype=int),
            cut=np.zeros(shape, dtype=int),
        )


def paths(
    ground: Ground,
    stages: int,
    floor_s: float,
) -> Iterator[Path]:
    """Yields the best way found for each number of stages.

    Args:
        ground: that is searched.
        stages: the most stages of a path.
        floor_s: seconds of a stage below which a faster stage is worth nothing.
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
    """Finds the ways of e stages from the ways of e - 1 stages."""
    best = _Ways.none(*after.sum_s.shape)
    replicas = ground.segments.pins.replicas
    rows = np.arange(len(ground.cuts))[:, None]
    rest = ground.segments.shapes.batch // ground.size - 1
    for k, r in enumerate(ground.counts):
        units = r // ground.unit
        if units >= ground.places or (replicas and r != replicas[-e]):
            continue
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
        behind_s = np.maximum(after.slowest_s[:, behind], c)
        slowest_s = np.maximum(t, behind_s)
        # `rest` may be 0, and 0 times infinity is not a number.
        period_s = np.minimum(np.maximum(slowest_s, floor_s), 1e300)
        key_s = sum_s + rest * period_s
        cut = key_s.argmin(1)
        at_cut = cut[:, None]
        ways = (np.take_along_axis(x, at_cut, 1)[:, 0] for x in (key_s, sum_s, slowest_s))
        new = (*ways, np.full_like(cut, k), cut)
        # One way stays for each i and m: the best by its key, over the replica counts so far.
        better = new[0] < best.key_s[:, m]
        for old, found in zip(best, new, strict=True):
            np.copyto(old[:, m], found, where=better)
    return best


def _path(ground: Ground, levels: Sequence[_Ways], m: int) -> Path:
    """Makes the shape and the bounds of the last level's way from cut 0 on m units."""
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
