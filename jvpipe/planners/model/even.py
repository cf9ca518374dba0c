"""Even cuts: as many layers for each stage, give or take one, or as many seconds."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from jaxtyping import Float

from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Cuts, Segments

_EQUAL_S = 1e-12
"""By which part seconds may differ that are as long."""


def even(problem: Problem) -> Decision:
    """Puts equally many layers on each stage and keeps everything, whatever the limit.

    Where layers must stay together, each cut goes to the nearest place that is free.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> layer = LayerCost("layer", 1.0, 2.0, (Option(8),))
    >>> even(Problem(Costs((layer,) * 7), 3, find_schedule("1f1b"), 4)).bounds
    (0, 3, 5, 7)
    """
    cuts = Segments(problem).cuts
    stages = problem.stages
    layers = len(problem.costs.layers)
    *targets, _ = accumulate(even_counts(layers, stages))
    places = [0]
    for s, cut in enumerate(targets):
        first = places[-1] + 1
        last = len(cuts) - stages + s  # a place must be left for each cut to come
        away = np.abs(cuts[first : last + 1] - cut)
        places.append(first + int(away.argmin()))
    bounds = [int(cuts[place]) for place in places]
    return Decision.keeping_all([*bounds, layers])


def even_counts(layers: int, stages: int) -> list[int]:
    """Divides layers among stages; the first stages take one more where they do not divide.

    >>> even_counts(7, 3)
    [3, 2, 2]
    """
    share, more = divmod(layers, stages)
    return [share + (s < more) for s in range(stages)]


def balanced(
    problem: Problem, cuts: Cuts, layer_s: Float[np.ndarray, " layers"]
) -> tuple[int, ...]:
    """Finds bounds of equal work: they move until no device's work falls any more.

    Args:
        problem: whose stages and devices count.
        cuts: where a stage may begin or end; at least one more than there are stages.
        layer_s: seconds of each layer's forward and backward, on a device as the costs say.
    """
    totals = np.empty((problem.devices, len(cuts)))
    for s in range(problem.devices):
        slowness = np.array(problem.slowness(s) or 1.0)
        device_s = np.cumsum(layer_s * slowness)
        totals[s] = np.concatenate([[0.0], device_s])[cuts]
    places = np.array(problem.places)
    best = _least_longest(totals[places])

    def rank(bounds: Sequence[int]) -> tuple[float, float]:
        stages_s = totals[places, bounds[1:]] - totals[places, bounds[:-1]]
        devices_s = np.bincount(places, stages_s, problem.devices)
        unevenness = (devices_s**2).sum() + (stages_s**2).sum()
        return float(devices_s.max().round(12)), float(unevenness)

    # Each move lowers the rank, of which there are as many as bounds: it ends.
    better = True
    while better:
        better = False
        for s in range(1, problem.stages):
            for by in (-1, 1):
                moved = [*best[:s], best[s] + by, *best[s + 1 :]]
                in_order = moved[s - 1] < moved[s] < moved[s + 1]
                if in_order and rank(moved) < rank(best):
                    best = moved
                    better = True
    return tuple(int(cuts[place]) for place in best)


def _least_longest(totals: Float[np.ndarray, "stages cuts"]) -> list[int]:
    """Finds the bounds whose longest stage takes the least, later stages as full as they may be.

    Returns the positions of these bounds.

    Halves the interval of that least time: whether stages of at most so long suffice is seen by
    filling them one after the other from the last on. What is not found then is not there, as
    whoever leaves a layer for an earlier stage makes none of these shorter.

    Args:
        totals: of each stage's device, the seconds of the layers before each cut.
    """
    stages = len(totals)
    last = totals.shape[1] - 1

    def filled(longest_s: float) -> list[int]:
        bounds = [last]
        for s in reversed(range(stages)):
            end = bounds[-1]
            begin = int(np.searchsorted(totals[s], totals[s, end] - longest_s))
            # Each stage has a layer at least, this one and those before it.
            bounds.append(min(max(begin, s), end - 1))
        return bounds[::-1]

    low = 0.0
    # More time never makes bounds impossible: the interval of times is halved.
    high = float(totals[:, -1].max())
    while high - low > _EQUAL_S * high:
        middle = (low + high) / 2
        if filled(middle)[0] == 0:
            high = middle
        else:
            low = middle
    return filled(high)
