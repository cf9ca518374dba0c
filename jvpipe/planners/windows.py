"""Which cuts can matter: those that stages reach from the left and from the right, none slower than a cap.

Legend: T is the cap in seconds. left[s] is the last cut that s stages can reach, each in at most T seconds and within
the limit; right[s] the first from which the stages from s on can reach the end. A plan that keeps the cap has bound s
in [right[s], left[s]]: near the least T these windows are short. A reach is bounded by the lower bounds of `prices.py`
with what only grows with the segment, so a longer segment never looks better than a shorter one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from jvpipe.planners.prices import Auction, Pricing, Segment
from jvpipe.planners.problem import RERUN_ON
from jvpipe.planners.segments import Cuts, Segments

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
            room = (
                pricing.limit_bytes
                - float(static[j] - static[i])
                - float(pricing.choices.least_working_bytes[i:j].max())
            )
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
        pricing, segments = self.pricing, self.pricing.segments
        static = np.diff(segments.static_bytes(s)[i : j + 1])
        compute_s = np.diff(segments.compute_s[i : j + 1])
        fixed = np.array([[tier.low] for tier in pricing.tiers]) - pricing.limit_bytes
        fits = self._grown(static + self._least(s, i, j, 0.0, 1.0, bytes_alone=True), forwards) + fixed <= 0
        for alpha, mu in self.prices[s]:
            paid = alpha * compute_s + mu * static + self._least(s, i, j, alpha, mu)
            fits &= self._grown(paid, forwards) + mu * fixed <= cap_s * (1 + 1e-9)
        lengths = np.flatnonzero(fits.any(0))
        return int(lengths[-1]) + 1 if len(lengths) else 0

    @staticmethod
    def _grown(per_layer: np.ndarray, forwards: bool) -> np.ndarray:
        return per_layer.cumsum(1) if forwards else per_layer[:, ::-1].cumsum(1)

    def _least(
        self, s: int, i: int, j: int, alpha: float, mu: float, bytes_alone: bool = False
    ) -> Float[np.ndarray, "G N"]:
        """What each layer pays at least, in each tier."""
        choices, tiers, layers = self.pricing.choices, self.pricing.tiers, slice(i, j)
        k, host = self.pricing.segments.k[s], self.pricing.segments.problem.host
        held = choices.held_bytes(k, layers)
        cost = mu * held
        if not bytes_alone:
            link_s = 2 * choices.swapped_bytes[layers] / host.bytes_per_s
            cost += alpha * choices.extra_s[layers] + (1 - alpha) * link_s
        run = cost[:, RERUN_ON] + mu * k * np.array(
            [tier.in_run_bytes[layers] for tier in tiers]
        )  # holds nothing itself
        working = np.where(choices.allowed[layers], choices.working_bytes[layers], np.inf)
        there = working <= np.array([tier.high for tier in tiers])[:, None, None]
        cost[:, RERUN_ON] = np.inf
        least = np.minimum(np.where(there, cost, np.inf).min(2), np.where(there[:, :, RERUN_ON], run, np.inf))
        return np.where(np.isfinite(least), least, 0.0)


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
