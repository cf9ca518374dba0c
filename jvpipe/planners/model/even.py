"""Even: the same number of layers per stage, give or take one."""

from itertools import accumulate

import numpy as np

from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Segments


def even(problem: Problem) -> Decision:
    """As many layers on each stage, everything kept; no cost is looked at, nor the memory limit.

    Where layers must stay together, each cut goes to the nearest place that is free.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> layer = LayerCost("layer", 1.0, 2.0, (Option(8),))
    >>> even(Problem(Costs((layer,) * 7), 3, find_schedule("1f1b"), 4)).bounds
    (0, 3, 5, 7)
    """
    cuts, stages = Segments(problem).cuts, problem.stages
    wanted = [*accumulate(even_counts(len(problem.costs.layers), stages))][:-1]
    places = [0]
    for s, cut in enumerate(wanted):
        first, last = (
            places[-1] + 1,
            len(cuts) - stages + s,
        )  # a place must be left for each cut to come
        places.append(first + int(np.abs(cuts[first : last + 1] - cut).argmin()))
    return Decision.keeping_all(
        [*(int(cuts[place]) for place in places), len(problem.costs.layers)]
    )


def even_counts(layers: int, stages: int) -> list[int]:
    """Layers per stage; the first stages take one more where it does not divide.

    >>> even_counts(7, 3)
    [3, 2, 2]
    """
    each, more = divmod(layers, stages)
    return [each + (s < more) for s in range(stages)]
