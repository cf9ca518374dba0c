"""The fewest bytes that a device's layers can hold and work with, by dominance (`dominance.py`)."""

import numpy as np

from jvpipe.planners.joint.dominance import Growth, Lot, States, follow
from jvpipe.planners.joint.dual_bounds import Pricing
from jvpipe.planners.joint.effort import FATE

Fewest = tuple[float, tuple[int, ...]]
"""Bytes, and the choices that take them; the choices are empty if none were found."""


def fewest_bytes(
    pricing: Pricing,
    lot: Lot,
    *,
    exact: bool,
    below: float = np.inf,
) -> Fewest:
    """Finds the fewest bytes that choices take, without fixed ones, and choices that take them.

    A first search keeps few states. If it dropped states that may be better, and the result is to
    be exact, a second search keeps many.

    Args:
        pricing: the choices of all layers.
        lot: the layers of a device.
        exact: whether the second search may follow.
        below: bytes; choices that take as many are not found.
    """
    growth = Growth(pricing, lot, by_bytes=True)
    best, dropped = _fewest(growth, FATE.few_states, below)
    if exact and dropped < best[0]:
        many, _ = _fewest(growth, FATE.many_states, best[0])
        best = min(best, many, key=lambda one: one[0])
    return best


def _fewest(
    growth: Growth,
    width: int,
    below: float,
) -> tuple[Fewest, float]:
    """Searches with `width` states; also returns a lower bound on the states that were dropped."""

    def emptiest(
        _states: States,
        bound: np.ndarray,
        alive: np.ndarray,
        _done: int,
    ) -> np.ndarray:
        return alive[np.argpartition(bound[alive], width)[:width]]

    nothing = below, ()
    if growth.least_bytes(growth.begin(), 0)[0] >= below:
        return nothing, np.inf
    last = follow(growth, below, width, growth.least_bytes, emptiest)
    if not last.states.shape[1]:
        return nothing, last.dropped
    taken = growth.least_bytes(last.states, growth.n)
    best = int(taken.argmin())
    return (float(taken[best]), growth.path(last.steps, best)), last.dropped
