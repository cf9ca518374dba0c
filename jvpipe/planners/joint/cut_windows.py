"""Which cuts can matter: those that stages reach from the left and from the right, none slower than a cap.

Legend: T is the cap in seconds. left[s] is the last cut that s stages can reach, each in at most T seconds and within
the limit; right[s] the first from which the stages from s on can reach the end. A plan that keeps the cap has bound s
in [right[s], left[s]]: near the least T these windows are short. A reach is bounded by the lower bounds of
`dual_bounds.py` with what only grows with the segment, so a longer segment never looks better than a shorter one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from jvpipe.planners.joint.dual_bounds import UNLIMITED, DualBounds, Pricing, Relaxation, Segment
from jvpipe.planners.joint.effort import CUTS
from jvpipe.planners.joint.working_tiers import Tier
from jvpipe.planners.model.segments import Cuts, Segments, sums

Prices = tuple[float, float]
Grids = Float[np.ndarray, "_ 2 _"]
NO_GRIDS = np.empty((0, 2, 0))


@dataclass(frozen=True, eq=False)
class Reach:
    """How far stages reach; `prices[s]` are prices of seconds and bytes that bound stage s well."""

    pricing: Pricing
    prices: tuple[tuple[Prices, ...], ...]
    known: dict[tuple[int, Prices], tuple[int, Grids, Grids]] = field(default_factory=dict)

    @staticmethod
    def of(pricing: Pricing, rounds: int = 2) -> "Reach":
        """With prices found where the stages of the least cap are, again and again."""
        stages = pricing.segments.problem.stages
        reach = Reach(pricing, ((),) * stages)
        for _ in range(rounds if pricing.limit_bytes < UNLIMITED else 0):
            best = reach._best_prices(reach.even(reach.least_cap_s(CUTS.prices_tolerance)))
            prices = tuple((*old, new) for old, new in zip(reach.prices, best, strict=True))
            reach = Reach(pricing, prices, reach.known)
        return reach

    def even(self, cap_s: float) -> list[int]:
        """Bounds in the middle of the windows of a cap."""
        windows = self.windows(cap_s)
        return [int(cuts[len(cuts) // 2]) for cuts in windows]

    def _best_prices(self, bounds: Sequence[int]) -> list[Prices]:
        pricing, segments = self.pricing, self.pricing.segments
        stages = list[Relaxation]()
        for s, (i, j) in enumerate(pairwise(bounds)):
            static, compute_s = segments.of(s).static_bytes(s), segments.compute_of(s)
            room = (
                pricing.limit_bytes - segments.problem.less_bytes(s) - float(static[j] - static[i])
            )
            tier = pricing.at(s).tiers[-1]
            segment = Segment(s, i, j, tier, room, float(compute_s[j] - compute_s[i]), 0.0)
            stages.append(segment.relaxed(pricing))
        return DualBounds(stages).solve()

    def least_cap_s(self, tolerance: float = 1e-4) -> float:
        """The least cap under which the last layer can be reached, nearly: no plan's slowest stage is faster."""
        segments = self.pricing.segments
        low = max(float(np.diff(segments.least_compute_s).max(initial=0.0)), segments.share_s)
        if self.left(low)[-1] == segments.n:
            return low
        high = 2 * low
        while high < 1e9 * low and self.left(high)[-1] < segments.n:
            low, high = high, 2 * high
        while high - low > tolerance * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.left(middle)[-1] == segments.n else (middle, high)
        return high

    def windows(self, cap_s: float) -> list[Cuts]:
        """Each bound's cuts under a cap; at least one each, also if the end cannot be reached."""
        cuts, stages = self.pricing.segments.cuts, self.pricing.segments.problem.stages
        left, right = self.left(cap_s), self.right(cap_s)
        windows = []
        for s in range(stages + 1):
            first = max(int(np.searchsorted(cuts, right[s])), s)
            last = min(int(np.searchsorted(cuts, left[s], "right")), len(cuts) - (stages - s))
            windows.append(cuts[first:last] if first < last else cuts[max(last - 1, s) :][:1])
        return windows

    def left(self, cap_s: float) -> list[int]:
        """The last cut that so many stages reach from the first layer."""
        reached = [0]
        for s in range(self.pricing.segments.problem.stages):
            reached.append(self._after(s, reached[-1], cap_s))
        return reached

    def right(self, cap_s: float) -> list[int]:
        """The first cut from which the stages from s on reach the end."""
        reached = [self.pricing.segments.n]
        for s in reversed(range(self.pricing.segments.problem.stages)):
            reached.append(self._before(s, reached[-1], cap_s))
        return reached[::-1]

    def _after(self, s: int, i: int, cap_s: float) -> int:
        compute_s, cuts = self.pricing.segments.compute_of(s), self.pricing.segments.cuts
        end = int(np.searchsorted(compute_s, compute_s[i] + cap_s * (1 + 1e-12), "right")) - 1
        reached = i + self._longest(s, i, end, cap_s, forwards=True)
        return int(cuts[np.searchsorted(cuts, reached, "right") - 1])

    def _before(self, s: int, j: int, cap_s: float) -> int:
        compute_s, cuts = self.pricing.segments.compute_of(s), self.pricing.segments.cuts
        start = int(np.searchsorted(compute_s, compute_s[j] - cap_s * (1 + 1e-12), "left"))
        reached = j - self._longest(s, start, j, cap_s, forwards=False)
        return int(cuts[np.searchsorted(cuts, reached)])

    def _longest(self, s: int, i: int, j: int, cap_s: float, forwards: bool) -> int:
        """How many layers from i on (or back from j on), at most to j (to i), stage s can take."""
        if self.pricing.limit_bytes >= UNLIMITED:
            return max(0, j - i)  # the cap alone counts, and that is kept
        length, tried = 0, 2 * self.pricing.segments.n // self.pricing.segments.problem.stages + 2
        while length < j - i:
            tried = min(2 * tried, j - i)
            length = self._fitting(
                s, *((i, i + tried) if forwards else (j - tried, j)), cap_s, forwards
            )
            if length < tried:
                break
        return length

    def _fitting(self, s: int, i: int, j: int, cap_s: float, forwards: bool) -> int:
        """The length of the longest beginning (or end) of layers [i, j) that stage s can take."""
        fits = np.ones((len(self.pricing.at(s).tiers), 2, j - i), dtype=bool)
        priced = ((cap_s * (1 + 1e-9), prices) for prices in self.prices[s])
        for most, prices in ((ROUNDING_BYTES, BYTES_ALONE), *priced):
            over, paid = self._paid(s, prices, i, j)
            after, before = paid[..., 1:] - paid[..., :1], paid[..., -1:] - paid[..., :-1]
            fits &= over + (after if forwards else before[..., ::-1]) <= most
        lengths = np.flatnonzero(fits.all(1).any(0))
        return int(lengths[-1]) + 1 if len(lengths) else 0

    def _paid(self, s: int, prices: Prices, i: int, j: int) -> tuple[Grids, Grids]:
        """What stage s pays at least in each tier, by each bound: what does not grow, and sums up to layers i to j."""
        first, over, paid = self.known.get((s, prices), (0, NO_GRIDS, NO_GRIDS))
        if not first <= i <= j < first + paid.shape[-1]:
            first, last = max(0, 2 * i - j), min(self.pricing.segments.n, 2 * j - i)
            over, paid = self._priced(s, prices, slice(first, last))
            self.known[s, prices] = first, over, paid
        return over, paid[..., i - first : j - first + 1]

    def _priced(self, s: int, prices: Prices, layers: slice) -> tuple[Grids, Grids]:
        """The same for sums that begin at the first of these layers."""
        pricing, (alpha, mu), rows, over = self.pricing.at(s), prices, [], []
        segments = pricing.segments
        bounds = slice(layers.start, layers.stop + 1)
        limit_bytes = self.pricing.limit_bytes - segments.problem.less_bytes(s)
        fixed = alpha * segments.compute_of(s)[bounds] + mu * segments.static_bytes(s, bounds)
        for view, (work_s, link_s) in self._views(s):
            cost = mu * pricing.held_bytes(s, view, layers)
            if alpha:
                cost += (
                    alpha * work_s[layers] + (1 - alpha) * link_s[layers]
                )  # infinite where the tier lacks a choice
            else:
                cost = np.where(np.isfinite(work_s[layers]), cost, np.inf)
            least = cost.min(1)
            rows.append(sums(np.where(np.isfinite(least), least, 0.0)) + fixed)
            over.append([mu * (view.low * view.by_low - limit_bytes)])
        shape = len(pricing.tiers), 2, -1
        return np.array(over).reshape(shape), np.array(rows).reshape(shape)

    def _views(self, s: int) -> list[tuple[Tier, tuple[np.ndarray, np.ndarray]]]:
        """Every tier by each of two bounds, with the seconds of its choices on stage s."""
        pricing = self.pricing.at(s)
        key = id(pricing), pricing.segments.problem.slowness(s)
        if key not in self._views_known:
            pairs = [view for tier in pricing.tiers for view in (tier.views * 2)[:2]]
            self._views_known[key] = [
                (view, pricing.seconds(s, view, slice(None))) for view in pairs
            ]
        return self._views_known[key]

    @cached_property
    def _views_known(
        self,
    ) -> dict[tuple[int, tuple[float, ...]], list[tuple[Tier, tuple[np.ndarray, np.ndarray]]]]:
        return {}


BYTES_ALONE = (0.0, 1.0)
"""Prices of seconds and bytes that count bytes alone."""
ROUNDING_BYTES = 0.5
"""Sums of bytes are rounded by less."""


def area(windows: Sequence[Cuts]) -> int:
    """The number of cells between windows."""
    return sum(len(a) * len(b) for a, b in pairwise(windows))


def bounded(windows: Sequence[Cuts], cells: int = CUTS.spread_cells) -> list[Cuts]:
    """Windows with fewer cuts, evenly spread, if there are too many cells between them."""
    thinned, most = list(windows), max(map(len, windows))
    while area(thinned) > cells and most > 2:
        most = most * 2 // 3
        thinned = [
            cuts[np.unique(np.linspace(0, len(cuts) - 1, min(len(cuts), most)).astype(int))]
            for cuts in windows
        ]
    return thinned


def spread(segments: Segments, cells: int) -> list[Cuts]:
    """Each bound's cuts within some stages of its even share of the seconds, thinned out to so many cells in all."""
    stages, total = segments.problem.stages, segments.compute_s
    mean_s = float(total[-1]) / stages
    windows = []
    for s, cuts in enumerate(segments.windows):
        near = cuts[np.abs(total[cuts] - s * mean_s) <= CUTS.spread_stages * mean_s]
        windows.append(near if len(near) else cuts[np.abs(total[cuts] - s * mean_s).argmin()][None])
    thinned, most = windows, max(map(len, windows))
    while area(thinned) > cells and most > 2:
        most = most * 4 // 5
        thinned = [_narrow(segments, cuts, most) for cuts in windows]
    return thinned


def _narrow(segments: Segments, cuts: Cuts, most: int) -> Cuts:
    """So many of the cuts: of each of as many parts of the seconds between them, the one that fewest bytes cross."""
    if len(cuts) <= most:
        return cuts
    total = segments.compute_s[cuts]
    part = np.minimum(
        (total - total[0]) / max(total[-1] - total[0], 1e-300) * most, most - 1
    ).astype(int)
    order = np.lexsort((segments.crossing_bytes[cuts], part))
    first = np.flatnonzero(np.diff(part[order], prepend=-1))
    return np.sort(cuts[order[first]])
