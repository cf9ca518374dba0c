"""Which cuts can matter: those that stages reach from the left and from the right, none slower than a cap.

Legend: T is the cap in seconds. left[s] is the last cut that s stages can reach, each in at most T seconds and within
the limit; right[s] the first from which the stages from s on can reach the end. A plan that keeps the cap has bound s
in [right[s], left[s]]: near the least T these windows are short. A reach is bounded by the lower bounds of
`dual_bounds.py` with what only grows with the segment: under each pair of prices what a stage pays is a sum over its
layers, none below 0, so that how far it goes is found in the sums over the first layers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from jvpipe.planners.joint.dual_bounds import DualBounds, Pricing
from jvpipe.planners.joint.effort import CUTS
from jvpipe.planners.model.segments import Cuts, OverJ, Segments, sums
from jvpipe.util.sizes import MOST_BYTES

Prices = tuple[float, float]
BYTES_ALONE = (0.0, 1.0)
"""Prices of seconds and bytes that count bytes alone."""
ROUNDING_BYTES = 0.5
"""Sums of bytes are rounded by less."""


@dataclass(frozen=True, eq=False)
class Reach:
    """How far stages reach; `prices[s]` are prices of seconds and bytes that bound stage s well."""

    pricing: Pricing
    prices: tuple[tuple[Prices, ...], ...]
    known: dict[tuple[int, Prices], OverJ] = field(default_factory=dict)

    @staticmethod
    def of(pricing: Pricing, rounds: int = 2) -> "Reach":
        """With prices found where the stages of the least cap are, again and again."""
        stages = pricing.segments.problem.stages
        reach = Reach(pricing, ((),) * stages)
        for _ in range(rounds if pricing.limit_bytes < MOST_BYTES else 0):
            windows = reach.windows(reach.least_cap_s(CUTS.prices_tolerance))
            best = reach._best_prices([int(cuts[len(cuts) // 2]) for cuts in windows])
            prices = tuple((*old, new) for old, new in zip(reach.prices, best, strict=True))
            reach = Reach(pricing, prices, reach.known)
        return reach

    def _best_prices(self, bounds: Sequence[int]) -> list[Prices]:
        segments = self.pricing.segments
        asked = []
        for s, (i, j) in enumerate(pairwise(bounds)):
            static = segments.of(s).static_bytes(s)
            compute_s = segments.compute_of(s)
            room = self._room_bytes(s) - float(static[j] - static[i])
            work_s = float(compute_s[j] - compute_s[i])
            asked.append(self.pricing.at(s).relaxed((s, i, j), room, work_s, 0.0))
        return DualBounds(asked).solve()

    def _room_bytes(self, s: int) -> float:
        return self.pricing.limit_bytes - self.pricing.segments.problem.less_bytes(s)

    def least_cap_s(self, tolerance: float = 1e-4) -> float:
        """The least cap under which the last layer can be reached, nearly: no plan's slowest stage is faster."""
        # A larger cap reaches further, so the least one is found by halving. No cap is below the
        # longest layer, or below what the slowest stage takes of an even division.
        segments = self.pricing.segments
        low = max(float(np.diff(segments.least_compute_s).max(initial=0.0)), segments.share_s)
        if self.left(low)[-1] == segments.n:
            return low
        high = 2 * low
        # Where the limit alone keeps the end out of reach no cap would do.
        while high < 1e9 * low and self.left(high)[-1] < segments.n:
            low, high = high, 2 * high
        while high - low > tolerance * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.left(middle)[-1] == segments.n else (middle, high)
        return high

    def windows(self, cap_s: float) -> list[Cuts]:
        """Each bound's cuts under a cap; at least one each, also if the end cannot be reached."""
        cuts = self.pricing.segments.cuts
        stages = self.pricing.segments.problem.stages
        # A bound beyond `left` makes one of the stages before it too slow or too full, one before
        # `right` one of the stages after it.
        left = self.left(cap_s)
        right = self.right(cap_s)
        windows = []
        for s in range(stages + 1):
            first = max(int(np.searchsorted(cuts, right[s])), s)
            last = min(int(np.searchsorted(cuts, left[s], "right")), len(cuts) - (stages - s))
            windows.append(cuts[first:last] if first < last else cuts[max(last - 1, s) :][:1])
        return windows

    def left(self, cap_s: float) -> list[int]:
        """The last cut that so many stages reach from the first layer."""
        # Going as far as possible is best for each stage: a segment that begins later pays no more.
        cuts = self.pricing.segments.cuts
        reached = [0]
        for s in range(self.pricing.segments.problem.stages):
            ends = (
                np.searchsorted(paid, paid[reached[-1]] + limit, "right") - 1
                for paid, limit in self._paid(s, cap_s)
            )
            reached.append(int(cuts[np.searchsorted(cuts, min(ends), "right") - 1]))
        return reached

    def right(self, cap_s: float) -> list[int]:
        """The first cut from which the stages from s on reach the end."""
        cuts = self.pricing.segments.cuts
        reached = [self.pricing.segments.n]
        for s in reversed(range(self.pricing.segments.problem.stages)):
            begins = (
                np.searchsorted(paid, paid[reached[-1]] - limit)
                for paid, limit in self._paid(s, cap_s)
            )
            reached.append(int(cuts[np.searchsorted(cuts, max(begins))]))
        return reached[::-1]

    def _paid(self, s: int, cap_s: float) -> Iterator[tuple[OverJ, float]]:
        """Yields what the first layers pay on a stage under each of its prices, and the most that it may pay."""
        yield self.pricing.segments.compute_of(s), cap_s * (1 + 1e-12)
        if self.pricing.limit_bytes < MOST_BYTES:
            yield self._sums(s, BYTES_ALONE), self._room_bytes(s) + ROUNDING_BYTES
            for prices in self.prices[s]:
                yield self._sums(s, prices), cap_s * (1 + 1e-9) + prices[1] * self._room_bytes(s)

    def _sums(self, s: int, prices: Prices) -> OverJ:
        if (s, prices) not in self.known:
            pricing, (alpha, mu) = self.pricing.at(s), prices
            extra_s, link_s, held_bytes = pricing.table(s, slice(None))
            # Each layer pays for its cheapest choice at least, so sums of these bound what any choices pay.
            there = np.isfinite(extra_s)
            seconds = alpha * np.where(there, extra_s, 0.0) + (1 - alpha) * (alpha > 0) * link_s
            least = np.where(there, seconds + mu * held_bytes, np.inf).min(1)
            fixed = alpha * pricing.segments.compute_of(s) + mu * pricing.segments.static_bytes(s)
            self.known[s, prices] = sums(np.where(np.isfinite(least), least, 0.0)) + fixed
        return self.known[s, prices]


def area(windows: Sequence[Cuts]) -> int:
    """The number of cells between windows."""
    return sum(len(a) * len(b) for a, b in pairwise(windows))


def _evenly(cuts: Cuts, count: int) -> Cuts:
    """So many of the cuts, evenly spread."""
    return cuts[np.unique(np.linspace(0, len(cuts) - 1, min(len(cuts), count)).astype(int))]


def bounded(
    windows: Sequence[Cuts],
    cells: int = CUTS.spread_cells,
    narrow: Callable[[Cuts, int], Cuts] = _evenly,
) -> list[Cuts]:
    """Windows with fewer cuts if there are too many cells between them.

    Args:
        windows: of each bound.
        cells: between them, at most.
        narrow: keeps so many of some cuts.
    """
    thinned = list(windows)
    count = max(map(len, windows))
    while area(thinned) > cells and count > 2:
        count = count * 4 // 5
        thinned = [narrow(cuts, count) for cuts in windows]
    return thinned


def spread(segments: Segments, cells: int) -> list[Cuts]:
    """Each bound's cuts within some stages of its even share of the seconds, thinned out to so many cells in all."""
    stages, total = segments.problem.stages, segments.compute_s
    mean_s = float(total[-1]) / stages
    windows = []
    for s, cuts in enumerate(segments.windows):
        near = cuts[np.abs(total[cuts] - s * mean_s) <= CUTS.spread_stages * mean_s]
        windows.append(near if len(near) else cuts[np.abs(total[cuts] - s * mean_s).argmin()][None])
    return bounded(windows, cells, lambda cuts, count: _narrow(segments, cuts, count))


def _narrow(segments: Segments, cuts: Cuts, count: int) -> Cuts:
    """So many of the cuts: of each of as many parts of the seconds between them, the one that fewest bytes cross."""
    if len(cuts) <= count:
        return cuts
    total = segments.compute_s[cuts]
    part = np.minimum(
        (total - total[0]) / max(total[-1] - total[0], 1e-300) * count, count - 1
    ).astype(int)
    order = np.lexsort((segments.crossing_bytes[cuts], part))
    first = np.flatnonzero(np.diff(part[order], prepend=-1))
    return np.sort(cuts[order[first]])
