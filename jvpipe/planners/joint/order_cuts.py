"""Cuts and fates for orders, quickly: devices that work as long as each other, and one price per byte on each device.

Fates that swap are not looked at here: an order with what it leaves to I and W rarely waits long enough.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jvpipe.planners.model.problem import RECOMPUTE, Decision, Problem
from jvpipe.planners.model.segments import Cuts
from jvpipe.planners.model.stage_bytes import (
    StageBytes,
    option_bytes,
    recomputed_bytes,
    stage_bytes,
)
from jvpipe.schedules.schedule import Holding

_EQUAL_S = 1e-12
"""By which part seconds may differ that are as long."""
PRICES = 14
"""How often the price of a byte is halved or doubled."""


PerWay = Float[np.ndarray, "N C"]
Counts = Int[np.ndarray, "V K"]
"""Vectors of a schedule: for each stage of a device micro-batches in flight, and those between halves, in turn."""


class Ways(NamedTuple):
    """The choices of all layers that do not swap, `RECOMPUTE` the last, and what each takes; infinite where none is."""

    choices: Int[np.ndarray, "N C"]
    left_bytes: PerWay
    working_bytes: PerWay
    extra_s: PerWay

    @staticmethod
    def of(problem: Problem) -> "Ways":
        """Counts them for the layers of a problem."""
        layers = problem.costs.layers
        rows, columns = len(layers), 1 + max(len(layer.options) for layer in layers)
        choices = np.full((rows, columns), RECOMPUTE)
        left, working, extra = (np.full((rows, columns), np.inf) for _ in range(3))
        for row, layer in enumerate(layers):
            every = [(c, option_bytes(layer, option)) for c, option in enumerate(layer.options)]
            every.append((RECOMPUTE, recomputed_bytes(layer)))
            for at, (c, way) in enumerate((c, way) for c, way in every if not way.swapped):
                choices[row, at], left[row, at], working[row, at], extra[row, at] = (
                    c,
                    way.left,
                    way.working,
                    way.extra_s,
                )
        return Ways(choices, left, working, extra)

    def cheapest(self, layers: slice, in_flight: int, price: float) -> list[int]:
        """Lists the choices of some layers that take the least, seconds and bytes at a price; at no price the first.

        Args:
            layers: which.
            in_flight: micro-batches for which a choice leaves bytes.
            price: seconds per byte; if it is infinite, bytes alone count.
        """
        held, extra_s = in_flight * self.left_bytes[layers], self.extra_s[layers]
        if price == np.inf:
            held = held + self.working_bytes[layers]
            cost = np.where(held == held.min(1, keepdims=True), extra_s, np.inf)
        else:
            cost = extra_s + (price * held if price else 0.0)
        return self.choices[layers][np.arange(len(cost)), cost.argmin(1)].tolist()


def balanced(
    problem: Problem, cuts: Cuts, layer_s: Float[np.ndarray, " layers"]
) -> tuple[int, ...]:
    """Bounds of stages that take as long as each other, moved until no device's work falls any more.

    Args:
        problem: whose stages and devices count.
        cuts: where a stage may begin or end; at least one more than there are stages.
        layer_s: seconds of each layer's forward and backward, on a device as the costs say.
    """
    times = [np.array(problem.slowness(s) or 1.0) for s in range(problem.devices)]
    totals = np.array([np.concatenate([[0.0], np.cumsum(layer_s * each)])[cuts] for each in times])
    places = np.array(problem.places)
    best = _least_longest(totals[places])

    def rank(bounds: Sequence[int]) -> tuple[float, float]:
        stages_s = totals[places, bounds[1:]] - totals[places, bounds[:-1]]
        devices_s = np.bincount(places, stages_s, problem.devices)
        return float(devices_s.max().round(12)), float((devices_s**2).sum() + (stages_s**2).sum())

    better = True
    while better:
        better = False
        for s in range(1, problem.stages):
            for by in (-1, 1):
                moved = [*best[:s], best[s] + by, *best[s + 1 :]]
                if moved[s - 1] < moved[s] < moved[s + 1] and rank(moved) < rank(best):
                    best, better = moved, True
    return tuple(int(cuts[place]) for place in best)


def _least_longest(totals: Float[np.ndarray, "stages cuts"]) -> list[int]:
    """Returns the positions of bounds whose longest stage takes the least, later stages as full as they may be.

    Halves the interval of that least time: whether stages of at most so long suffice is seen by
    filling them one after the other from the last on. What is not found then is not there, as
    whoever leaves a layer for an earlier stage makes none of these shorter.

    Args:
        totals: of each stage's device, the seconds of the layers before each cut.
    """
    stages, last = len(totals), totals.shape[1] - 1

    def filled(longest_s: float) -> list[int]:
        bounds = [last]
        for s in reversed(range(stages)):
            begin = int(np.searchsorted(totals[s], totals[s, bounds[-1]] - longest_s))
            bounds.append(min(max(begin, s), bounds[-1] - 1))
        return bounds[::-1]

    low, high = 0.0, float(totals[:, -1].max())
    while high - low > _EQUAL_S * high:
        middle = (low + high) / 2
        low, high = (low, middle) if filled(middle)[0] == 0 else (middle, high)
    return filled(high)


def with_fates(
    problem: Problem,
    bounds: tuple[int, ...],
    share: float = 1.0,
    begin: Decision | None = None,
    ways: Ways | None = None,
) -> Decision | None:
    """These cuts with fates that keep the limit, of few seconds; None if there are none.

    Args:
        problem: whose schedule and limit count.
        bounds: of the stages.
        share: of what the schedule has in flight that has to fit.
        begin: whose fates are kept on devices whose layers are the same.
        ways: those of the problem, if they are known.
    """
    ways, choices = (
        ways or Ways.of(problem),
        [0] * bounds[-1] if begin is None else list(begin.choices),
    )
    before = None if begin is None else list(pairwise(begin.bounds))
    vectors = problem.schedule.held(problem.devices, problem.microbatches)
    for d, mine in enumerate(vectors):
        stages = [s for s, place in enumerate(problem.places) if place == d]
        same = before is not None and all(before[s] == bounds[s : s + 2] for s in stages)
        if not same and not _choose(problem, stages, bounds, mine, share, ways, choices):
            return None
    return Decision(bounds, tuple(choices))


def _choose(
    problem: Problem,
    stages: Sequence[int],
    bounds: Sequence[int],
    vectors: Sequence[Holding],
    share: float,
    ways: Ways,
    choices: list[int],
) -> bool:
    """Writes the choices of a device's layers at the least price of a byte that makes them fit; False if none does."""
    limit = problem.limit_of(problem.places[stages[0]])
    counts = np.array(vectors).reshape(len(vectors), -1)
    known: dict[tuple[int, tuple[int, ...]], StageBytes[int]] = {}  # many prices choose the same

    def fits(price: float) -> bool:
        held = []
        for s in stages:
            i, j = bounds[s : s + 2]
            choices[i:j] = chosen = ways.cheapest(slice(i, j), problem.in_flight[s], price)
            if (key := (s, tuple(chosen))) not in known:
                known[key] = stage_bytes(problem, s, i, j, choices)
            held.append(known[key])
        return limit is None or _joint_bytes(held, counts, share) <= limit

    if fits(0.0):
        return True
    if not fits(float("inf")):
        return False
    layers = [layer for s in stages for layer in problem.costs.layers[bounds[s] : bounds[s + 1]]]
    low, high = 1e-6, 1e6  # around seconds of forwards per byte that they leave
    per_byte = sum(x.forward_s for x in layers) / max(
        1, sum(x.options[0].kept_bytes for x in layers)
    )
    for _ in range(PRICES):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle * per_byte) else (middle, high)
    fits(low * per_byte)
    wanted = list(choices)
    if not fits(high * per_byte):
        fits(float("inf"))
    _relax(problem, stages, bounds, counts, share, wanted, choices)
    return True


def _relax(
    problem: Problem,
    stages: Sequence[int],
    bounds: Sequence[int],
    counts: Counts,
    share: float,
    wanted: Sequence[int],
    choices: list[int],
) -> None:
    """Makes the choices of a device's layers those that are wanted, one by one, where there is room."""
    limit = problem.limit_of(problem.places[stages[0]])
    assert limit is not None
    held = [stage_bytes(problem, s, bounds[s], bounds[s + 1], choices) for s in stages]
    for k, s in enumerate(stages):
        for at in range(bounds[s], bounds[s + 1]):
            before, choices[at] = choices[at], wanted[at]
            if before == wanted[at]:
                continue
            was, held[k] = held[k], stage_bytes(problem, s, bounds[s], bounds[s + 1], choices)
            if _joint_bytes(held, counts, share) > limit:
                choices[at], held[k] = before, was


def _joint_bytes(held: Sequence[StageBytes[int]], counts: Counts, share: float) -> int:
    """What `joint_bytes` counts, of stages that swap nothing."""
    each = [size for x in held for size in (x.kept, x.handed)]
    most = share * int((counts @ each).max())
    return int(sum(x.static for x in held) + most + max(x.beyond for x in held))


def moved_bounds(
    bounds: Sequence[int], cuts: Cuts, run: int = 1, most: int = 1
) -> list[tuple[int, ...]]:
    """Lists the bounds with some beside each other moved, all of them as far and the same way.

    Args:
        bounds: of the stages, the first and the last of which stay.
        cuts: where a stage may begin or end.
        run: how many are moved together.
        most: places by which they are moved at most.

    >>> moved_bounds((0, 2, 4, 6), np.arange(7), run=2)
    [(0, 1, 3, 6), (0, 3, 5, 6)]
    """
    at = [int(place) for place in np.searchsorted(cuts, bounds)]
    neighbours = []
    for s in range(1, len(bounds) - run):
        for by in (step * sign for step in range(1, most + 1) for sign in (-1, 1)):
            moved = [*at[:s], *(place + by for place in at[s : s + run]), *at[s + run :]]
            if all(a < b for a, b in pairwise(moved)):
                neighbours.append(tuple(int(cuts[place]) for place in moved))
    return neighbours
