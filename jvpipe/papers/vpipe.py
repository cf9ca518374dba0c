"""vPipe's planner, which alternates between choosing fates and moving layers between stages.

Paper: Zhao et al., "vPipe: A Virtualized Acceleration System for Achieving Efficient and Scalable
Pipeline Parallel DNN Training", TPDS 2022, algorithms 1 to 3. Initial cuts: `kernighan_lin.py`.

Two steps alternate until nothing improves:

    (a)  each stage on its own swaps the values that save most bytes, as long as the link to the
         host has time left beside activation traffic; then it recomputes the values that save most
         bytes per second (`swap_recompute`)
    (b)  the slowest stage gives up a layer, and a lighter stage gains one; each stage between the
         two passes a layer on

The slowest stage is the one with the most seconds. But while any stage is over the limit of its
device, or over its share of the host's limit, the stage with the largest excess counts as the
slowest.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

from jvpipe.papers.kernighan_lin import initial_bounds
from jvpipe.papers.limits import plan_or_raise
from jvpipe.papers.selection import FateChanges, Selection
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Segments


def vpipe(problem: Problem) -> Decision:
    """Plans as vPipe does: it minimizes the slowest stage's seconds, whatever the schedule.

    Raises:
        Infeasible: some stage does not fit when the two steps no longer improve the plan.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> keep, recompute = Option(kept_bytes=4), Option(kept_bytes=0, extra_s=1.0)
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (keep, recompute)),) * 6)
    >>> vpipe(Problem(costs, 2, find_schedule("1f1b"), microbatches=4, memory_limit_bytes=12))
    Decision(bounds=(0, 3, 6), choices=(1, 1, 0, 0, 0, 0))
    """
    return plan_or_raise(problem, "vpipe", try_vpipe)


def swap_recompute(stage: Selection) -> None:
    """Changes a stage's fates until the stage fits or no change is left (algorithm 2).

    First it takes hidden swaps: on the link to the host, their copies and the activation traffic
    together take no longer than the stage computes. Then it takes recomputations. Last it takes
    changes whose swaps may not be hidden.
    """
    stage.spend(
        stage.changes.swaps,
        lambda change: change.saved_bytes,
        stage.hides,
    )
    stage.spend(
        stage.changes.recomputes,
        lambda change: change.per_second,
        lambda _: True,
    )
    stage.spend(
        stage.changes.after,
        lambda change: change.saved_bytes,
        stage.host_has_room,
    )


def try_vpipe(problem: Problem) -> Decision | None:
    """Plans under the problem's own limit; None if nothing fits."""
    segments = Segments(problem)
    in_flight = set(segments.in_flight)
    changes = {k: FateChanges(problem, k) for k in in_flight}

    @cache
    def stage(s: int, i: int, j: int) -> Selection:
        """Chooses the fates of one stage by step (a).

        Args:
            s: the stage.
            i: its first layer.
            j: the layer after its last.
        """
        chosen = Selection(
            segments,
            changes[segments.in_flight[s]],
            s,
            i,
            j,
        )
        swap_recompute(chosen)
        return chosen

    def stages(bounds: Sequence[int]) -> list[Selection]:
        return [stage(s, i, j) for s, (i, j) in enumerate(pairwise(bounds))]

    bounds = initial_bounds(segments)
    cuts = segments.cuts.tolist()
    while better := _migrate(bounds, cuts, stages):
        bounds = better
    choices: list[int] = []
    for chosen in stages(bounds):
        if chosen.excess_bytes:
            return None
        choices += chosen.choices
    return Decision(bounds, tuple(choices))


def _load(stage: Selection) -> tuple[int, float]:
    """Returns a stage's load, by which stages are compared: bytes over a limit, then seconds."""
    return stage.excess_bytes, stage.seconds


def _migrate(
    bounds: tuple[int, ...],
    allowed: Sequence[int],
    stages_of: Callable[[Sequence[int]], list[Selection]],
) -> tuple[int, ...] | None:
    """Moves a layer out of the slowest stage, towards the nearest target that improves the plan.

        bounds before    0   3   5   7        the slowest stage is 0, the target is stage 2; every
        bounds after     0   2   4   7        bound between the two moves by one towards stage 0

    A move improves the plan if each stage from the slowest to the target then has a smaller load
    than the slowest stage had before. So each move lowers the largest load, or leaves fewer stages
    with that load. Therefore repeated moves come to an end.

    Args:
        bounds: the bounds of the stages.
        allowed: the bounds at which the model may be cut.
        stages_of: makes the stages between some bounds, and chooses their fates.

    Returns:
        The new bounds; None if no move improves the plan.
    """
    now = [_load(stage) for stage in stages_of(bounds)]
    slowest = now.index(max(now))
    place = {b: at for at, b in enumerate(allowed)}

    def distance_and_load(s: int) -> tuple[int, tuple[int, float]]:
        return abs(s - slowest), now[s]

    # The nearest stage is tried first; of two equally near stages, the one with the smaller load.
    for target in sorted(range(len(now)), key=distance_and_load):
        between = range(min(target, slowest), max(target, slowest) + 1)
        step = -1 if target > slowest else 1
        moved = list(bounds)
        for s in between[1:]:
            # Every bound between the two stages moves to the next allowed bound, so that each stage
            # between them gets a layer and passes a layer on.
            moved[s] = allowed[place[bounds[s]] + step]
        is_empty = any(a >= b for a, b in pairwise(moved))
        if target == slowest or is_empty:
            continue
        stages = stages_of(moved)
        heaviest = max(_load(stages[s]) for s in between)
        if heaviest < now[slowest]:
            return tuple(moved)
    return None
