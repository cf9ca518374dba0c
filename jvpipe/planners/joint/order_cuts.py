"""Cuts for orders of tasks: devices that work as long as each other, and the neighbours of cuts."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.segments import Cuts

_EQUAL_S = 1e-12
"""By which part seconds may differ that are as long."""


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


def shifted_bounds(
    problem: Problem, bounds: Sequence[int], cuts: Cuts, layer_s: Float[np.ndarray, " layers"]
) -> list[tuple[int, ...]]:
    """Lists the bounds with one taken away and another put in: all stages between move on to the next device.

    Those whose busiest device works least come first.

    Args:
        problem: whose stages and devices count.
        bounds: of the stages, the first and the last of which stay.
        cuts: where a stage may begin or end.
        layer_s: seconds of each layer's forward and backward.
    """
    others = sorted(set(cuts.tolist()) - set(bounds))
    every = [
        tuple(sorted({*bounds} - {bounds[gone]} | {new}))
        for gone in range(1, len(bounds) - 1)
        for new in others
        if not bounds[gone - 1] < new < bounds[gone + 1]
    ]
    return sorted(every, key=partial(busiest_s, problem, layer_s))


def busiest_s(
    problem: Problem, layer_s: Float[np.ndarray, " layers"], bounds: Sequence[int]
) -> float:
    """Counts what the device works that works longest.

    Args:
        problem: whose stages and devices count.
        layer_s: seconds of each layer's forward and backward, on a device as the costs say.
        bounds: of the stages.
    """
    works_s = [0.0] * problem.devices
    for s, (place, (i, j)) in enumerate(zip(problem.places, pairwise(bounds), strict=True)):
        slower = problem.slowness(s)
        works_s[place] += float(
            (layer_s[i:j] * slower[i:j]).sum() if slower else layer_s[i:j].sum()
        )
    return max(works_s)
