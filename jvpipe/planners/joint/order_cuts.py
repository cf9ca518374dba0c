"""The neighbours of cuts (bounds moved, removed or inserted), and how long devices then work."""

from collections.abc import Sequence
from functools import partial
from itertools import combinations, pairwise

import numpy as np
from jaxtyping import Float

from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.segments import Cuts


def moved_bounds(
    bounds: Sequence[int],
    cuts: Cuts,
    run: int = 1,
    count: int = 1,
    first: int | None = None,
) -> list[tuple[int, ...]]:
    """Lists the bounds with some beside each other moved, all of them as far and the same way.

    Args:
        bounds: of the stages, the first and the last of which stay.
        cuts: where a stage may begin or end.
        run: how many are moved together.
        count: places by which they are moved at most.
        first: of those that are moved; any unless given.

    >>> moved_bounds((0, 2, 4, 6), np.arange(7), run=2)
    [(0, 1, 3, 6), (0, 3, 5, 6)]
    """
    places = np.searchsorted(cuts, bounds).tolist()
    firsts = range(1, len(bounds) - run) if first is None else [first]
    neighbours = []
    for s in firsts:
        behind = s + run
        for step in range(1, count + 1):
            for by in (-step, step):
                moved = [place + by for place in places[s:behind]]
                # Bounds stay in order: no stage loses its last layer.
                follows = behind < len(places) and places[s - 1] < moved[0]
                if follows and moved[-1] < places[behind]:
                    inner = cuts[moved].tolist()
                    neighbours.append((*bounds[:s], *inner, *bounds[behind:]))
    return neighbours


def shifted_bounds(
    problem: Problem,
    bounds: Sequence[int],
    cuts: Cuts,
) -> list[tuple[int, ...]]:
    """Lists the bounds with one removed and another inserted: all stages between move by a device.

    Args:
        problem: whose stages and devices count.
        bounds: of the stages, the first and the last of which stay.
        cuts: where a stage may begin or end.

    Returns:
        The bounds whose busiest device works least come first.
    """
    others = sorted(set(cuts.tolist()) - set(bounds))
    shifted = []
    for gone in range(1, len(bounds) - 1):
        kept = [*bounds[:gone], *bounds[gone + 1 :]]
        for new in others:
            # Between these two a bound is only moved: no stage gets another device.
            if not bounds[gone - 1] < new < bounds[gone + 1]:
                shifted.append(tuple(sorted([*kept, new])))
    return sorted(shifted, key=partial(busiest_s, problem))


def all_cuts(problem: Problem, cuts: Cuts) -> list[tuple[int, ...]]:
    """Lists all cuts, those whose busiest device works least first.

    Args:
        problem: whose stages and devices count.
        cuts: where a stage may begin or end.
    """
    first, *inner, last = cuts.tolist()
    chosen = combinations(inner, problem.stages - 1)
    every = [(first, *some, last) for some in chosen]
    return sorted(every, key=partial(busiest_s, problem))


def busiest_s(problem: Problem, bounds: Sequence[int]) -> float:
    """Counts the seconds of the device that works longest.

    Args:
        problem: whose stages and devices count.
        bounds: of the stages.
    """
    works_s = [0.0] * problem.devices
    every_s = layer_s(problem)
    for s, (i, j) in enumerate(pairwise(bounds)):
        stage_s = every_s[i:j]
        slowness = problem.slowness(s)
        if slowness:
            stage_s = stage_s * slowness[i:j]
        works_s[problem.places[s]] += float(stage_s.sum())
    return max(works_s)


def layer_s(problem: Problem) -> Float[np.ndarray, " layers"]:
    """Returns the seconds of each layer's forward and backward, on a device as the costs say."""
    return np.array([layer.forward_s + layer.backward_s for layer in problem.costs.layers])
