"""vPipe's swap, recompute, repartition (Zhao et al., TPDS 2021, algorithms 1 to 3).

Two steps alternate until nothing improves. (a) Each stage by itself: swap what saves most, while the link to the host
has time left by activation traffic; then recompute what saves most per second. (b) A layer leaves the slowest stage
for a lighter neighbour. The slowest stage is the one with the most seconds, or, as long as some do not fit, the one
that is furthest over its limit. A neighbour that is as heavy passes a layer of its own on to the stage after it.
Initial cuts: `kernighan_lin.py`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, pairwise

from jvpipe.papers.kernighan_lin import initial_bounds
from jvpipe.papers.limits import plan_or_raise
from jvpipe.papers.selection import FateChanges, Selection
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Segments


def vpipe(problem: Problem) -> Decision:
    """Makes the decision of vPipe's planner: it minimises the slowest stage's seconds, whatever the schedule.

    Raises `Infeasible` where a stage does not fit when the alternation has come to its end.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> keep, recompute = Option(kept_bytes=4), Option(kept_bytes=0, extra_s=1.0)
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (keep, recompute)),) * 6)
    >>> vpipe(Problem(costs, 2, find_schedule("1f1b"), microbatches=4, memory_limit_bytes=12))
    Decision(bounds=(0, 3, 6), choices=(1, 1, 0, 0, 0, 0))
    """
    return plan_or_raise(problem, "vpipe", try_vpipe)


def swap_recompute(stage: Selection) -> None:
    """Changes a stage's fates until it fits (algorithm 2), or as far as that goes.

    What is swapped is hidden: its copies, and the activation traffic that goes first, take no longer than the stage
    computes. Only where all that recomputation saves is not enough, more is swapped than can be hidden.
    """
    stage.spend(stage.changes.swaps, lambda change: change.saved_bytes, stage.hides)
    stage.spend(stage.changes.recomputes, lambda change: change.per_second, lambda _: True)
    stage.spend(stage.changes.after, lambda change: change.saved_bytes, stage.host_has_room)


def try_vpipe(problem: Problem) -> Decision | None:
    """Decides, without looking for a limit that would do; None if nothing is found."""
    segments = Segments(problem)
    changes = {k: FateChanges(problem, k) for k in set(segments.in_flight)}

    @cache
    def stage(s: int, i: int, j: int) -> Selection:
        chosen = Selection(segments, changes[segments.in_flight[s]], s, i, j)
        swap_recompute(chosen)
        return chosen

    def stages(bounds: Sequence[int]) -> list[Selection]:
        return [stage(s, i, j) for s, (i, j) in enumerate(pairwise(bounds))]

    bounds = initial_bounds(segments)
    while better := _migrate(bounds, segments.cuts.tolist(), stages):
        bounds = better
    chosen = stages(bounds)
    if any(one.excess_bytes for one in chosen):
        return None
    return Decision(bounds, tuple(chain.from_iterable(one.choices for one in chosen)))


def _load(stage: Selection) -> tuple[int, float]:
    return stage.excess_bytes, stage.seconds


def _migrate(
    bounds: tuple[int, ...],
    allowed: Sequence[int],
    stages_of: Callable[[Sequence[int]], list[Selection]],
) -> tuple[int, ...] | None:
    """These bounds after a layer has left the slowest stage for the nearest that is better for it; None if none is.

    It is better if then no stage that it concerns is as slow as the slowest was.
    """
    now = [_load(stage) for stage in stages_of(bounds)]
    slowest = now.index(max(now))
    place = {b: at for at, b in enumerate(allowed)}
    for target in sorted(range(len(now)), key=lambda s: (abs(s - slowest), now[s])):
        between = range(min(target, slowest), max(target, slowest) + 1)
        step = -1 if target > slowest else 1
        moved = list(bounds)
        for s in between[1:]:
            moved[s] = allowed[place[bounds[s]] + step]
        if target == slowest or any(a >= b for a, b in pairwise(moved)):
            continue
        if max(_load(stages_of(moved)[s]) for s in between) < now[slowest]:
            return tuple(moved)
    return None
