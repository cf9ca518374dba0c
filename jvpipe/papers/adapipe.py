"""AdaPipe's two dynamic programs (Sun et al., ASPLOS 2024): what each stage computes again, and where to cut.

Legend: p stages, n micro-batches; f, b are a stage's forward and backward seconds, recomputation included, c what it
receives and sends back to the stage before it. The first program (`knapsack.py`) gives b for every stage and segment.
The second goes from the last stage to the first and keeps, for each first layer of a stage, the cuts that make

    T_s = W_s + E_s + (n - p) M_s
    W_s = f_s + max(W_{s+1} + b_{s+1} + c_{s+1}, (p - s - 1) f_s)    warm-up
    E_s = b_s + max(E_{s+1} + f_{s+1} + c_{s+1}, (p - s - 1) b_s)    ending
    M_s = max(M_{s+1}, f_s + b_s)                                    a step of the steady phase

least, s counted from 0. M is also as long as the links are busy. T_0 is 1F1B's step. A schedule without a flush has
no phase but the steady one: there M_s is minimised.
"""

from dataclasses import dataclass

import numpy as np

from jvpipe.papers.knapsack import Recomputation
from jvpipe.papers.limits import plan_or_raise
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Segments


def adapipe(problem: Problem) -> Decision:
    """The decision of AdaPipe's planner: it recomputes, and swaps nothing.

    Raises `Infeasible` if nothing fits; bytes are counted in quanta, rounded up (see `knapsack.py`).

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> keep, recompute = Option(kept_bytes=4), Option(kept_bytes=0, extra_s=1.0)
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (keep, recompute)),) * 6)
    >>> adapipe(Problem(costs, 2, find_schedule("1f1b"), microbatches=4, memory_limit_bytes=12))
    Decision(bounds=(0, 3, 6), choices=(1, 1, 0, 0, 0, 0))
    """
    return plan_or_raise(problem, "adapipe", try_adapipe)


@dataclass(frozen=True)
class Suffix:
    """The stages from s on, by the first layer of stage s: the phases, stage s's own seconds, and where it ends.

    What does not fit takes infinitely long.
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
        """No stages: they begin behind the last layer."""
        nothing = np.full(layers + 1, np.inf)
        nothing[layers] = 0.0
        return Suffix(nothing, nothing, *[np.zeros(layers + 1)] * 5)


def try_adapipe(problem: Problem) -> Decision | None:
    """Decides, without looking for a limit that would do; None if nothing is found."""
    segments = Segments(problem)
    recomputation = Recomputation(segments)
    n = len(problem.costs.layers)
    suffixes = [Suffix.empty(n)]
    for s in reversed(range(problem.stages)):
        suffixes.insert(0, _before(suffixes[0], s, segments, recomputation))
    if np.isinf(suffixes[0].warmup_s[0]):
        return None
    bounds, choices = [0], []
    for s in range(problem.stages):
        bounds.append(int(suffixes[s].end[bounds[-1]]))
        choices += recomputation.choices(s, bounds[-2], bounds[-1])
    return Decision(tuple(bounds), tuple(choices))


def _before(after: Suffix, s: int, segments: Segments, recomputation: Recomputation) -> Suffix:
    """The stages from s on, given those after it."""
    problem = segments.problem
    later = problem.stages - s - 1
    suffix = Suffix(*(np.full(column.shape, np.inf) for column in vars(after).values()))
    cuts = segments.cuts
    for i in cuts[:-1].tolist():
        row, ends = segments.row(s, i), cuts[cuts > i]
        ends = ends[np.isfinite(recomputation.extra_s[s, i, ends] + after.warmup_s[ends])]
        if not len(ends):
            continue
        f = row.forward_s[0, ends]
        b = row.compute_s[0, ends] - f + recomputation.extra_s[s, i, ends]
        c = row.comm_s[0, ends]
        W = f + np.maximum(
            after.warmup_s[ends] + after.backward_s[ends] + after.comm_s[ends], later * f
        )
        E = b + np.maximum(
            after.ending_s[ends] + after.forward_s[ends] + after.comm_s[ends], later * b
        )
        M = np.maximum.reduce([after.steady_s[ends], f + b, c, row.traffic_s[0, ends]])
        T = (
            W + E + max(0, problem.microbatches - problem.stages) * M
            if problem.schedule.synchronous
            else M
        )
        best = np.lexsort((W + E, T))[0]
        for column, values in zip(vars(suffix).values(), (W, E, M, f, b, c, ends), strict=True):
            column[i] = values[best]
    return suffix
