"""The neighbours of cuts (bounds moved, removed or inserted), and how long devices then work."""

from collections.abc import Sequence
from functools import partial
from itertools import combinations, pairwise

import numpy as np
from jaxtyping import Float

from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.segments import Cuts


def moved_bounds(
    bounds: Sequence[int], cuts: Cuts, run: int = 1, count: int = 1, first: int | None = None
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
    at = [int(place) for place in np.searchsorted(cuts, bounds)]
    neighbours = []
    for s in range(1, len(bounds) - run) if first is None else [first]:
        for by in (step * sign for step in range(1, count + 1) for sign in (-1, 1)):
            moved = [place + by for place in at[s : s + run]]
            # Bounds stay in order: no stage loses its last layer.
            if s + run < len(at) and at[s - 1] < moved[0] and moved[-1] < at[s + run]:
                inner = (int(cuts[place]) for place in moved)
                neighbours.append((*bounds[:s], *inner, *bounds[s + run :]))
    return neighbours


def shifted_bounds(problem: Problem, bounds: Sequence[int], cuts: Cuts) -> list[tuple[int, ...]]:
    """Lists the bounds with one taken away and another put in: all stages between move on to the
    next device.

    Cuts whose busiest device works least come first.

    Args:
        problem: whose stages and devices count.
        bounds: of the stages, the first and the last of which stay.
        cuts: where a stage may begin or end.
    """
    others = sorted(set(cuts.tolist()) - set(bounds))
    every = [
        tuple(sorted({*bounds} - {bounds[gone]} | {new}))
        for gone in range(1, len(bounds) - 1)
        for new in others
        if not bounds[gone - 1] < new < bounds[gone + 1]
    ]
    return sorted(every, key=partial(busiest_s, problem))


def all_cuts(problem: Problem, cuts: Cuts) -> list[tuple[int, ...]]:
    """Lists all cuts, those whose busiest device works least first.

    Args:
        problem: whose stages and devices count.
        cuts: where a stage may begin or end.
    """
    first, *inner, last = cuts.tolist()
    every = [(first, *some, last) for some in combinations(inner, problem.stages - 1)]
    return sorted(every, key=partial(busiest_s, problem))


def busiest_s(problem: Problem, bounds: Sequence[int]) -> float:
    """Counts what the device works that works longest.

    Args:
        problem: whose stages and devices count.
        bounds: of the stages.
    """
    works_s = [0.0] * problem.devices
    every_s = layer_s(problem)
    for s, (place, (i, j)) in enumerate(zip(problem.places, pairwise(bounds), strict=True)):
        slower = problem.slowness(s)
        works_s[place] += float(
            (every_s[i:j] * slower[i:j]).sum() if slower else every_s[i:j].sum()
        )
    return max(works_s)


def layer_s(problem: Problem) -> Float[np.ndarray, " layers"]:
    """Returns the seconds of each layer's forward and backward, on a device as the costs say."""
    return np.array([layer.forward_s + layer.backward_s for layer in problem.costs.layers])
