"""DAPPLE's planner (Fan et al., 2021, section IV): the least latency of a step, estimated around a pivot stage.

Legend, in the paper's symbols:
    F_s, B_s    forward and backward seconds of stage s, of which there are 2 S - 1: transfers are stages between stages
    M           micro-batches
    Q           the pivot: the stage with the fewest bubbles
    T_w         warm-up, sum of F_s for s <= Q
    T_s         steady phase, (M - 1) (F_Q + B_Q)
    T_e         ending, sum of B_s for s <= Q (equation 1 with nothing to reduce: pipelines are straight here)
    L           T_w + T_s + T_e (equation 2)
    T_PL(j, m)  the least L found with the first j layers on m of G devices, and the others as one stage that shares the
                work among the other G - m (equation 4); the plan behind it is what larger j go on from (equation 5)
The paper prints T_e without B_Q for s = Q; if Q is the first stage its last backward would be left out, so it counts.
K_s = min(S - s, D) micro-batches are in flight on stage s (policy A): what schedule `1f1b` has there, with D = M.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from jaxtyping import Float

from jvpipe.planners.model.keep_all import KeepAll, nothing_fits
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.published.pipedream import least_peaks

Seconds = float | Float[np.ndarray, "..."]


def dapple(problem: Problem) -> Decision:
    """DAPPLE's straight plan for all of the problem's stages; every residual is kept.

    Its dynamic program keeps one plan per (j, m), the one whose L is least so far: so it does not always find the least
    L of all. Raises `Infeasible` if nothing fits.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> layers = tuple(LayerCost("layer", s, 2 * s, (Option(8),)) for s in (1.0, 1.0, 1.0, 1.0, 3.0))
    >>> dapple(Problem(Costs(layers), 2, find_schedule("1f1b"), 4)).bounds
    (0, 4, 5)
    """
    kept, devices = KeepAll(problem), problem.stages
    places = np.arange(len(kept.cuts))
    # The plan behind T_PL(j, m), for each j: seconds of its stages and transfers, and whether there is one.
    plan, there = [_finite(kept.compute_s(0)[0])], _fits(kept, 0)[0]
    begins = []
    for m in range(2, devices + 1):
        stage_s, fits = _finite(kept.compute_s(m - 1)), _fits(kept, m - 1) & there[:, None]
        way = [*(seconds[:, None] for seconds in plan), _finite(kept.comm_s), stage_s]
        if m < devices:
            way += [_finite(kept.comm_s[:, -1]), _finite(kept.compute_s(m)[:, -1]) / (devices - m)]
        begin = np.where(fits, latency_s(way, problem.microbatches), np.inf).argmin(0)
        plan = [seconds[begin] for seconds in plan] + [_finite(kept.comm_s)[begin, places], stage_s[begin, places]]
        there = fits[begin, places]
        begins.append(begin)
    if not there[-1]:
        raise nothing_fits("dapple", problem.memory_limit_bytes, least_peaks(kept))
    ends = [len(kept.cuts) - 1]
    for begin in reversed(begins):
        ends.append(int(begin[ends[-1]]))
    return kept.decision([0, *reversed(ends)])


def latency_s(seconds: Sequence[Seconds], microbatches: int) -> Seconds:
    """L, from F_s + B_s of each stage and transfer in turn (numbers, or arrays for many plans at once).

    Q starts at the last stage and moves to an earlier one whose steady phase is longer than that of Q and the work
    between them (equation 3).

    >>> latency_s([3.0, 0.0, 3.0], 4), latency_s([3.0, 1.0, 9.0], 4)
    (15.0, 40.0)
    """
    before = list(accumulate(seconds))  # F + B of all stages up to each
    pivot_s, through, between = (microbatches - 1) * seconds[-1], before[-1], 0.0 * before[-1]
    for s in range(len(seconds) - 2, -1, -1):
        steady_s = (microbatches - 1) * seconds[s]
        moves = steady_s > pivot_s + between
        pivot_s, through = np.where(moves, steady_s, pivot_s), np.where(moves, before[s], through)
        between = np.where(moves, 0.0, between + seconds[s])
    return through + pivot_s if np.ndim(through) else float(through + pivot_s)


def _finite(grid: np.ndarray) -> np.ndarray:
    """Zeros where there is no segment, which are not looked at."""
    return np.where(np.isfinite(grid), grid, 0.0)


def _fits(kept: KeepAll, s: int) -> np.ndarray:
    """Where a segment can be stage s."""
    return np.isfinite(kept.where_it_fits(s, kept.compute_s(s)))
