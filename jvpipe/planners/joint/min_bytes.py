"""Finds the choices of a device's layers that hold and work with the fewest bytes.

Choices are followed layer by layer as states, and dominated states are dropped (`dominance.py`).
The result is exact unless states were dropped because there were too many.
"""

from functools import partial

import numpy as np

from jvpipe.planners.joint.dominance import Growth, States, follow
from jvpipe.planners.joint.dual_bounds import Pricing
from jvpipe.planners.joint.effort import FATE
from jvpipe.planners.joint.lot import Lot

Fewest = tuple[float, tuple[int, ...]]
"""The fewest bytes found, and the choices that take them; no choices if none were found."""


def fewest_bytes(
    pricing: Pricing,
    lot: Lot,
    *,
    exact: bool,
    below: float = np.inf,
) -> Fewest:
    """Finds the choices that take the fewest bytes; bytes that all choices share do not count.

    A first search keeps few states (`FATE.few_states`). If it may have missed the best, and `exact`
    is set, a second search keeps many (`FATE.many_states`). The second search looks only for better
    choices than those of the first.

    Args:
        pricing: the choices of all layers.
        lot: the layers of a device.
        exact: whether the second search may follow.
        below: only choices that take fewer bytes than this are searched for.

    Returns:
        The bytes and the choices. If none were found, `below` and no choices.
    """
    growth = Growth(pricing, lot, by_bytes=True)
    best: Fewest = below, ()
    for width in (FATE.few_states, FATE.many_states)[: 1 + exact]:
        last = follow(
            growth,
            best[0],
            width,
            growth.least_bytes,
            partial(_emptiest, width),
        )
        if last.states.shape[1]:
            taken = growth.least_bytes(last.states, growth.n)
            at = int(taken.argmin())
            best = float(taken[at]), tuple(last.chosen[at].tolist())
        if last.dropped >= best[0]:
            break  # no state that was dropped leads to fewer bytes
    return best


def _emptiest(
    width: int,
    _states: States,
    bound: np.ndarray,
    alive: np.ndarray,
    _done: int,
) -> np.ndarray:
    """Picks the `width` states with the least bounds among those at the indices `alive`."""
    return alive[np.argpartition(bound[alive], width)[:width]]
