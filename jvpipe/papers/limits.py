"""Errors of planners that find no plan; each names a limit under which the planner finds one.

A heuristic planner may fail under a limit that some plan would keep. It may also find a plan under
one limit and none under a slightly larger limit. So an error names only a limit with which the
planner was run and found a plan.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from jvpipe.papers.kept_stages import KeptStages
from jvpipe.papers.paper_effort import PAPER
from jvpipe.planners.model.chain_dp import least_path
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision


def plan_or_raise(
    problem: Problem,
    planner: str,
    attempt: Callable[[Problem], Decision | None],
) -> Decision:
    """Returns the plan that a planner finds.

    Args:
        problem: the problem to plan.
        planner: the planner's name, for the message.
        attempt: returns the planner's decision, or None if no plan that it considers fits.

    Raises:
        Infeasible: the planner finds no plan; the message names a limit under which it finds one. A
            bisection has lowered that limit.
    """
    decision = attempt(problem)
    if decision is not None:
        return decision
    limit = problem.memory_limit_bytes
    assert limit is not None, "without a limit everything may be kept"
    decision = attempt(replace(problem, memory_limit_bytes=None))
    assert decision is not None, "without a limit everything may be kept"
    # The planner has failed at the limit, even if this decision would keep it.
    below, enough = limit, max(limit + 1, evaluate_decision(problem, decision).limit_bytes)
    # A planner may count more bytes than its plan needs. Under a limit of just the needed bytes, it
    # would then reject its own plan. So the limit grows until the planner succeeds.
    while (nearer := attempt(replace(problem, memory_limit_bytes=enough))) is None:
        enough += max(1, enough // PAPER.growth_parts)
    decision = nearer
    # In each round the planner fails at `below` and succeeds at `enough`.
    while enough - below > max(1, PAPER.limit_tolerance * enough):
        middle = (below + enough) // 2
        nearer = attempt(replace(problem, memory_limit_bytes=middle))
        if nearer is None:
            below = middle
        else:
            enough, decision = middle, nearer
    stages = evaluate_decision(problem, decision).stages
    peaks = []
    for s, cost in enumerate(stages):
        # On a device with less memory than the others, the missing memory counts as used.
        peaks.append(cost.peak_bytes + problem.less_bytes(s))
    stage = peaks.index(max(peaks))
    raise Infeasible(
        f"{planner} finds no plan under {problem.limit_said}: the smallest tried limit at "
        f"which it finds one is {problem.enough_said(enough)}, "
        f"and stage {stage} is then the fullest; "
        f"raise the limit, add stages, or use smaller micro-batches",
        smallest_limit_bytes=enough,
    )


def no_cuts_fit(planner: str, kept: KeptStages) -> Infeasible:
    """Makes the error for a limit that no cuts keep.

    Args:
        planner: the planner's name.
        kept: the bytes of all segments, and the problem with the limit.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.planners.model.problem import Problem
    >>> from jvpipe.schedules import find_schedule
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (Option(40),)),) * 4)
    >>> problem = Problem(costs, 2, find_schedule("1f1b"), 4, memory_limit_bytes=100)
    >>> no_cuts_fit("dapple", KeptStages(problem)).smallest_limit_bytes
    120
    """
    problem, limit = kept.problem, kept.problem.memory_limit_bytes
    assert limit is not None, "without a limit everything fits"
    # These cuts make the fullest stage as small as possible.
    peak_bytes = [kept.peak_bytes(s) for s in range(problem.stages)]
    _, places = least_path(peak_bytes, np.maximum)
    assert places is not None, "there are as many places as stages need"
    pairs = zip(peak_bytes, pairwise(places), strict=True)
    peaks = [float(grid[ends]) for grid, ends in pairs]
    stage = int(np.argmax(peaks))
    smallest = int(peaks[stage])
    return Infeasible(
        f"{planner} keeps every activation, and so none of its plans keeps "
        f"{problem.limit_said}: "
        f"stage {stage} of the smallest plan takes {smallest - limit} bytes more. "
        f"The smallest limit that would do is {problem.enough_said(smallest)}. "
        f"Raise the limit, use smaller micro-batches, or a planner that swaps and recomputes",
        smallest_limit_bytes=smallest,
    )
