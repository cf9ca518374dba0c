"""Finds the cuts that can matter: those that stages under a cap reach from both ends.

Legend: T is the cap, the most seconds that any stage may take. left[s] is the last cut that the
first s stages can reach, each in at most T seconds and within the memory limit. right[s] is the
first cut from which the stages from s on can reach the end. A plan that keeps the cap has bound s
in the window [right[s], left[s]]. If T is near the least possible cap, windows are short.

How far a stage reaches is bounded by the lower bounds of `dual_bounds.py`, of which only the terms
are used that grow with the segment. Under given prices of seconds and bytes, what a stage pays is
then a sum over its layers of numbers that are not negative. So the farthest end is found by
bisection in prefix sums.
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
"""More than the rounding error of a sum of bytes, and less than a byte."""


@dataclass(frozen=True, eq=False)
class Reach:
    """How far stages reach; `prices[s]` are prices that bound the seconds of stage s well.

    `known` are the prefix sums that were made so far.
    """

    pricing: Pricing
    prices: tuple[tuple[Prices, ...], ...]
    known: dict[tuple[int, Prices], OverJ] = field(default_factory=dict)

    @staticmethod
    def of(pricing: Pricing, rounds: int = 2) -> "Reach":
        """Makes a reach with good prices: those that are best for the middles of narrow windows.

        Each round finds the windows of the least cap under the prices so far, and adds prices.
        """
        stages = pricing.segments.problem.stages
        reach = Reach(pricing, ((),) * stages)
        for _ in range(rounds if pricing.limit_bytes < MOST_BYTES else 0):
            cap_s = reach.least_cap_s(CUTS.prices_tolerance)
            middles = [int(cuts[len(cuts) // 2]) for cuts in reach.windows(cap_s)]
            best = reach._best_prices(middles)
            prices = tuple((*old, new) for old, new in zip(reach.prices, best, strict=True))
            # Prefix sums under the prices of earlier rounds are used again.
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
        """Finds nearly the least cap under which the last layer is reached.

        The slowest stage of any plan takes at least that long.
        """
        # A larger cap reaches further, so that the least cap is found by halving an interval. No
        # cap is below the longest layer, or below the slowest stage's share of the work.
        segments = self.pricing.segments
        layers_s = np.diff(segments.least_compute_s)
        low = max(float(layers_s.max(initial=0.0)), segments.share_s)
        if self.left(low)[-1] == segments.n:
            return low
        high = 2 * low
        # If the memory limit alone keeps the end out of reach, no cap suffices.
        while high < 1e9 * low and self.left(high)[-1] < segments.n:
            low, high = high, 2 * high
        while high - low > tolerance * high:
            middle = (low + high) / 2
            if self.left(middle)[-1] == segments.n:
                high = middle
            else:
                low = middle
        return high

    def windows(self, cap_s: float) -> list[Cuts]:
        """Lists each bound's cuts under a cap; at least one, even if the end is out of reach."""
        cuts = self.pricing.segments.cuts
        stages = self.pricing.segments.problem.stages
        # A bound beyond `left` makes one of the stages before it too slow or too full. A bound
        # before `right` does so to one of the stages after it.
        left = self.left(cap_s)
        right = self.right(cap_s)
        windows = []
        for s in range(stages + 1):
            # Each stage has a layer, so that s cuts come before bound s, and stages - s after it.
            first = max(int(np.searchsorted(cuts, right[s])), s)
            reached = int(np.searchsorted(cuts, left[s], "right"))
            last = min(reached, len(cuts) - (stages - s))
            if first >= last:
                first = max(last - 1, s)
                last = first + 1
            windows.append(cuts[first:last])
        return windows

    def left(self, cap_s: float) -> list[int]:
        """Finds for s = 0, 1, ... the last cut that the first s stages reach."""
        # Going as far as possible is best for each stage, because the next segment then begins
        # later, and pays no more for the same end.
        cuts = self.pricing.segments.cuts
        reached = [0]
        for s in range(self.pricing.segments.problem.stages):
            begin = reached[-1]
            ends = (
                np.searchsorted(paid, paid[begin] + limit, "right") - 1
                for paid, limit in self._paid(s, cap_s)
            )
            place = np.searchsorted(cuts, min(ends), "right") - 1
            reached.append(int(cuts[place]))
        return reached

    def right(self, cap_s: float) -> list[int]:
        """Finds for s = 0, 1, ... the first cut from which the stages from s on reach the end."""
        cuts = self.pricing.segments.cuts
        reached = [self.pricing.segments.n]
        for s in reversed(range(self.pricing.segments.problem.stages)):
            end = reached[-1]
            begins = (
                np.searchsorted(paid, paid[end] - limit) for paid, limit in self._paid(s, cap_s)
            )
            place = np.searchsorted(cuts, max(begins))
            reached.append(int(cuts[place]))
        return reached[::-1]

    def _paid(self, s: int, cap_s: float) -> Iterator[tuple[OverJ, float]]:
        """Yields for each pair of prices prefix sums of what layers pay, and the most to pay."""
        yield self.pricing.segments.compute_of(s), cap_s * (1 + 1e-12)
        if self.pricing.limit_bytes < MOST_BYTES:
            room_bytes = self._room_bytes(s)
            yield self._sums(s, BYTES_ALONE), room_bytes + ROUNDING_BYTES
            for prices in self.prices[s]:
                limit = cap_s * (1 + 1e-9) + prices[1] * room_bytes
                yield self._sums(s, prices), limit

    def _sums(self, s: int, prices: Prices) -> OverJ:
        if (s, prices) in self.known:
            return self.known[s, prices]
        pricing = self.pricing.at(s)
        segments = pricing.segments
        alpha, mu = prices
        extra_s, link_s, held_bytes = pricing.table(s, slice(None))
        # Each layer pays at least for its cheapest choice, so that sums of cheapest choices bound
        # from below what any choices pay.
        there = np.isfinite(extra_s)
        compute_s = np.where(there, extra_s, 0.0)
        seconds = alpha * compute_s + (1 - alpha) * (alpha > 0) * link_s
        paid = np.where(there, seconds + mu * held_bytes, np.inf)
        least = paid.min(1)
        fixed = alpha * segments.compute_of(s) + mu * segments.static_bytes(s)
        layers = np.where(np.isfinite(least), least, 0.0)
        self.known[s, prices] = sums(layers) + fixed
        return self.known[s, prices]


def area(windows: Sequence[Cuts]) -> int:
    """Counts the cells between windows."""
    return sum(len(a) * len(b) for a, b in pairwise(windows))


def _evenly(cuts: Cuts, count: int) -> Cuts:
    """Picks at most `count` of the cuts, evenly spread."""
    places = np.linspace(
        0,
        len(cuts) - 1,
        min(len(cuts), count),
    )
    return cuts[np.unique(places.astype(int))]


def bounded(
    windows: Sequence[Cuts],
    cells: int = CUTS.spread_cells,
    narrow: Callable[[Cuts, int], Cuts] = _evenly,
) -> list[Cuts]:
    """Thins windows out if they have too many cells (possible stages) between them.

    Args:
        windows: the cuts of each bound.
        cells: the most cells that are allowed.
        narrow: picks a number of some cuts.
    """
    thinned = list(windows)
    count = max(map(len, windows))
    while area(thinned) > cells and count > 2:
        count = count * 4 // 5
        thinned = [narrow(cuts, count) for cuts in windows]
    return thinned


def spread(segments: Segments, cells: int) -> list[Cuts]:
    """Lists each bound's cuts near its even share of the seconds, with at most `cells` cells."""
    total = segments.compute_s
    mean_s = float(total[-1]) / segments.problem.stages
    windows = []
    for s, cuts in enumerate(segments.windows):
        away_s = np.abs(total[cuts] - s * mean_s)
        near = cuts[away_s <= CUTS.spread_stages * mean_s]
        nearest = cuts[away_s.argmin()]
        windows.append(near if len(near) else nearest[None])
    return bounded(windows, cells, lambda cuts, count: _narrow(segments, cuts, count))


def _narrow(segments: Segments, cuts: Cuts, count: int) -> Cuts:
    """Picks at most `count` of the cuts: of each equal part of the seconds between them, one.

    It is the cut that the fewest bytes cross.
    """
    if len(cuts) <= count:
        return cuts
    total = segments.compute_s[cuts]
    passed = total - total[0]
    whole = max(total[-1] - total[0], 1e-300)
    part = np.minimum(passed / whole * count, count - 1).astype(int)
    # Cuts are sorted by part and then by bytes, so that the first cut of each part is picked.
    order = np.lexsort((segments.crossing_bytes[cuts], part))
    first = np.flatnonzero(np.diff(part[order], prepend=-1))
    return np.sort(cuts[order[first]])
