"""Finds the choices of a device's layers that hold and work with the fewest bytes.

Choices are followed layer by layer as states, and dominated states are dropped (`dominance.py`).
The result is exact unless states were dropped because there were too many.
"""

import numpy as np

from jvpipe.planners.joint.dominance import Growth, Lot, States, follow
from jvpipe.planners.joint.dual_bounds import Pricing
from jvpipe.planners.joint.effort import FATE

Fewest = tuple[float, tuple[int, ...]]
"""The fewest bytes found, and the choices that take them; no choices if none were found."""


def fewest_bytes(
    pricing: Pricing,
    lot: Lot,
    *,
    exact: bool,
    below: float = np.inf,
) -> Fewest:
    """Finds the choices that take the fewest bytes, not counting bytes that no choice changes.

    A first search keeps few states. If it may have missed the best, and `exact` is set, a second
    search keeps many (`FATE.many_states`).

    Args:
        pricing: the choices of all layers.
        lot: the layers of a device.
        exact: whether the second search may follow.
        below: only choices that take fewer bytes than this are searched for.

    Returns:
        The bytes and the choices. If none were found, `below` and no choices.
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
    """Searches with `width` states.

    Returns:
        What was found, and a lower bound on the bytes of states that were dropped.
    """

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
