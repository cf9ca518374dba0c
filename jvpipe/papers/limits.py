"""What a heuristic planner says when it finds nothing: a limit under which it does."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate

LIMIT_GROWTH_PARTS = 20
"""The share of the bytes of keeping everything that is added until the planner answers: one part in this many."""
LIMIT_TOLERANCE = 0.02
"""How close the limit that is named comes to the one at which the planner begins to fail, of itself."""


def plan_or_raise(
    problem: Problem, planner: str, attempt: Callable[[Problem], Decision | None]
) -> Decision:
    """Gives what `attempt` finds, which answers None if nothing that it looks at fits.

    Args:
        problem: what is to be planned.
        planner: its name.
        attempt: decides, or answers None, without looking for a limit that would do.

    Raises `Infeasible` then, with a limit at which it was seen to answer, found by bisection from above.
    """
    decision = attempt(problem)
    if decision is not None:
        return decision
    limit = problem.memory_limit_bytes
    assert limit is not None, "without a limit everything may be kept"
    decision = attempt(replace(problem, memory_limit_bytes=None))
    assert decision is not None, "without a limit everything may be kept"
    below, enough = limit, evaluate(problem, decision).limit_bytes
    while (nearer := attempt(replace(problem, memory_limit_bytes=enough))) is None:
        enough += max(
            1, enough // LIMIT_GROWTH_PARTS
        )  # a planner may count more bytes than there are
    decision = nearer
    while enough - below > max(1, LIMIT_TOLERANCE * enough):
        middle = (below + enough) // 2
        nearer = attempt(replace(problem, memory_limit_bytes=middle))
        if nearer is None:
            below = middle
        else:
            enough, decision = middle, nearer
    peaks = [
        cost.peak_bytes + problem.less_bytes(s)
        for s, cost in enumerate(evaluate(problem, decision).stages)
    ]
    stage, excess = peaks.index(max(peaks)), enough - limit
    raise Infeasible(
        f"{planner} finds no plan under {limit} bytes per device: the smallest limit at which it was seen to find one "
        f"is {enough} bytes, {excess} more than this limit, and stage {stage} is the fullest; "
        f"raise the limit, add stages, or use smaller micro-batches",
        stage=stage,
        excess_bytes=excess,
        smallest_limit_bytes=enough,
    )


def no_cuts_fit(planner: str, limit: int | None, peaks: Sequence[float]) -> Infeasible:
    """Makes the error for a limit that no cuts keep, given the bytes of the stages of those that need least.

    Args:
        planner: its name.
        limit: bytes per device.
        peaks: bytes of the stages of those cuts.

    >>> no_cuts_fit("dapple", 100, [80.0, 124.0]).smallest_limit_bytes
    124
    """
    assert limit is not None, "without a limit everything fits"
    stage = int(np.argmax(peaks))
    smallest = int(peaks[stage])
    return Infeasible(
        f"{planner} keeps every activation, and then nothing fits into {limit} bytes per device: stage {stage} of the "
        f"smallest plan takes {smallest - limit} bytes more. The smallest limit that would do is {smallest} bytes; "
        f"or use smaller micro-batches, or a planner that swaps and recomputes",
        stage=stage,
        excess_bytes=smallest - limit,
        smallest_limit_bytes=smallest,
    )
