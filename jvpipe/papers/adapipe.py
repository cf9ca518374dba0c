"""AdaPipe's two dynamic programs: which values each stage recomputes, and where to cut.

Paper: Sun et al., "AdaPipe: Optimizing Pipeline Parallelism with Adaptive Recomputation and
Adaptive Partitioning", ASPLOS 2024.

Legend, in the paper's symbols:
    p       the number of stages, which are numbered from 0; s is a stage's number
    n       the number of micro-batches
    f, b    forward and backward seconds of a stage; b includes recomputation
    c       seconds of the transfers between a stage and the one before it, in both directions

The first program (`knapsack.py`) finds b for every stage and segment (consecutive layers). The
second program goes from the last stage to the first. For each layer at which stage s may begin, it
keeps the cuts of stages s to p - 1 that make T_s least:

    T_s = W_s + E_s + max(0, n - p) M_s
    W_s = f_s + max(W_{s+1} + b_{s+1} + c_{s+1}, (p - s - 1) f_s)    warm-up
    E_s = b_s + max(E_{s+1} + f_{s+1} + c_{s+1}, (p - s - 1) b_s)    ending
    M_s = max(M_{s+1}, f_s + b_s)                                    a step of the steady phase

M_s is also at least the seconds for which each of the stage's links is busy in a step of the steady
phase. T_0 is the seconds of a whole step of 1F1B. A schedule without a flush has only the steady
phase, so the program then minimizes M_s instead of T_s.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jvpipe.papers.knapsack import Recomputation
from jvpipe.papers.limits import plan_or_raise
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Segments


def adapipe(problem: Problem) -> Decision:
    """Plans as AdaPipe does, with recomputation and without swaps.

    Bytes are rounded up to multiples of a unit, the quantum (`knapsack.py`).

    Raises:
        Infeasible: nothing fits.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> keep, recompute = Option(kept_bytes=4), Option(kept_bytes=0, extra_s=1.0)
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (keep, recompute)),) * 6)
    >>> adapipe(Problem(costs, 2, find_schedule("1f1b"), microbatches=4, memory_limit_bytes=12))
    Decision(bounds=(0, 3, 6), choices=(1, 1, 0, 0, 0, 0))
    """
    return plan_or_raise(problem, "adapipe", try_adapipe)


class Suffix(NamedTuple):
    """The best plans of stages s to p - 1; in entry i of an array, stage s begins at layer i.

    W_s and E_s are infinite if no plan fits.

    Attributes:
        warmup_s: W_s.
        ending_s: E_s.
        steady_s: M_s.
        forward_s: f_s.
        backward_s: b_s.
        comm_s: c_s.
        end: the layer at which stage s ends.
    """

    warmup_s: np.ndarray
    ending_s: np.ndarray
    steady_s: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray
    comm_s: np.ndarray
    end: np.ndarray

    @staticmethod
    def empty(layers: int) -> "Suffix":
        """Returns the suffix without stages, which begins after the last layer."""
        nothing = np.full(layers + 1, np.inf)
        nothing[layers] = 0.0
        return Suffix(nothing, nothing, *[np.zeros(layers + 1)] * 5)


def try_adapipe(problem: Problem) -> Decision | None:
    """Plans under the problem's own limit; None if nothing fits."""
    segments = Segments(problem)
    recomputation = Recomputation(segments)
    suffixes = [Suffix.empty(len(problem.costs.layers))]
    for s in reversed(range(problem.stages)):
        # Stage s needs only the suffix after it, so one pass from the last stage is enough.
        suffixes.insert(0, _before(suffixes[0], s, segments, recomputation))
    if np.isinf(suffixes[0].warmup_s[0]):
        return None
    bounds = [0]
    for suffix in suffixes[:-1]:
        bounds.append(int(suffix.end[bounds[-1]]))
    choices: list[int] = []
    for s, (i, j) in enumerate(pairwise(bounds)):
        choices += recomputation.choices(s, i, j)
    return Decision(tuple(bounds), tuple(choices))


def _before(
    after: Suffix,
    s: int,
    segments: Segments,
    recomputation: Recomputation,
) -> Suffix:
    """Finds the best stages s to p - 1, given the best later ones: a step of the program."""
    problem = segments.problem
    later = problem.stages - s - 1  # p - s - 1
    steady_steps = max(0, problem.microbatches - problem.stages)  # max(0, n - p)
    suffix = Suffix(*(np.full_like(column, np.inf) for column in after))
    cuts = segments.cuts
    for i in cuts[:-1].tolist():
        # For a stage that begins at layer i, all ends that fit are evaluated at once.
        row = segments.row(s, i)
        extra_s = recomputation.extra_s[s, i]
        ends = cuts[cuts > i]
        fits = np.isfinite(extra_s[ends] + after.warmup_s[ends])
        ends = ends[fits]
        if not len(ends):
            continue
        f = row.forward_s[0, ends]
        b = row.compute_s[0, ends] - f + extra_s[ends]
        c = row.comm_s[0, ends]
        next_comm_s = after.comm_s[ends]
        warmup_s = after.warmup_s[ends] + after.backward_s[ends] + next_comm_s
        ending_s = after.ending_s[ends] + after.forward_s[ends] + next_comm_s
        W = f + np.maximum(warmup_s, later * f)
        E = b + np.maximum(ending_s, later * b)
        links_s = np.maximum(c, row.traffic_s[0, ends])
        stage_s = np.maximum(f + b, links_s)
        M = np.maximum(after.steady_s[ends], stage_s)
        unsteady_s = W + E
        T = unsteady_s + steady_steps * M if problem.schedule.synchronous else M
        best = np.lexsort((unsteady_s, T))[0]  # the least T; if several are equal, the least W + E
        found = (W, E, M, f, b, c, ends)
        for column, values in zip(suffix, found, strict=True):
            column[i] = values[best]
    return suffix
