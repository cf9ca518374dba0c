"""Finds the choices of a device's layers that hold and work with the fewest bytes.

Choices are followed layer by layer as states, and dominated states are dropped (`dominance.py`).
The result is exact unless states were dropped because there were too many.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from jvpipe.planners.joint.dominance import Growth, PerState, Places, States, follow
from jvpipe.planners.joint.dual_bounds import Pricing
from jvpipe.planners.joint.effort import FATE
from jvpipe.planners.joint.lot import Lot


class Fewest(NamedTuple):
    """The fewest bytes that were found, and the choices that take them.

    If no choices were found, `choices` is empty, and `held_bytes` is the number below which the
    search looked for them. No choices take fewer bytes than `bound_bytes`.
    """

    held_bytes: float
    choices: tuple[int, ...]
    bound_bytes: float


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
    """
    growth = Growth(pricing, lot, by_bytes=True)
    held_bytes, choices, bound_bytes = below, (), -np.inf
    for width in (FATE.few_states, FATE.many_states)[: 1 + exact]:
        fittest = partial(_emptiest, width)
        states, chosen, dropped = follow(growth, held_bytes, width, growth.least_bytes, fittest)
        if states.shape[1]:
            taken = growth.least_bytes(states, growth.n)
            at = taken.argmin()
            held_bytes, choices = float(taken[at]), tuple(chosen[at].tolist())
        bound_bytes = max(bound_bytes, min(held_bytes, dropped))
        if bound_bytes >= held_bytes:
            break  # no state that was dropped leads to fewer bytes
    return Fewest(held_bytes, choices, bound_bytes)


def _emptiest(
    width: int,
    _states: States,
    bound: PerState,
    alive: Places,
    _done: int,
) -> Places:
    """Picks the `width` states with the least bounds among those at the indices `alive`."""
    return alive[np.argpartition(bound[alive], width)[:width]]
