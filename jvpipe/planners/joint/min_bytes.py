"""The fewest bytes that a device's layers can hold and work with: dominance over what they take (`dominance.py`)."""

from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from jvpipe.planners.joint.dominance import EXTRA, SWAPPED, Growth, Lot, Step, front
from jvpipe.planners.joint.dual_bounds import Pricing
from jvpipe.planners.joint.effort import FATE


@dataclass(frozen=True)
class MinBytes:
    """The fewest bytes that were found, and choices that take them; what was not looked at takes `dropped` or more."""

    bytes: float
    choices: tuple[int, ...] = ()
    dropped: float = np.inf


class MinBytesSearch:
    """The layers of a lot, whatever their seconds."""

    def __init__(self, pricing: Pricing, lot: Lot) -> None:
        self.pricing, self.lot = pricing.at(lot.cells[0][0]), lot

    def fewest(self, exact: bool, below: float = np.inf) -> tuple[float, tuple[int, ...]]:
        """Finds the fewest bytes beside those that no choice changes, and choices that take them.

        Few states are looked at; where that left out what may be better, and it is to be exact, many.

        Args:
            exact: whether many are to be looked at.
            below: what is not below that is not found.
        """
        growth = Growth(self.pricing, self.lot, by_bytes=True)
        best = few = self._fewest(growth, FATE.few_states, below)
        if exact and few.dropped < min(few.bytes, below):
            many = self._fewest(growth, FATE.many_states, min(few.bytes, below))
            best = min(few, many, key=attrgetter("bytes"))
        return (best.bytes, best.choices) if best.bytes < below else (below, ())

    def _fewest(self, growth: Growth, width: int, below: float) -> MinBytes:
        """With so many states beside each other, of those that may lead below a number."""
        states, steps, dropped = growth.begin(), list[Step](), np.inf
        if growth.least_bytes(states, 0)[0] >= below:
            return MinBytes(np.inf)
        for at in range(growth.n):
            states = growth.grown(states, at)
            states[[EXTRA, SWAPPED]] = 0.0
            bound = growth.least_bytes(states, at + 1)
            alive = np.flatnonzero(bound < below)
            if len(alive) > 2 * width:
                order = np.argpartition(bound[alive], width)
                dropped = min(dropped, float(bound[alive[order[width:]]].min()))
                alive = np.sort(alive[order[:width]])
            alive = alive[front(states[:, alive])]
            if not len(alive):
                return MinBytes(np.inf, (), dropped)
            states = states[:, alive]
            steps.append(growth.step(alive, at))
        taken = growth.least_bytes(states, growth.n)
        best = int(taken.argmin())
        return MinBytes(float(taken[best]), growth.path(steps, best), dropped)
