"""What the upper layer, vPipe's two halves and the whole make of one architecture: decisions on a
planner's problem.

- `static`: layers stay at home. GPipe computes every stage again; PipeDream keeps everything, and
  where that breaks the limit it computes every stage again too, since it would stop otherwise.
  `static, first`: home is where the planner has the slots in the first architecture.
- `swap/recompute`: layers stay at home, fates by vPipe's algorithm 2: everything is kept but for
  what is too much.
- `full`: cuts and fates by jvpipe's planner, while training runs.
- `ideal`: the same, had it been known before and cost nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise

from jvpipe.papers.selection import FateChanges, Selection
from jvpipe.papers.vpipe import swap_recompute
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision, Problem
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.stage_cost import evaluate_decision

NAMES = ("static, first", "static", "swap/recompute", "full", "ideal")


def static_at_home(problem: Problem, bounds: Sequence[int]) -> Iterator[Decision]:
    """What the upper layer would do, the first choice first."""
    if not problem.schedule.synchronous:
        yield Decision.keeping_all(bounds)
    yield Decision(
        tuple(bounds),
        tuple(RECOMPUTE if i in bounds else RECOMPUTE_CHAIN for i in range(bounds[-1])),
    )


def chosen_at_home(problem: Problem, bounds: Sequence[int]) -> Iterator[Decision]:
    """vPipe's swap and recompute at these cuts; then under smaller limits, should the first plan
    hold too much.
    """
    for share in (1.0, 0.95, 0.9, 0.8, 0.7):
        asked = replace(
            problem, memory_limit_bytes=int(share * (problem.memory_limit_bytes or 0)) or None
        )
        segments = Segments(asked)
        moves = {k: FateChanges(asked, k) for k in set(segments.in_flight)}
        stages = [
            Selection(segments, moves[segments.in_flight[s]], s, i, j)
            for s, (i, j) in enumerate(pairwise(bounds))
        ]
        for stage in stages:
            swap_recompute(stage)
        yield Decision(tuple(bounds), tuple(chain.from_iterable(stage.choices for stage in stages)))


def fitting(problem: Problem, decisions: Iterator[Decision]) -> Decision:
    """The first that keeps the limit by the planner's count; the last if none does."""
    limit, found = problem.memory_limit_bytes, None
    for found in decisions:
        if limit is None or evaluate_decision(problem, found).peak_bytes <= limit:
            return found
    assert found is not None, "a variant decides something"
    return found
