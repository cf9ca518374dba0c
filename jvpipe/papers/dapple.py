"""DAPPLE's planner for one device per stage: finds the least latency of a step by a pivot stage.

Paper: Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP
2021, section IV. Here each stage has one device; `dapple_replicas.py` plans stages with several.

Legend, in the paper's symbols:
    S           the number of stages
    F_s, B_s    forward and backward seconds of stage s; a transfer counts as a stage between two
                stages, so that s takes 2 S - 1 values
    AR_s        seconds of the all-reduce of stage s's gradients; 0 if it has one device
    M           the number of micro-batches
    Q           the pivot: the stage with the fewest bubbles
    T_w         warm-up: the sum of F_s for s <= Q
    T_s         steady phase: (M - 1) (F_Q + B_Q)
    T_e         ending (equation 1): the largest over s of
                    AR_s + (sum of B_a for s <= a <= Q) for s <= Q,
                    AR_s - (sum of B_a for Q <= a <= s) for s > Q
    L           the latency of a step: T_w + T_s + T_e (equation 2)
    T_PL(j, m)  the least L found with the first j layers on m of G devices, and the other layers as
                one stage that is shared by the other G - m devices (equation 4)

For each (j, m), the dynamic program keeps the plan whose L is T_PL(j, m), and extends it by one
more stage, which ends at a larger j (equation 5).

    stage 0   F F . B F B F B . B       time runs to the right; no transfers, M = 4, Q = 1:
    stage 1   . F B F B F B F B .       T_w = F_0 + F_1, T_s = (M - 1) (F_1 + B_1), and
                                        T_e = B_1 + B_0

The paper's T_e does not count B_Q for s = Q. If Q is the first stage, a step would then lack its
last backward. So B_Q counts here.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jvpipe.papers.kept_stages import KeptStages
from jvpipe.papers.limits import no_cuts_fit
from jvpipe.planners.model.problem import Decision, Problem

Seconds = float | Float[np.ndarray, "..."]


class Phases(NamedTuple):
    """F_s, B_s and AR_s of a stage, as numbers, or as arrays for many plans at once."""

    forward_s: Seconds
    backward_s: Seconds
    reduce_s: Seconds = 0.0


def dapple(problem: Problem) -> Decision:
    """Plans all of a problem's stages as DAPPLE does; every residual is kept.

    The dynamic program keeps one plan for each (j, m): the plan with the least L. L is not a sum
    over stages, so an extension of a kept plan need not have the least L of all plans.

    Raises:
        Infeasible: nothing fits.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> layers = tuple(LayerCost("layer", s, 2 * s, (Option(8),)) for s in (1.0, 1.0, 1.0, 1.0, 3.0))
    >>> dapple(Problem(Costs(layers), 2, find_schedule("1f1b"), 4)).bounds
    (0, 4, 5)
    """
    kept = KeptStages(problem)
    devices = problem.stages
    places = np.arange(len(kept.cuts))
    # The plans whose L is T_PL(j, m), for all j at once. `plan` lists the seconds of their stages
    # and transfers, each as an array over j. `exists` says for which j there is a plan.
    plan = [_finite(kept.compute_s(0)[0])]
    exists = _fits(kept, 0)[0]
    begins = []
    for m in range(2, devices + 1):
        comm_s = _finite(kept.comm_s(m - 1))
        stage_s = _finite(kept.compute_s(m - 1))
        fits = _fits(kept, m - 1) & exists[:, None]
        # The row of a grid is the cut at which the last stage begins, the column is where it ends.
        before = [seconds[:, None] for seconds in plan]
        way = [*before, comm_s, stage_s]
        if m < devices:
            left_s = _finite(kept.compute_s(m)[:, -1])
            rest_s = left_s / (devices - m)
            onward_s = _finite(kept.comm_s(m)[:, -1])
            way += [onward_s, rest_s]
        # Without all-reduces, T_w + T_e is the sum of F_s + B_s for s <= Q. So L depends only on
        # F_s + B_s, and all seconds may count as backward.
        phases = [Phases(0.0, seconds) for seconds in way]
        latency = latency_s(phases, problem.microbatches)
        begin = np.where(fits, latency, np.inf).argmin(0)
        plan = [seconds[begin] for seconds in plan]
        plan += [comm_s[begin, places], stage_s[begin, places]]
        exists = fits[begin, places]
        begins.append(begin)
    if not exists[-1]:
        raise no_cuts_fit("dapple", kept)
    end = len(kept.cuts) - 1
    ends = [end]
    for begin in reversed(begins):
        # The stages are traced back from the last one. A stage begins where the plan before it
        # ends.
        end = int(begin[end])
        ends.insert(0, end)
    return kept.decision([0, *ends])


def latency_s(stages: Sequence[Phases], microbatches: int) -> Seconds:
    """Estimates L, the latency of a step, for stages and the transfers between them.

    Q starts at the last stage. It moves to an earlier stage whose steady phase is longer
    than that of Q plus the work of the stages between the two (equation 3). One pass over the
    stages finds Q and T_e, because every sum is a difference of two running sums.

    Args:
        stages: the stages in order, with transfers between them.
        microbatches: M.

    >>> light, heavy = Phases(1.0, 2.0), Phases(3.0, 6.0)
    >>> latency_s([light, Phases(0.0, 0.0), light], 4)
    15.0
    >>> latency_s([light, Phases(0.5, 0.5), heavy], 4)
    40.0

    Backwards of earlier stages hide an all-reduce. Nothing hides that of the first stage:

    >>> reducing = light._replace(reduce_s=2.0)
    >>> latency_s([light, reducing], 4), latency_s([reducing, light], 4)
    (15.0, 17.0)
    """
    forward_s = list(accumulate(x.forward_s for x in stages))
    backward_s = list(accumulate(x.backward_s for x in stages))
    # Entry s is AR_s minus the backwards of all stages before s. With the sum of B_a for a <= Q
    # added, it is the term of T_e for s <= Q.
    from_start_s = []
    for stage, up_to_s in zip(stages, backward_s, strict=True):
        from_start_s.append(stage.reduce_s - up_to_s + stage.backward_s)
    # Entry s is the largest of these numbers up to stage s.
    ahead_s = list(accumulate(from_start_s, np.maximum))
    pivot_s = -np.inf
    between_s = 0.0
    behind_s = -np.inf
    latency = 0.0
    for s in reversed(range(len(stages))):
        stage = stages[s]
        upto_s = backward_s[s]
        work_s = stage.forward_s + stage.backward_s
        steady_s = (microbatches - 1) * work_s
        after_s = behind_s + upto_s - stage.backward_s
        ending_s = np.maximum(ahead_s[s] + upto_s, after_s)
        moves = steady_s > pivot_s + between_s
        with_pivot_s = forward_s[s] + steady_s + ending_s
        latency = np.where(moves, with_pivot_s, latency)
        pivot_s = np.where(moves, steady_s, pivot_s)
        between_s = np.where(moves, 0.0, between_s + work_s)
        behind_s = np.maximum(behind_s, stage.reduce_s - upto_s)
    return latency if np.ndim(latency) else float(latency)


def _finite(grid: np.ndarray) -> np.ndarray:
    """Replaces infinite entries (segments without layers) by 0, so that no sum is NaN."""
    return np.where(np.isfinite(grid), grid, 0.0)


def _fits(kept: KeptStages, s: int) -> np.ndarray:
    """Returns a boolean grid: which segments fit the limit as stage s."""
    return np.isfinite(kept.where_it_fits(s, kept.compute_s(s)))
