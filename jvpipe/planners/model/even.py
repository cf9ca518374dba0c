"""Cuts a model evenly: stages get equally many layers, or devices get nearly equal seconds."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
from jaxtyping import Float

from jvpipe.cost.slowness import work_s
from jvpipe.planners.model.chain_dp import least_sufficient
from jvpipe.planners.model.grids import sums
from jvpipe.planners.model.problem import Bounds, Decision, Problem
from jvpipe.planners.model.segments import Segments

BusiestS = Callable[[Sequence[int]], float]
"""Returns the seconds for which the busiest device works on a micro-batch, given the bounds."""


def even(problem: Problem) -> Decision:
    """Puts equally many layers on each stage, give or take one, and keeps everything.

    Memory limits are ignored. If an even cut would separate layers that must share a stage, the
    nearest allowed cut is taken.

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
    for s, cut in enumerate(targets, len(cuts) - stages + 1):
        first = places[-1] + 1
        # One allowed cut is left for each later bound.
        places.append(first + int(np.abs(cuts[first:s] - cut).argmin()))
    return Decision.keeping_all([*cuts[places].tolist(), layers])


def even_counts(layers: int, stages: int) -> list[int]:
    """Divides layers among stages; the first stages take one more each if there is a remainder.

    >>> even_counts(7, 3)
    [3, 2, 2]
    """
    share, more = divmod(layers, stages)
    return [share + (s < more) for s in range(stages)]


def balanced(problem: Problem) -> Bounds:
    """Finds bounds that give devices nearly equal work.

    The search begins with the bounds whose longest stage takes the least time. It then moves one
    bound by one cut at a time, as long as a move is better. A move is better if the busiest device
    has less to do afterwards. It is also better if the busiest device has as much to do as before
    and the work is spread more evenly (the squares of seconds have a smaller sum).

    Args:
        problem: gives the layers, the stages, the devices and their slowness.
    """
    cuts = Segments(problem).cuts
    layer_s = np.array(work_s(problem.costs.layers))
    every_s = (layer_s * (problem.slowness(s) or 1.0) for s in range(problem.devices))
    # totals[d, c]: the seconds of all layers before cut c on device d. Bounds are indices of cuts.
    totals = np.array([sums(device_s)[cuts] for device_s in every_s])
    places = np.array(problem.places)
    best = _least_longest(totals[places])

    def rank(bounds: Sequence[int]) -> tuple[float, float]:
        stages_s = totals[places, bounds[1:]] - totals[places, bounds[:-1]]
        devices_s = np.bincount(places, stages_s)
        unevenness = (devices_s**2).sum() + (stages_s**2).sum()
        return float(devices_s.max().round(12)), float(unevenness)

    # The loop ends because each move lowers the rank, and there are finitely many bounds.
    better = True
    while better:
        better = False
        for s in range(1, problem.stages):
            for by in (-1, 1):
                moved = best.copy()
                moved[s] += by
                if moved[s - 1] < moved[s] < moved[s + 1] and rank(moved) < rank(best):
                    best = moved
                    better = True
    return tuple(cuts[best].tolist())


def busiest_s(problem: Problem) -> BusiestS:
    """Returns a function that counts for how long the busiest device works on a micro-batch.

    Args:
        problem: gives the layers, the stages, the devices and their slowness.
    """
    usual_s = np.array(work_s(problem.costs.layers))
    places = problem.places
    layers_s = [usual_s * (problem.slowness(s) or 1.0) for s in range(problem.stages)]

    def of_bounds(bounds: Sequence[int]) -> float:
        works_s = [0.0] * problem.devices
        for s, (i, j) in enumerate(pairwise(bounds)):
            works_s[places[s]] += layers_s[s][i:j].sum()
        return max(works_s)

    return of_bounds


def _least_longest(totals: Float[np.ndarray, "stages cuts"]) -> list[int]:
    """Finds the bounds whose longest stage takes the least time; later stages are filled first.

    The least time is found by halving an interval. To try a time, the cuts at which stages can end
    are found, from the first stage to the last. A stage begins at the nearest cut before its end at
    which the stages before it can end, because a farther cut would only make it longer. No stage
    may take more than the time tried, with one exception: a stage of one piece, which is the layers
    between neighbouring cuts, may also take `least_s`. That is the time of the slowest piece on its
    fastest device, and the longest stage takes at least that in any case. Each of some 40 tries
    takes O(stages * cuts).

    Args:
        totals: for each stage, the seconds of all layers before each cut on the stage's device.

    Returns:
        The indices of the bounds among the cuts.
    """
    stages, count = totals.shape
    index = np.arange(count)
    least_s = float(np.diff(totals).min(0).max())

    def filled(longest_s: float) -> list[int] | None:
        ends = [index == 0]  # for each number of stages, whether they can end at a cut
        for s in range(stages):
            begins = np.maximum.accumulate(np.where(ends[s], index, -1))[:-1]
            is_piece = begins == index[:-1]
            allowed_s = np.where(is_piece, max(longest_s, least_s), longest_s)
            taken_s = totals[s, 1:] - totals[s, begins]
            fits = (begins >= 0) & (taken_s <= allowed_s)
            ends.append(np.append(False, fits))
        if not ends[-1][-1]:
            return None
        bounds = [count - 1]
        for s in reversed(range(stages)):
            end = bounds[-1]
            taken_s = totals[s, end] - totals[s, :end]
            fits = ends[s][:end] & (taken_s <= longest_s)
            # If the stage would take too long from any cut, it is one piece.
            bounds.append(int(fits.argmax()) if fits.any() else end - 1)
        return bounds[::-1]

    # Halving is correct because a time suffices if any shorter time does.
    high = float(totals[:, -1].max())
    best = filled(least_sufficient(lambda tried_s: bool(filled(tried_s)), 0.0, high, 1e-12))
    assert best is not None, "there are at least as many layers as stages"
    return best
