"""The fewest bytes that a segment's layers can hold and work with: dominance over what they take (`states.py`)."""

import numpy as np

from jvpipe.planners.prices import Pricing
from jvpipe.planners.states import BEYOND, EXTRA, HELD, SWAPPED, Growth, Step, front
from jvpipe.planners.tiers import Tier

NARROW, WIDE = 16, 2000
"""How many states stay beside each other at first, and where it is to be exact."""


class Thrift:
    """Layers [i, j) of stage s, whatever their seconds."""

    def __init__(self, pricing: Pricing, s: int, i: int, j: int) -> None:
        self.pricing, self.cell, self.n = pricing, (s, i, j), j - i

    def fewest(self, exact: bool) -> tuple[float, tuple[int, ...]]:
        """The fewest bytes beside those that no choice changes, and choices that take them."""
        found: tuple[float, tuple[int, ...]] = np.inf, ()
        for tier in self.pricing.tiers:
            found = min(found, self._fewest(tier, NARROW, found[0]))
        return min(found, self._fewest(None, WIDE, found[0])) if exact else found

    def _fewest(self, tier: Tier | None, width: int, below: float) -> tuple[float, tuple[int, ...]]:
        """In a tier, whose bounds lead to what is near the best; or in none, to make sure."""
        growth = Growth(self.pricing, *self.cell, tier)
        states, steps = growth.begin(), list[Step]()
        for at in range(self.n):
            states = growth.grown(states, at)
            states[[EXTRA, SWAPPED]] = 0.0
            bound = growth.least_bytes(states, at + 1)
            alive = np.flatnonzero(bound < below)
            if len(alive) > 2 * width:
                alive = np.sort(alive[np.argpartition(bound[alive], width)[:width]])
            alive = alive[front(states[:, alive])]
            if not len(alive):
                return np.inf, ()
            states = states[:, alive]
            steps.append(growth.step(alive, at))
        taken = states[HELD] + states[BEYOND]
        best = int(taken.argmin())
        return float(taken[best]), growth.path(steps, best)
