"""PipeDream's planner for straight pipelines: the slowest stage is as fast as possible.

Paper: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
section 3.1. `replication.py` has the paper's plans with replicated stages.

A dynamic program over the cuts finds the plan whose slowest stage or transfer is fastest. The
program is exact: the longest time of several stages is the larger of the last stage's time and the
longest time of all earlier stages. So of all plans for the earlier stages, only the best is needed.
"""

import numpy as np

from jvpipe.papers.kept_stages import KeptStages
from jvpipe.papers.limits import no_cuts_fit
from jvpipe.planners.model.chain_dp import least_path
from jvpipe.planners.model.problem import Decision, Problem


def pipedream(problem: Problem) -> Decision:
    """Plans as PipeDream does; every residual is kept.

    The slowest stage or transfer (`bottleneck_s` of `evaluate_decision`) is as fast as the limit
    allows. Bytes are counted for the problem's own schedule. Under the schedule `pipedream`, stage
    s of S holds S - s versions of its parameters and S - s sets of activations, as in the paper.

    Raises:
        Infeasible: nothing fits.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.cost.hardware import Link
    >>> from jvpipe.schedules import find_schedule
    >>> convolution = LayerCost("convolution", 1.0, 2.0, (Option(8),))
    >>> dense = LayerCost("dense", 0.5, 0.5, (Option(8),), parameter_bytes=1000)
    >>> costs = Costs((convolution, convolution, convolution, dense))
    >>> problem = Problem(costs, 4, find_schedule("pipedream"), 4, peer=Link(100.0))
    >>> pipedream(problem).bounds
    (0, 1, 2, 3, 4)
    """
    kept = KeptStages(problem)
    costs = []
    for s in range(problem.stages):
        # A stage's transfers overlap with its work, so the slower of the two counts.
        slowest = np.maximum(kept.seconds(s) + kept.once_s(s), kept.comm_s(s))
        costs.append(kept.where_it_fits(s, slowest))
    _, places = least_path(costs, np.maximum)
    if places is None:
        raise no_cuts_fit("pipedream", kept)
    return kept.decision(places)
