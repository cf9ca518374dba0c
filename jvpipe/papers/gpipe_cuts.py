"""GPipe's planner: the least variance of the stages' estimated costs.

Paper: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", NeurIPS 2019, section 2.

The cost of a stage is the seconds of its forward. The mean of the costs is the same for all cuts,
so the cuts with the least sum of squares have the least variance. A dynamic program finds them.
"""

import numpy as np

from jvpipe.papers.kept_stages import KeptStages
from jvpipe.planners.model.chain_dp import least_path
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision, Problem


def gpipe_cuts(problem: Problem) -> Decision:
    """Plans as GPipe does: a stage keeps only its input and recomputes everything else.

    The memory limit is not considered.

    Raises:
        ValueError: `costs.together` leaves too few cuts for the stages.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> layers = tuple(LayerCost("layer", s, s, (Option(8),)) for s in (1.0, 1.0, 1.0, 3.0))
    >>> gpipe_cuts(Problem(Costs(layers), 2, find_schedule("gpipe"), 4))
    Decision(bounds=(0, 3, 4), choices=(-1, -2, -2, -1))
    """
    kept = KeptStages(problem)
    squares = [kept.forward_s(s) ** 2 for s in range(problem.stages)]
    _, places = least_path(squares, np.add)
    assert places is not None, "there are as many places as stages need"
    bounds = tuple(int(kept.cuts[place]) for place in places)
    # The first layer of a stage runs again from the stage's input, and each later layer runs again
    # from the layer before it (`RECOMPUTE_CHAIN`).
    layers = range(bounds[-1])
    choices = tuple(RECOMPUTE if layer in bounds else RECOMPUTE_CHAIN for layer in layers)
    return Decision(bounds, choices)
