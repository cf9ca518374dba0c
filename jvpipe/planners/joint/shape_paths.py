"""Finds shapes and their cuts together, for one micro-batch size and one order of devices.

Legend: H_e(i, m) is the best way found to put the layers from cut i on into e stages on the last m
devices of an order: counted from the end, so that a stage's micro-batches in flight are known. m
tells where a stage lies, hence its links. t seconds of a stage on r of them, c of the link behind
it, A of its all-reduce; M micro-batches.

    sum     of H_e(i, m) = min over j, r of
                           t(i, j, r) + A(i, j, r, m) + c + sum of H_(e-1)(j, m - r)
    slowest of H_e(i, m) = max of t, c and the slowest of H_(e-1)(j, m - r)

The best is of the least sum + (M - 1) max(slowest, floor): a path is not preferred for being below
a floor that the stages before it have anyway. Only the part of A counts that the least backward
before i does not hide. One way is kept for each (e, i, m), so it is not exact, and what segments
take is counted roughly (`local_segments.py`): every way is counted again (`stage_cost.py`) and
simulated.
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
    """What is searched: micro-batches of a size, an order of devices in units, replica counts, and
    places to cut.
    """

    segments: LocalSegments
    size: int
    order: tuple[int, ...]
    counts: tuple[int, ...]
    cuts: Cuts
    unit: int = 1

    @property
    def places(self) -> int:
        """How many m there are."""
        return len(self.order) // self.unit + 1

    def here(self, grid: Grid) -> Grid:
        """Picks what is between the places to cut, of a grid of all coarse cuts."""
        at = np.searchsorted(self.segments.coarse, self.cuts)
        return grid[at[:, None], at]

    def devices(self, m: int, replicas: int) -> tuple[int, ...]:
        """Returns so many devices from the last m units on."""
        start = len(self.order) - m * self.unit
        return self.order[start : start + replicas]

    @cached_property
    def crossing_bytes(self) -> Grid:
        """What each segment receives and returns of a micro-batch."""
        return self.here(self.segments.crossing_bytes(self.size))

    @cached_property
    def shown_s(self) -> list[Float[np.ndarray, "n n m"]]:
        """A for each replica count, as far as it shows."""
        segments = self.segments
        reducing = segments.shapes.cluster.reducing
        shares = [segments.share(self.size, r) for r in self.counts]
        _, backward_s = segments.layer_s(shares[-1])
        hidden_s = sums(backward_s)[self.cuts][:, None]
        every = []
        for r, b in zip(self.counts, shares, strict=True):
            links = [reducing(self.devices(m, r)) for m in range(self.places)]
            # Many places reduce over links that are alike: each kind is counted once.
            shown_s = {}
            for link in links:
                if link not in shown_s:
                    reduce_s = self.here(segments.reduce_s(b, link))
                    shown_s[link] = np.maximum(reduce_s - hidden_s, 0)
            every.append(np.stack([shown_s[link] for link in links], axis=-1))
        return every

    @cached_property
    def ways_s(self) -> tuple[Float[np.ndarray, "m k k"], Float[np.ndarray, "m k k"]]:
        """Latency and seconds of a byte, both ways, behind a stage at m, by both stages' counts."""
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
    """H_e: rows i, columns m; infinite where there is none. It begins with a stage of the `kth`
    count, up to `cut`.
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
        ground: what is searched.
        stages: how many there may be.
        floor_s: seconds that the slowest stage may take anyway.
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
    """Finds the ways of e stages, from those of one less."""
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
        # Infinite seconds times zero micro-batches are not a number.
        period_s = np.minimum(np.maximum(slowest_s, floor_s), 1e300)
        key_s = sum_s + rest * period_s
        cut = key_s.argmin(1)
        at_cut = cut[:, None]
        ways = (np.take_along_axis(x, at_cut, 1)[:, 0] for x in (key_s, sum_s, slowest_s))
        new = (*ways, np.full_like(cut, k), cut)
        # One way stays for each place and number of devices left: the best by its key, of all
        # counts so far.
        better = new[0] < best.key_s[:, m]
        for old, found in zip(best, new, strict=True):
            np.copyto(old[:, m], found, where=better)
    return best


def _path(ground: Ground, levels: Sequence[_Ways], m: int) -> Path:
    """Makes the shape and the bounds of the last level's way for the whole model."""
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
