"""From an order to better ones: single tasks change their place, or backwards are split or made whole.

A task moves 1 to 3 places within its device's list, never past its own stage and kind, so that values stay the same;
two moves of three begin beside an idle time. A move is kept if the step is not longer by the clock and its device has
room.
"""

import random
from itertools import pairwise

from jvpipe.ir.kinds import Kind
from jvpipe.planners.joint.order_loads import Clock, Loads, Order, Step, clocked

FARTHEST = 3
"""Places that a task moves at most."""
GAP_SHARE = 2 / 3
"""Moves that begin beside an idle time."""


def climbed(loads: Loads, order: Order, tries: int, seed: int = 0) -> Order:
    """The best order that so many tries lead to.

    Args:
        loads: the plan's stages.
        order: to begin with; it fits.
        tries: orders that are clocked.
        seed: of the choices.
    """
    draw, best = random.Random(seed), [list(steps) for steps in order]
    clock = clocked(loads, best)
    bound_s, stale = loads.bound_s(), 0
    while tries > 0 and clock.step_s > bound_s * (1 + 1e-9) and stale < 50 * loads.devices:
        d, steps = _neighbour(loads, best, clock, draw)
        stale += 1
        if steps is None or loads.peak_bytes(steps) > loads.room_bytes[d]:
            continue
        tries -= 1
        after = clocked(loads, [steps if e == d else before for e, before in enumerate(best)])
        if after.step_s <= clock.step_s:
            stale = 0 if after.step_s < clock.step_s else stale
            best[d], clock = steps, after
    return best


def _neighbour(loads: Loads, order: Order, clock: Clock, draw: random.Random) -> tuple[int, list[Step] | None]:
    """A device and other steps for it; None if the move that was drawn cannot be."""
    d = draw.randrange(len(order))
    steps = order[d]
    gaps = [i for i, (a, b) in enumerate(pairwise(range(len(steps))), 1) if clock.starts_s[d][b] > clock.ends_s[d][a]]
    at = draw.choice(gaps) if gaps and draw.random() < GAP_SHARE else draw.randrange(len(steps))
    far = draw.randint(1, FARTHEST)
    kind, s, m = steps[at]
    if kind is Kind.B and s and loads.splits[s] and draw.random() < 1 / 4:
        return d, [*steps[:at], (Kind.I, s, m), (Kind.W, s, m), *steps[at + 1 :]]
    if kind is Kind.I and draw.random() < 1 / 8:
        if any(other is Kind.W and stage == s and n < m for other, stage, n in steps[at:]):
            return d, None  # they add to the same sums, and come first
        return d, [(Kind.B, s, m) if one == steps[at] else one for one in steps if one != (Kind.W, s, m)]
    if draw.random() < 1 / 2:  # what comes later fills the gap
        return d, _moved(steps, min(len(steps) - 1, at + draw.randint(0, FARTHEST)), -far)
    return d, _moved(steps, at, far)


def _moved(steps: list[Step], at: int, by: int) -> list[Step] | None:
    """The steps with one of them elsewhere; None where it would pass its own stage and kind, or its other half."""
    to = min(max(at + by, 0), len(steps) - 1)
    kind, s, m = steps[at]
    passed = steps[to:at] if to < at else steps[at + 1 : to + 1]
    backwards = (Kind.B, Kind.I)
    for other, stage, n in passed:
        same = other is kind or (other in backwards and kind in backwards) or (kind is Kind.W and other is Kind.B)
        if stage == s and (same or n == m or (kind is Kind.B and other is Kind.W)):
            return None
    rest = steps[:at] + steps[at + 1 :]
    return None if to == at else [*rest[:to], steps[at], *rest[to:]]
