"""DAPPLE's planner (Fan et al., 2021, section IV): the least latency of a step, estimated around a pivot stage.

Legend, in the paper's symbols:
    F_s, B_s    forward and backward seconds of stage s, of which there are 2 S - 1: transfers are stages between stages
    AR_s        the all-reduce of its gradients; 0 if a stage has one device
    M           micro-batches
    Q           the pivot: the stage with the fewest bubbles
    T_w         warm-up, sum of F_s for s <= Q
    T_s         steady phase, (M - 1) (F_Q + B_Q)
    T_e         ending (equation 1), the most over s of AR_s + (sum of B_a for s <= a <= Q, or - sum of B_a for
                Q <= a <= s behind the pivot)
    L           T_w + T_s + T_e (equation 2)
    T_PL(j, m)  the least L found with the first j layers on m of G devices, and the others as one stage that shares the
                work among the other G - m (equation 4); the plan behind it is what larger j go on from (equation 5)
    K_s, D      micro-batches in flight on stage s, and the most of them that a device has memory for
The paper prints T_e without B_Q for s = Q; if Q is the first stage its last backward would be left out, so it counts.
Here stages have one device each; `dapple_replicas.py` has those with several.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jvpipe.papers.kept_stages import KeptStages
from jvpipe.papers.limits import no_cuts_fit
from jvpipe.papers.pipedream import least_peaks
from jvpipe.planners.model.problem import Decision, Problem

Seconds = float | Float[np.ndarray, "..."]


class Phases(NamedTuple):
    """F_s, B_s and AR_s: numbers, or arrays for many plans at once."""

    forward_s: Seconds
    backward_s: Seconds
    reduce_s: Seconds = 0.0


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
    kept, devices = KeptStages(problem), problem.stages
    places = np.arange(len(kept.cuts))
    # The plan behind T_PL(j, m), for each j: seconds of its stages and transfers, and whether there is one.
    plan, there = [_finite(kept.compute_s(0)[0])], _fits(kept, 0)[0]
    begins = []
    for m in range(2, devices + 1):
        stage_s, fits = _finite(kept.compute_s(m - 1)), _fits(kept, m - 1) & there[:, None]
        way = [*(seconds[:, None] for seconds in plan), _finite(kept.comm_s), stage_s]
        if m < devices:
            way += [_finite(kept.comm_s[:, -1]), _finite(kept.compute_s(m)[:, -1]) / (devices - m)]
        latency = latency_s([Phases(0.0, seconds) for seconds in way], problem.microbatches)
        begin = np.where(fits, latency, np.inf).argmin(0)
        plan = [seconds[begin] for seconds in plan] + [
            _finite(kept.comm_s)[begin, places],
            stage_s[begin, places],
        ]
        there = fits[begin, places]
        begins.append(begin)
    if not there[-1]:
        raise no_cuts_fit("dapple", problem.memory_limit_bytes, least_peaks(kept))
    ends = [len(kept.cuts) - 1]
    for begin in reversed(begins):
        ends.append(int(begin[ends[-1]]))
    return kept.decision([0, *reversed(ends)])


def latency_s(stages: Sequence[Phases], microbatches: int) -> Seconds:
    """L of stages and the transfers between them.

    Q starts at the last stage and moves to an earlier one whose steady phase is longer than that of Q and the work
    between them (equation 3).

    >>> alike, dear = Phases(1.0, 2.0), Phases(3.0, 6.0)
    >>> latency_s([alike, Phases(0.0, 0.0), alike], 4), latency_s([alike, Phases(0.5, 0.5), dear], 4)
    (15.0, 40.0)

    An all-reduce is hidden by the backwards of the stages before its own, but not that of the first stage:

    >>> latency_s([alike, alike._replace(reduce_s=2.0)], 4), latency_s([alike._replace(reduce_s=2.0), alike], 4)
    (15.0, 17.0)
    """
    forward_s = list(accumulate(x.forward_s for x in stages))
    backward_s = list(accumulate(x.backward_s for x in stages))
    from_start_s = (
        x.reduce_s - done + x.backward_s for x, done in zip(stages, backward_s, strict=True)
    )
    ahead_s = list(
        accumulate(from_start_s, np.maximum)
    )  # T_e by the stages up to each, less B of all of these
    pivot_s, between_s, behind_s, least_s = -np.inf, 0.0, -np.inf, 0.0
    for s in range(len(stages) - 1, -1, -1):
        stage, upto_s = stages[s], backward_s[s]
        work_s = stage.forward_s + stage.backward_s
        steady_s = (microbatches - 1) * work_s
        ending_s = np.maximum(ahead_s[s] + upto_s, behind_s + upto_s - stage.backward_s)
        moves = steady_s > pivot_s + between_s
        least_s = np.where(moves, forward_s[s] + steady_s + ending_s, least_s)
        pivot_s, between_s = (
            np.where(moves, steady_s, pivot_s),
            np.where(moves, 0.0, between_s + work_s),
        )
        behind_s = np.maximum(behind_s, stage.reduce_s - upto_s)
    return least_s if np.ndim(least_s) else float(least_s)


def in_flight(stages: int, largest: int, eager: bool = False) -> tuple[int, ...]:
    """K_s by the paper's policy A, or B where transfers take as long as work (section V-C); `OneFOneB` runs them.

    Args:
        stages: S.
        largest: D.
        eager: policy B.

    >>> in_flight(4, 8), in_flight(4, 5, eager=True)
    ((4, 3, 2, 1), (5, 5, 3, 1))
    """
    return tuple(
        min(2 * behind - 1 if eager else behind, largest) for behind in range(stages, 0, -1)
    )


def _finite(grid: np.ndarray) -> np.ndarray:
    """Zeros where there is no segment, which are not looked at."""
    return np.where(np.isfinite(grid), grid, 0.0)


def _fits(kept: KeptStages, s: int) -> np.ndarray:
    """Where a segment can be stage s."""
    return np.isfinite(kept.where_it_fits(s, kept.compute_s(s)))
