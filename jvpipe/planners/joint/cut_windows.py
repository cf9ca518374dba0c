"""Finds for each bound of the stages the cuts where it can lie if no stage takes longer than a cap.

Legend: T is the cap, in seconds per micro-batch. left[s] is the last cut that the first s
stages can reach if each of them keeps the cap and the memory limit. right[s] is the first
cut from which the stages from s on can reach the end. In any plan that keeps the cap, bound
s lies in the window [right[s], left[s]]. The nearer T is to the least cap that a plan can
keep, the narrower are the windows.

    first layer |------ stages before s ------>| left[s]
                        right[s] |<------ stages from s on ------| last layer
    window of bound s            [-------------]

How far a stage reaches is bounded by prices, as in `dual_bounds.py`. Under given prices a
stage pays for the seconds and the bytes of its layers. A stage that keeps the cap and the
limit pays at most T plus the price of as many bytes as the limit allows. What a layer pays
is never negative, so a longer stage never pays less, and the farthest end is found by
bisection in prefix sums. Other costs of a stage, such as its transfers, are left out. This can
only make windows wider.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from jvpipe.planners.joint.dual_bounds import DualBounds, Prices, Pricing
from jvpipe.planners.joint.effort import CUTS
from jvpipe.planners.model.chain_dp import least_sufficient
from jvpipe.planners.model.grids import OverJ, sums
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.spans import Cuts
from jvpipe.util.sizes import MOST_BYTES

PRICE_ROUNDS = 2
"""How many pairs of prices each stage gets. It may be changed: more pairs make windows narrower."""
BYTES_ALONE = (0.0, 1.0)
"""Prices (alpha, mu) at which only bytes count, at one second per byte."""
ROUNDING_BYTES = 0.5
"""More than the rounding error of a sum of bytes, and less than a byte."""


@dataclass(frozen=True, eq=False)
class Reach:
    """How far stages reach under a cap.

    Attributes:
        pricing: the choices of all layers, and the memory limit.
        prices: lists with a pair of prices for each stage. Any prices are valid; these give
            high lower bounds of the stages' seconds. Each round in `of` adds a list.
        known: a cache of prefix sums, by stage and prices.
    """

    pricing: Pricing
    prices: tuple[list[Prices], ...] = ()
    known: dict[tuple[int, Prices], OverJ] = field(default_factory=dict)

    @staticmethod
    def of(pricing: Pricing) -> "Reach":
        """Makes a reach with prices whose lower bounds are high for stages near the least cap.

        Each round finds the windows of the least cap under the prices so far. It takes the
        middles of these windows as bounds, and adds the best prices of the stages between
        them. Without a limit no prices are needed.
        """
        reach = Reach(pricing)
        for _ in range(PRICE_ROUNDS if pricing.limit_bytes < MOST_BYTES else 0):
            cap_s = reach.least_cap_s(CUTS.prices_tolerance)
            if math.isinf(cap_s):
                break  # no plan keeps the limit, so no bounds are better than others
            middles = [int(cuts[len(cuts) // 2]) for cuts in reach.windows(cap_s)]
            prices = (*reach.prices, reach._best_prices(middles))
            # The prices of earlier rounds stay in use, and so do their prefix sums.
            reach = Reach(pricing, prices, reach.known)
        return reach

    def _best_prices(self, bounds: Sequence[int]) -> list[Prices]:
        """Finds for each stage between these bounds the prices that bound its seconds best."""
        segments = self.pricing.segments
        asked = []
        for s, (i, j) in enumerate(pairwise(bounds)):
            static = segments.of(s).static_bytes(s)
            compute_s = segments.compute_of(s)
            room = self._room_bytes(s) - float(static[j] - static[i])
            work_s = float(compute_s[j] - compute_s[i])
            cell = s, i, j
            relaxed = self.pricing.at(s).relaxed(cell, room, work_s, traffic_s=0.0)
            asked.append(relaxed)
        return DualBounds(asked).solve()

    def _room_bytes(self, s: int) -> float:
        return self.pricing.limit_bytes - self.pricing.segments.problem.less_bytes(s)

    def least_cap_s(self, tolerance: float = 1e-4) -> float:
        """Finds nearly the least cap under which the stages reach the last layer.

        Any plan's slowest stage takes at least as long as the least cap.

        Args:
            tolerance: by how much the result may be above the least cap, as a share of it.
        """
        # Under a larger cap, stages reach at least as far. So the least cap is found by
        # halving an interval. The least cap is not below the seconds of the longest layer,
        # nor below `share_s`, a lower bound on the slowest stage.
        segments = self.pricing.segments
        layers_s = np.diff(segments.least_compute_s)
        low = max(float(layers_s.max(initial=0.0)), segments.share_s)
        if self.reaches_end(low):
            return low
        # If the memory limit keeps the end out of reach, no cap suffices.
        if not self.reaches_end(float("inf")):
            return float("inf")
        high = 2 * low
        while not self.reaches_end(high):
            low, high = high, 2 * high
        return least_sufficient(self.reaches_end, low, high, tolerance)

    def reaches_end(self, cap_s: float) -> bool:
        """Tells whether the stages reach the last layer under a cap."""
        return self.left(cap_s)[-1] == self.pricing.segments.n

    def windows(self, cap_s: float) -> list[Cuts]:
        """Lists for each bound the cuts of its window; at least one, even if none keeps the cap."""
        segments = self.pricing.segments
        cuts = segments.cuts
        stages = segments.problem.stages
        # If a bound is beyond `left`, one of the stages before it is too slow or too full.
        # If it is before `right`, one of the stages after it is.
        left = self.left(cap_s)
        right = self.right(cap_s)
        windows = []
        for s in range(stages + 1):
            # Each stage has at least one layer, so that at least s cuts come before bound
            # s, and at least stages - s cuts after it.
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
        # Each stage should go as far as possible: the next stage then begins later, and pays
        # no more to reach the same end.
        cuts = self.pricing.segments.cuts
        reached = [0]
        for s in range(self.pricing.segments.problem.stages):
            begin = reached[-1]
            ends = []
            for paid, limit in self._paid(s, cap_s):
                beyond = np.searchsorted(paid, paid[begin] + limit, "right")
                ends.append(beyond - 1)
            place = np.searchsorted(cuts, min(ends), "right") - 1
            reached.append(int(cuts[place]))
        return reached

    def right(self, cap_s: float) -> list[int]:
        """Finds for s = 0, 1, ... the first cut from which the stages from s on reach the end."""
        cuts = self.pricing.segments.cuts
        reached = [self.pricing.segments.n]
        for s in reversed(range(self.pricing.segments.problem.stages)):
            end = reached[-1]
            begins = []
            for paid, limit in self._paid(s, cap_s):
                begin = np.searchsorted(paid, paid[end] - limit)
                begins.append(begin)
            place = np.searchsorted(cuts, max(begins))
            reached.append(int(cuts[place]))
        return reached[::-1]

    def _paid(self, s: int, cap_s: float) -> Iterator[tuple[OverJ, float]]:
        """Yields for each pair of prices what layers pay, and the most that the stage may pay.

        What layers pay comes as prefix sums. A stage reaches a cut if it pays no more than
        it may under every pair of prices. What it may pay is raised a little, so that
        rounding does not exclude a cut.
        """
        yield self.pricing.segments.compute_of(s), cap_s * (1 + 1e-12)
        if self.pricing.limit_bytes < MOST_BYTES:
            room_bytes = self._room_bytes(s)
            yield self._sums(s, BYTES_ALONE), room_bytes + ROUNDING_BYTES
            for of_round in self.prices:
                prices = of_round[s]
                _, mu = prices
                limit = cap_s * (1 + 1e-9) + mu * room_bytes
                yield self._sums(s, prices), limit

    def _sums(self, s: int, prices: Prices) -> OverJ:
        """Returns prefix sums of the least that each layer pays on stage s at these prices."""
        if (s, prices) in self.known:
            return self.known[s, prices]
        pricing = self.pricing.at(s)
        segments = pricing.segments
        alpha, mu = prices
        offers = pricing.offers(s, slice(None))
        if prices == BYTES_ALONE:
            offers = offers._replace(link_s=np.zeros_like(offers.link_s))
        # Whatever is chosen, each layer pays at least for its cheapest choice.
        least = offers.cost(alpha, mu).min(1)
        fixed = alpha * segments.compute_of(s) + mu * segments.static_bytes(s)
        layers = np.where(np.isfinite(least), least, 0.0)
        self.known[s, prices] = sums(layers) + fixed
        return self.known[s, prices]


def area(windows: Sequence[Cuts]) -> int:
    """Counts the cells between windows: the pairs of cuts between which a stage may lie.

    Args:
        windows: the cuts of each bound.
    """
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
    """Removes cuts from windows until few enough cells (see `area`) are left between them.

    Args:
        windows: the cuts of each bound.
        cells: the most cells that may be left; two cuts per window stay even if that is more.
        narrow: called with a window and a number; picks at most that many of the window's cuts.
    """
    thinned = list(windows)
    count = max(map(len, windows))
    while area(thinned) > cells and count > 2:
        count = count * 4 // 5
        thinned = [narrow(cuts, count) for cuts in windows]
    return thinned


def spread(segments: Segments, cells: int) -> list[Cuts]:
    """Lists for each bound the cuts near the one that would give all stages equal seconds.

    Args:
        segments: of the model.
        cells: the most cells between these cuts (see `bounded`).
    """
    total = segments.compute_s
    mean_s = float(total[-1]) / segments.problem.stages
    windows = []
    for s, cuts in enumerate(segments.windows):
        away_s = np.abs(total[cuts] - s * mean_s)
        near = cuts[away_s <= CUTS.spread_stages * mean_s]
        nearest = cuts[away_s.argmin()]
        windows.append(near if len(near) else nearest[None])
    return bounded(
        windows,
        cells,
        lambda cuts, count: _narrow(segments, cuts, count),
    )


def _narrow(
    segments: Segments,
    cuts: Cuts,
    count: int,
) -> Cuts:
    """Picks at most `count` of the cuts, spread evenly over seconds.

    The seconds between the first and the last cut are divided into `count` equal parts.
    Each part gives one cut, the one that the fewest bytes cross.
    """
    if len(cuts) <= count:
        return cuts
    total = segments.compute_s[cuts]
    passed = total - total[0]
    whole = max(total[-1] - total[0], 1e-300)
    parts = passed / whole * count
    part = np.minimum(parts, count - 1).astype(int)
    # Cuts are sorted by part and then by bytes, so that the first cut of each part is picked.
    order = np.lexsort((segments.crossing_bytes[cuts], part))
    first = np.flatnonzero(np.diff(part[order], prepend=-1))
    return np.sort(cuts[order[first]])
