"""Lists the bounds that a search may try: the neighbors of given bounds, or all bounds.

The bounds of a plan are the cuts that it uses. Bounds (0, 2, 5) make two stages: layers 0 and 1,
and layers 2 to 4. A neighbor of some bounds has a few of them moved, or one of them removed and
another cut inserted.

Long lists begin with the bounds whose busiest device works least. A search that ends early
has then seen the most promising bounds. Devices are compared rather than stages, because a device
may have several stages.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np

from jvpipe.planners.model.even import BusiestS
from jvpipe.planners.model.spans import Cuts


def moved_bounds(
    bounds: Sequence[int],
    cuts: Cuts,
    s: int,
    run: int,
    distances: Iterable[int],
) -> list[tuple[int, ...]]:
    """Lists the neighbors in which adjacent bounds have all moved by the same number of cuts.

    Args:
        bounds: of the stages; the first and the last stay.
        cuts: where a stage may begin or end.
        s: the index of the first bound that moves, at least 1.
        run: how many adjacent bounds move together; if the last bound is among them, there is no
            neighbor.
        distances: by how many cuts they move, towards either end of the model; at least 1 each.

    >>> moved_bounds((0, 2, 4, 6), np.arange(7), 1, run=2, distances=(1, 2))
    [(0, 1, 3, 6), (0, 3, 5, 6)]
    """
    end = s + run
    if end == len(bounds):
        return []
    places = np.searchsorted(cuts, bounds)
    # Bounds stay in strict order: between two equal bounds, a stage would have no layers.
    back = places[s] - places[s - 1] - 1
    ahead = places[end] - places[end - 1] - 1
    moves = (by for distance in distances for by in (-distance, distance))
    inner = (cuts[places[s:end] + by].tolist() for by in moves if -back <= by <= ahead)
    return [(*bounds[:s], *moved, *bounds[end:]) for moved in inner]


def shifted_bounds(
    bounds: Sequence[int],
    cuts: Cuts,
    busiest_s: BusiestS,
) -> list[tuple[int, ...]]:
    """Lists the neighbors in which one bound is removed and one is inserted farther away.

    The numbers of the stages in between change by one, which puts these stages on the next or the
    previous device. Bounds whose busiest device works least come first.

    Args:
        bounds: of the stages; the first and the last stay.
        cuts: where a stage may begin or end.
        busiest_s: counts the seconds for which the busiest device works.
    """
    others = sorted(set(cuts.tolist()) - set(bounds))
    shifted = []
    for before, gone, after in zip(bounds, bounds[1:], bounds[2:], strict=False):
        kept = {*bounds} - {gone}
        for new in others:
            # A cut between the two neighbors of the removed bound only moves that bound: no stage
            # changes its device, and `moved_bounds` lists the result.
            if not before < new < after:
                shifted.append(tuple(sorted({*kept, new})))
    return sorted(shifted, key=busiest_s)


def all_cuts(
    stages: int,
    cuts: Cuts,
    busiest_s: BusiestS,
) -> list[tuple[int, ...]]:
    """Lists all possible bounds; bounds whose busiest device works least come first.

    Args:
        stages: how many stages there are.
        cuts: where a stage may begin or end.
        busiest_s: counts the seconds for which the busiest device works.
    """
    first, *inner, last = cuts.tolist()
    chosen = combinations(inner, stages - 1)
    every = [(first, *some, last) for some in chosen]
    return sorted(every, key=busiest_s)
