"""Which cuts can matter: those that stages reach from the left and from the right, none slower than a cap.

Legend: T is the cap in seconds. left[s] is the last cut that s stages can reach, each in at most T seconds and within
the limit; right[s] the first from which the stages from s on can reach the end. A plan that keeps the cap has bound s
in [right[s], left[s]]: near the least T these windows are short. A reach is bounded by the lower bounds of `prices.py`
with what only grows with the segment, so a longer segment never looks better than a shorter one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from jvpipe.planners.prices import Auction, Pricing, Segment
from jvpipe.planners.segments import Cuts, Segments, sums

Prices = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Reach:
    """How far stages reach; `prices[s]` are prices of seconds and bytes that bound stage s well."""

    pricing: Pricing
    prices: tuple[tuple[Prices, ...], ...]

    @staticmethod
    def of(pricing: Pricing, rounds: int = 2) -> "Reach":
        """With prices found where the stages of the least cap are, again and again."""
        stages = pricing.segments.problem.stages
        reach = Reach(pricing, ((),) * stages)
        for _ in range(rounds):
            bounds = reach.even(reach.least_cap_s())
            found = reach._best_prices(bounds)
            reach = Reach(pricing, tuple((*old, new) for old, new in zip(reach.prices, found, strict=True)))
        return reach

    def even(self, cap_s: float) -> list[int]:
        """Bounds in the middle of the windows of a cap."""
        windows = self.windows(cap_s)
        return [int(cuts[len(cuts) // 2]) for cuts in windows]

    def _best_prices(self, bounds: Sequence[int]) -> list[Prices]:
        pricing, segments = self.pricing, self.pricing.segments
        tier, found = pricing.tiers[-1], []
        for s, (i, j) in enumerate(pairwise(bounds)):
            static = segments.static_bytes(s)
            room = pricing.limit_bytes - float(static[j] - static[i])
            found.append(Segment(s, i, j, tier, room, float(segments.compute_s[j] - segments.compute_s[i]), 0.0))
        return Auction(pricing, found).settle()

    def least_cap_s(self, tolerance: float = 1e-4) -> float:
        """The least cap under which the last layer can be reached, nearly: no plan's slowest stage is faster."""
        segments = self.pricing.segments
        low = float(np.diff(segments.compute_s).max(initial=0.0))
        low = max(low, float(segments.compute_s[-1]) / segments.problem.stages)
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
        found = []
        for s in range(stages + 1):
            first = max(int(np.searchsorted(cuts, right[s])), s)
            last = min(int(np.searchsorted(cuts, left[s], "right")), len(cuts) - (stages - s))
            found.append(cuts[first:last] if first < last else cuts[max(last - 1, s) :][:1])
        return found

    def left(self, cap_s: float) -> list[int]:
        """The last cut that so many stages reach from the first layer."""
        found = [0]
        for s in range(self.pricing.segments.problem.stages):
            found.append(self._after(s, found[-1], cap_s))
        return found

    def right(self, cap_s: float) -> list[int]:
        """The first cut from which the stages from s on reach the end."""
        found = [self.pricing.segments.n]
        for s in reversed(range(self.pricing.segments.problem.stages)):
            found.append(self._before(s, found[-1], cap_s))
        return found[::-1]

    def _after(self, s: int, i: int, cap_s: float) -> int:
        compute_s, cuts = self.pricing.segments.compute_s, self.pricing.segments.cuts
        end = int(np.searchsorted(compute_s, compute_s[i] + cap_s * (1 + 1e-12), "right")) - 1
        reached = i + self._longest(s, i, end, cap_s, forwards=True)
        return int(cuts[np.searchsorted(cuts, reached, "right") - 1])

    def _before(self, s: int, j: int, cap_s: float) -> int:
        compute_s, cuts = self.pricing.segments.compute_s, self.pricing.segments.cuts
        start = int(np.searchsorted(compute_s, compute_s[j] - cap_s * (1 + 1e-12), "left"))
        reached = j - self._longest(s, start, j, cap_s, forwards=False)
        return int(cuts[np.searchsorted(cuts, reached)])

    def _longest(self, s: int, i: int, j: int, cap_s: float, forwards: bool) -> int:
        """How many layers from i on (or back from j on), at most to j (to i), stage s can take."""
        if i >= j:
            return 0
        fits = np.ones((len(self.pricing.tiers), 2, j - i), dtype=bool)
        for most, paid in zip((BYTE, *[cap_s * (1 + 1e-9)] * len(self.prices[s])), self._paid[s], strict=True):
            over, paid = paid[..., :1], paid[..., 1:]
            after = paid[..., i + 1 : j + 1] - paid[..., i : i + 1]
            before = paid[..., j : j + 1] - paid[..., i:j]
            fits &= over + (after if forwards else before[..., ::-1]) <= most
        lengths = np.flatnonzero(fits.all(1).any(0))
        return int(lengths[-1]) + 1 if len(lengths) else 0

    @cached_property
    def _paid(self) -> list[list[Float[np.ndarray, "G 2 K"]]]:
        """For each stage and its prices, those of bytes alone first: what is paid at least in each tier, by each bound.

        First what does not grow, then sums over layers.
        """
        segments, limit, found = self.pricing.segments, self.pricing.limit_bytes, []
        for s, prices in enumerate(self.prices):
            rows: list[list[np.ndarray]] = [[] for _ in range(1 + len(prices))]
            for view in [view for tier in self.pricing.tiers for view in (tier.views * 2)[:2]]:
                extra_s, link_s, held = self.pricing.table(s, view, slice(None))
                there = np.isfinite(extra_s)
                work_s, over = np.where(there, extra_s, 0.0), view.low * view.by_low - limit
                for row, (alpha, mu) in zip(rows, (BYTES, *prices), strict=True):
                    link = (1 - alpha) * link_s if alpha else 0.0
                    cost = np.where(there, alpha * work_s + link + mu * held, np.inf).min(1)
                    paid = sums(np.where(np.isfinite(cost), cost, 0.0))
                    grown = paid + alpha * segments.compute_s + mu * segments.static_bytes(s)
                    row.append(np.concatenate([[mu * over], grown]))
            found.append([np.array(row).reshape(len(self.pricing.tiers), 2, -1) for row in rows])
        return found


BYTES = (0.0, 1.0)
"""Prices of seconds and bytes that count bytes alone."""
BYTE = 0.5
"""Sums of bytes are rounded by less."""
CELLS = 2_000_000
"""The most cells between windows that are looked at."""


def all_cuts(segments: Segments) -> list[Cuts]:
    """Each bound's cuts, whatever stages take."""
    cuts, stages = segments.cuts, segments.problem.stages
    return [cuts[:1], *(cuts[s : len(cuts) - (stages - s)] for s in range(1, stages)), cuts[-1:]]


def area(windows: Sequence[Cuts]) -> int:
    """The number of cells between windows."""
    return sum(len(a) * len(b) for a, b in pairwise(windows))


def bounded(windows: Sequence[Cuts], cells: int = CELLS) -> list[Cuts]:
    """Windows with fewer cuts, evenly spread, if there are too many cells between them."""
    found, most = list(windows), max(map(len, windows))
    while area(found) > cells and most > 2:
        most = most * 2 // 3
        found = [cuts[np.unique(np.linspace(0, len(cuts) - 1, min(len(cuts), most)).astype(int))] for cuts in windows]
    return found
