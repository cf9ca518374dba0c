"""Finds for each bound of the stages the cuts where it can lie if no stage takes longer than a cap.

Legend: T is the cap, in seconds per micro-batch. left[s] is the last cut that the first s
stages can reach if each of them keeps the cap and the memory limit. right[s] is the first
cut from which the stages from s on can reach the end. In any plan that keeps the cap, bound
s lies in the window [right[s], left[s]]. The nearer T is to the least cap that a plan can
keep, the narrower the windows are.

    first layer |------ stages before s ------>| left[s]
                        right[s] |<------ stages from s on ------| last layer
    window of bound s            [-------------]

A stage reaches a cut if the sum of its layers' least seconds keeps the cap, and the sum of their
fewest bytes keeps the limit. No layer has negative seconds or bytes, so a longer stage never takes
less, and the farthest end is found by bisection in prefix sums. One choice may not give both the
least seconds and the fewest bytes, and other costs of a stage, such as its transfers, are left out.
Both can only make windows wider. (Prices that join seconds and bytes made windows narrower, but
steps up to 5% longer.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import numpy as np

from jvpipe.planners.joint.dual_bounds import Pricing
from jvpipe.planners.joint.effort import CUTS
from jvpipe.planners.model.chain_dp import least_sufficient
from jvpipe.planners.model.grids import OverJ, sums
from jvpipe.planners.model.spans import Cuts
from jvpipe.util.sizes import MOST_BYTES

ROUNDING_BYTES = 0.5
"""More than the rounding error of a sum of bytes, and less than a byte."""


@dataclass(frozen=True, eq=False)
class Reach:
    """How far stages reach under a cap.

    Attributes:
        pricing: the choices of all layers, and the memory limit.
    """

    pricing: Pricing

    def least_cap_s(self) -> float:
        """Finds nearly the least cap under which the stages reach the last layer.

        Any plan's slowest stage takes at least as long as the least cap.
        """
        # Under a larger cap, stages reach at least as far. So the least cap is found by
        # halving an interval. The least cap is not below the seconds of the longest layer,
        # nor below `share_s`, a lower bound on the slowest stage.
        segments = self.pricing.segments
        layers_s = np.diff(segments.least_compute_s)
        low = max(float(layers_s.max()), segments.share_s)
        if self.reaches_end(low):
            return low
        # If the memory limit keeps the end out of reach, no cap suffices.
        if not self.reaches_end(float("inf")):
            return float("inf")
        high = 2 * low
        while not self.reaches_end(high):
            low, high = high, 2 * high
        return least_sufficient(self.reaches_end, low, high, CUTS.cap_tolerance)

    def reaches_end(self, cap_s: float) -> bool:
        """Tells whether the stages reach the last layer under a cap."""
        return self.left(cap_s)[-1] == self.pricing.segments.n

    def windows(self, cap_s: float) -> list[Cuts]:
        """Lists for each bound the cuts of its window; at least one, even if none keeps the cap."""
        # If a bound is beyond `left`, one of the stages before it is too slow or too full.
        # If it is before `right`, one of the stages after it is.
        all_cuts = self.pricing.segments.windows
        windows = []
        for cuts, left, right in zip(all_cuts, self.left(cap_s), self.right(cap_s), strict=True):
            last = max(np.searchsorted(cuts, left, "right"), 1)
            first = min(np.searchsorted(cuts, right), last - 1)
            windows.append(cuts[first:last])
        return windows

    def left(self, cap_s: float) -> list[int]:
        """Finds for s = 0, 1, ... the last cut that the first s stages reach."""
        # Each stage should go as far as possible: the next stage then begins later, and takes
        # no more to reach the same end.
        segments = self.pricing.segments
        cuts = segments.cuts
        reached = [0]
        for s in range(segments.problem.stages):
            begin = reached[-1]
            ends = [
                np.searchsorted(taken, taken[begin] + limit, "right") - 1
                for taken, limit in self._limits(s, cap_s)
            ]
            place = np.searchsorted(cuts, min(ends), "right") - 1
            reached.append(int(cuts[place]))
        return reached

    def right(self, cap_s: float) -> list[int]:
        """Finds for s = 0, 1, ... the first cut from which the stages from s on reach the end."""
        segments = self.pricing.segments
        cuts = segments.cuts
        reached = [segments.n]
        for s in reversed(range(segments.problem.stages)):
            end = reached[-1]
            begins = [
                np.searchsorted(taken, taken[end] - limit)
                for taken, limit in self._limits(s, cap_s)
            ]
            place = np.searchsorted(cuts, max(begins))
            reached.append(int(cuts[place]))
        return reached[::-1]

    def _limits(self, s: int, cap_s: float) -> list[tuple[OverJ, float]]:
        """Returns the least that layers take on a stage, in seconds and in bytes, and the limits.

        What layers take is returned as prefix sums. The limits are raised a little, so that
        rounding does not exclude a cut.
        """
        pricing = self.pricing
        segments = pricing.segments
        limits = [(segments.compute_of(s), cap_s * (1 + 1e-12))]
        if pricing.limit_bytes < MOST_BYTES:
            room_bytes = pricing.limit_bytes - segments.problem.less_bytes(s)
            limits.append((self._fewest_bytes[s], room_bytes + ROUNDING_BYTES))
        return limits

    @cached_property
    def _fewest_bytes(self) -> list[OverJ]:
        """For each stage, prefix sums of the fewest bytes that layers hold on it."""
        every = []
        for s in range(self.pricing.segments.problem.stages):
            pricing = self.pricing.at(s)
            offers = pricing.offers(s, slice(None))
            fewest = np.where(offers.there, offers.held_bytes, np.inf).min(1)
            # Segments with a layer that has no possible choice are excluded by `least_bytes`.
            layers = np.where(np.isfinite(fewest), fewest, 0.0)
            every.append(sums(layers) + pricing.segments.static_bytes(s))
        return every


def area(windows: Sequence[Cuts]) -> int:
    """Counts the cells between windows: the pairs of cuts between which a stage may lie.

    Args:
        windows: the cuts of each bound.
    """
    return sum(len(a) * len(b) for a, b in pairwise(windows))


def _evenly(cuts: Cuts, count: int) -> Cuts:
    """Picks at most `count` of the cuts, evenly spread."""
    places = np.linspace(0, len(cuts) - 1, min(len(cuts), count))
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


def spread(
    windows: Sequence[Cuts],
    before_s: OverJ,
    crossing_bytes: OverJ,
    cells: int,
) -> list[Cuts]:
    """Lists for each bound the cuts near the one that would give all stages equal seconds.

    Args:
        windows: all cuts of each bound.
        before_s: the seconds of all layers before a cut.
        crossing_bytes: the bytes that cross a cut.
        cells: the most cells between these cuts (see `bounded`).
    """
    mean_s = float(before_s[-1]) / (len(windows) - 1)
    nearer = []
    for s, cuts in enumerate(windows):
        away_s = np.abs(before_s[cuts] - s * mean_s)
        near = cuts[away_s <= CUTS.spread_stages * mean_s]
        nearest = cuts[away_s.argmin()]
        nearer.append(near if len(near) else nearest[None])
    return bounded(nearer, cells, partial(_narrow, before_s, crossing_bytes))


def _narrow(
    before_s: OverJ,
    crossing_bytes: OverJ,
    cuts: Cuts,
    count: int,
) -> Cuts:
    """Picks at most `count` of the cuts, spread evenly over seconds.

    The seconds between the first and the last cut are divided into `count` equal parts.
    Each part gives one cut, the one that the fewest bytes cross.
    """
    if len(cuts) <= count:
        return cuts
    passed = before_s[cuts] - before_s[cuts[0]]
    parts = passed / max(passed[-1], 1e-300) * count
    part = np.minimum(parts, count - 1).astype(int)
    # Cuts are sorted by part and then by bytes, so that the first cut of each part is picked.
    order = np.lexsort((crossing_bytes[cuts], part))
    first = np.flatnonzero(np.diff(part[order], prepend=-1))
    return np.sort(cuts[order[first]])
