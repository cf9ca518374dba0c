"""The seconds of one stage's segments: what is known of each, or a bound.

Legend: a row per start, a column per end. A segment that is not settled takes at least the least of its tiers' bounds.
"""

import numpy as np

from jvpipe.planners.cuts import Matrix
from jvpipe.planners.prices import Pricing
from jvpipe.planners.segments import Block, between, sums
from jvpipe.planners.tiers import spread_max


class StageTable:
    """The cells of one stage."""

    def __init__(self, pricing: Pricing, block: Block) -> None:
        self.pricing, self.block = pricing, block
        limit = pricing.limit_bytes
        self.least_s = np.maximum(block.compute_s, block.traffic_s)
        self.least_working_bytes = spread_max(pricing.choices.least_working_bytes, block)
        keeps = block.inside & (self._keeping_bytes() <= limit)
        fits = block.inside & (keeps | (pricing.least_bytes(block, self.least_working_bytes) <= limit))
        needs = [pricing.working_bytes(self.least_working_bytes, tier) for tier in pricing.tiers]
        self.bounds_s = [np.where(fits & (keeps | np.isfinite(x)), self.least_s, np.inf) for x in needs]
        self.settled = keeps | ~fits
        self.known_s = np.where(keeps, self.least_s, np.inf)  # of settled cells
        self.ratios: list[float] = []  # of what choices take to their bounds
        self.refresh()

    def refresh(self) -> None:
        """What cells take: known, or their bounds, by as much higher as it is usual on this stage."""
        ratio = float(np.median(self.ratios)) if self.ratios else 1.0
        self.seconds: Matrix = np.where(self.settled, self.known_s, np.minimum.reduce(self.bounds_s) * ratio)

    def _keeping_bytes(self) -> Matrix:
        """Bytes of segments that keep everything; infinite where that may not take the fewest seconds."""
        block, choices, k = self.block, self.pricing.choices, self.pricing.segments.k[self.block.s]
        first, layers = block.starts[0], slice(block.starts[0], block.ends[-1])
        extra_s = choices.extra_s[layers]
        if (choices.swapped_bytes[layers, 0] > 0).any() or (extra_s < extra_s[:, :1]).any():
            return np.full(block.inside.shape, np.inf)
        held = sums(k * choices.kept_bytes[layers, 0])
        held_bytes = between(held, block.starts - first, np.maximum(block.ends - first, 0))
        return block.fixed_bytes + held_bytes + spread_max(choices.working_bytes[:, 0], block)

    def place(self, i: int, j: int) -> tuple[int, int]:
        """A segment's row and column."""
        return int(np.searchsorted(self.block.starts, i)), int(np.searchsorted(self.block.ends, j))

    def price(self, tier: int, alpha: float, mu: float) -> None:
        """Raises the bounds of a tier to what these prices prove."""
        pricing = self.pricing
        bound_s = pricing.bound_s(self.block, self.least_working_bytes, pricing.tiers[tier], alpha, mu)
        self.bounds_s[tier] = np.maximum(self.bounds_s[tier], bound_s)
        self.refresh()

    def best_tier(self, at: tuple[int, int]) -> int:
        """The tier of a cell's least bound."""
        return int(np.argmin([bound_s[at] for bound_s in self.bounds_s]))

    def narrow(self, rows: np.ndarray, columns: np.ndarray) -> None:
        """Keeps some starts and ends."""
        at = np.ix_(rows, columns)
        self.block = self.block.at(rows, columns)
        self.least_s, self.least_working_bytes = self.least_s[at], self.least_working_bytes[at]
        self.bounds_s = [bound_s[at] for bound_s in self.bounds_s]
        self.seconds, self.settled, self.known_s = self.seconds[at], self.settled[at], self.known_s[at]
