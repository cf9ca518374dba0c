"""Lists the bounds that a search may try: the neighbors of given bounds, or all bounds.

The bounds of a plan are the cuts that it uses. Bounds (0, 2, 5) make two stages: layers 0 and 1,
and layers 2 to 4. A neighbor of some bounds has a few of them moved, or one of them removed and
another cut inserted.

A device may have several stages. So long lists begin with the bounds whose busiest device works
least: a search that ends early has then seen the most promising ones.
"""

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
    """Lists the neighbors in which adjacent bounds have moved together, by as many cuts each.

    Args:
        bounds: of the stages; the first and the last stay.
        cuts: where a stage may begin or end.
        run: how many adjacent bounds move together.
        count: the most cuts by which they move, towards either end of the model.
        first: the index of the first bound that moves; None: each index is tried.

    >>> moved_bounds((0, 2, 4, 6), np.arange(7), run=2)
    [(0, 1, 3, 6), (0, 3, 5, 6)]
    """
    places = np.searchsorted(cuts, bounds).tolist()
    firsts = range(1, len(bounds) - run) if first is None else [first]
    neighbors = []
    for s in firsts:
        behind = s + run
        for step in range(1, count + 1):
            for by in (-step, step):
                moved = [place + by for place in places[s:behind]]
                # Bounds stay in strict order: between two equal bounds is a stage without layers.
                follows = behind < len(places) and places[s - 1] < moved[0]
                if follows and moved[-1] < places[behind]:
                    inner = cuts[moved].tolist()
                    neighbors.append((*bounds[:s], *inner, *bounds[behind:]))
    return neighbors


def shifted_bounds(
    problem: Problem,
    bounds: Sequence[int],
    cuts: Cuts,
) -> list[tuple[int, ...]]:
    """Lists the neighbors in which one bound is removed and one is inserted farther away.

    The numbers of the stages in between change by one, which puts these stages on the next or the
    previous device. Bounds whose busiest device works least come first.

    Args:
        problem: gives the stages and the devices.
        bounds: of the stages; the first and the last stay.
        cuts: where a stage may begin or end.
    """
    others = sorted(set(cuts.tolist()) - set(bounds))
    shifted = []
    for gone in range(1, len(bounds) - 1):
        kept = [*bounds[:gone], *bounds[gone + 1 :]]
        for new in others:
            # A cut between the two neighbors of the removed bound only moves that bound: no stage
            # changes its device, and `moved_bounds` lists the result.
            if not bounds[gone - 1] < new < bounds[gone + 1]:
                shifted.append(tuple(sorted([*kept, new])))
    return sorted(shifted, key=partial(busiest_s, problem))


def all_cuts(problem: Problem, cuts: Cuts) -> list[tuple[int, ...]]:
    """Lists all possible bounds; bounds whose busiest device works least come first.

    Args:
        problem: gives the stages and the devices.
        cuts: where a stage may begin or end.
    """
    first, *inner, last = cuts.tolist()
    chosen = combinations(inner, problem.stages - 1)
    every = [(first, *some, last) for some in chosen]
    return sorted(every, key=partial(busiest_s, problem))


def busiest_s(problem: Problem, bounds: Sequence[int]) -> float:
    """Counts for how many seconds per micro-batch the busiest device works.

    Args:
        problem: gives the stages and the devices.
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
    """Returns the seconds of each layer's forward plus backward, on a device of usual speed."""
    return np.array([layer.forward_s + layer.backward_s for layer in problem.costs.layers])
