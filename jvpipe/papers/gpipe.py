"""GPipe's planner (Huang et al., 2019, section 2): the variance of the stages' estimated costs is as small as can be.

Legend: a stage's cost is the seconds of its forward. Their mean is the same however the model is cut, so the least sum
of squares is the least variance; a dynamic program over the cuts finds it.
"""

import numpy as np

from jvpipe.papers.kept_stages import KeptStages
from jvpipe.planners.model.chain_dp import least_path
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision, Problem


def gpipe(problem: Problem) -> Decision:
    """GPipe's cuts, and its rematerialisation: a stage keeps its input alone and computes all else again.

    GPipe looks at no memory limit. ValueError if `together` leaves too few places to cut.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> layers = tuple(LayerCost("layer", s, s, (Option(8),)) for s in (1.0, 1.0, 1.0, 3.0))
    >>> gpipe(Problem(Costs(layers), 2, find_schedule("gpipe"), 4))
    Decision(bounds=(0, 3, 4), choices=(-1, -2, -2, -1))
    """
    kept = KeptStages(problem)
    _, places = least_path([kept.forward_s(s) ** 2 for s in range(problem.stages)], np.add)
    assert places is not None, "there are as many places as stages need"
    bounds = tuple(int(kept.cuts[place]) for place in places)
    return Decision(
        bounds,
        tuple(RECOMPUTE if layer in bounds else RECOMPUTE_CHAIN for layer in range(bounds[-1])),
    )
