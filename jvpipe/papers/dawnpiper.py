"""DawnPiper's binary partition, with Capuchin's memory optimization on each stage.

Paper: Peng et al., "DawnPiper", 2025, theorem 4.1, algorithms 1 and 2.

Legend, in the paper's symbols; a bound is a cut between two groups of consecutive stages:
    cb          the compute-balanced bound: both groups have equal seconds per stage
    mb          the memory-balanced bound: both groups fill their devices equally
    phi         the number of bounds from cb to mb
    S           the number of stages

    layers   p . . . . . cb . . . . mb . . . . . . . q     a dot is a layer; the bounds from cb to
             [ first group of stages ][ second group ]     mb are tried; then each group is divided
                                                           in the same way

By theorem 4.1 the best bound of two stages lies between cb and mb, under three conditions: seconds
and bytes grow with the number of layers, a transfer takes less than a stage, and the bytes that can
be saved are spread evenly over the model. The paper's recursion takes phi^log2(S) steps. Here the
plan for each segment and group of stages is cached, so that it is made only once.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from jvpipe.papers.capuchin import optimize
from jvpipe.papers.limits import plan_or_raise
from jvpipe.papers.paper_effort import PAPER
from jvpipe.papers.selection import FateChanges, Selection
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Segments


def dawnpiper(problem: Problem) -> Decision:
    """Plans as DawnPiper does: it minimizes the slowest stage's seconds, whatever the schedule.

    Raises:
        Infeasible: no plan fits with bounds between cb and mb.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> keep, recompute = Option(kept_bytes=4), Option(kept_bytes=0, extra_s=1.0)
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (keep, recompute)),) * 6)
    >>> dawnpiper(Problem(costs, 2, find_schedule("1f1b"), microbatches=4, memory_limit_bytes=16))
    Decision(bounds=(0, 3, 6), choices=(1, 0, 0, 0, 0, 0))
    """
    return plan_or_raise(problem, "dawnpiper", try_dawnpiper)


@dataclass(frozen=True)
class StageGroup:
    """A plan of consecutive stages: the slowest one's seconds, and the layer at which each ends."""

    seconds: float
    ends: tuple[int, ...]


class Halving(NamedTuple):
    """A segment and its stages, which are to be divided into two groups.

    A segment is the layers between two bounds. A bound is given by its index in
    `BinaryPartition.bounds`.

    Attributes:
        p: the bound at which the segment begins.
        q: the bound at which the segment ends.
        first: the first stage.
        middle: the first stage of the second group.
        last: one more than the last stage.
    """

    p: int
    q: int
    first: int
    middle: int
    last: int

    @property
    def left(self) -> int:
        """The number of stages in the first group."""
        return self.middle - self.first

    @property
    def right(self) -> int:
        """The number of stages in the second group."""
        return self.last - self.middle

    def clip(self, b: int) -> int:
        """Moves a bound inward until each stage on either side of the bound can have a layer."""
        lowest = self.p + self.left
        highest = self.q - self.right
        return max(lowest, min(highest, b))


class BinaryPartition:
    """The search for the best stages of each segment.

    Args:
        segments: the costs of the problem's segments.
        least: whether mb balances the least bytes that fates allow, instead of the bytes with
            everything kept.
    """

    def __init__(self, segments: Segments, least: bool = False) -> None:
        self.segments = segments
        self.bounds: list[int] = segments.cuts.tolist()
        self.crossing = segments.crossing_bytes
        problem = segments.problem
        in_flight = set(segments.in_flight)
        self.changes = {k: FateChanges(problem, k) for k in in_flight}
        self.seconds = [float(segments.compute_s[b]) for b in self.bounds]
        self.need = [self._need(s, least) for s in range(problem.stages)]
        self.best = cache(self._best)

    def _need(self, s: int, least: bool) -> list[float]:
        """Returns for each bound the bytes that all layers before the bound take on stage s."""
        changes = self.changes[self.segments.in_flight[s]]
        kept_bytes = (held_bytes[0] for held_bytes in changes.held_bytes)
        held_before = changes.least_bytes if least else [0, *accumulate(kept_bytes)]
        total = np.array(held_before) + self.segments.static_bytes(s)
        return [float(total[b]) for b in self.bounds]

    def compute_balanced(self, of: Halving) -> int:
        """Finds cb: the bound whose sides have the most nearly equal seconds per stage."""
        # The sum of seconds up to a bound that would give the left side exactly its share.
        first_s = self.seconds[of.p]
        inside_s = self.seconds[of.q] - first_s
        share = first_s + inside_s * of.left / (of.left + of.right)
        near = bisect_left(self.seconds, share, of.p, of.q)
        candidates = near - 1, near
        nearest = min(candidates, key=lambda b: self.floor_s(of, b))
        return of.clip(nearest)

    def floor_s(self, of: Halving, b: int) -> float:
        """Returns a lower bound on the slowest stage's seconds: the larger mean of the two sides.

        Args:
            of: the segment and its stages.
            b: the bound between the two sides.
        """
        before_s = self.seconds[b] - self.seconds[of.p]
        behind_s = self.seconds[of.q] - self.seconds[b]
        return max(before_s / of.left, behind_s / of.right)

    def memory_balanced(self, of: Halving) -> int:
        """Finds mb: the bound before stage `middle` if all stages are filled with the same bytes.

        This is algorithm 2, for any number of micro-batches in flight and of versions. A bisection
        finds about the smallest level (bytes per stage) at which the stages hold all layers from p
        to q.
        """
        stages = range(of.first, of.last)

        def fill(level: float) -> tuple[int, int]:
            """Fills stages to a level; returns the bounds before `middle` and after all stages."""
            at = bound = of.p
            for s in stages:
                bound = at if s == of.middle else bound
                need = self.need[s]
                full = need[at] + level
                end = bisect_right(need, full, at, of.q + 1) - 1
                at = max(at, end)
            return bound, at

        # At the level `below`, the stages do not hold all layers; at the level `enough`, they do.
        # The first `enough` lets any single stage hold all layers.
        below = 0.0
        needs = [self.need[s] for s in stages]
        enough = max(need[of.q] - need[of.p] for need in needs)
        # The loop ends because each round halves the distance between `below` and `enough`.
        while enough - below > 1e-3 * enough + 1:
            level = (below + enough) / 2
            _, reached = fill(level)
            if reached == of.q:
                enough = level
            else:
                below = level
        bound, _ = fill(enough)
        return of.clip(bound)

    def between(self, of: Halving) -> Sequence[int]:
        """Lists the bounds to try (theorem 4.1): at most `PAPER.bounds` of those from cb to mb."""
        cb = self.compute_balanced(of)
        mb = self.memory_balanced(of)
        step = 1 if cb <= mb else -1
        bounds = range(cb, mb + step, step)
        if len(bounds) <= PAPER.bounds:
            return bounds
        crossing = {b: self.crossing[self.bounds[b]] for b in bounds}
        by_crossing = sorted(bounds[1:-1], key=crossing.__getitem__)
        narrow = by_crossing[: PAPER.bounds - 2]
        return [cb, *sorted(narrow, key=bounds.index), mb]

    def stage(self, s: int, i: int, j: int) -> Selection:
        """Makes stage s with layers [i, j), and optimizes its memory.

        Args:
            s: the number of the stage.
            i: its first layer.
            j: the layer after its last one.
        """
        changes = self.changes[self.segments.in_flight[s]]
        chosen = Selection(self.segments, changes, s, i, j)
        if chosen.may_fit:
            optimize(chosen)
        return chosen

    def _best(self, p: int, q: int, first: int, last: int) -> StageGroup | None:
        """Plans stages with the layers between two bounds; None if nothing fits.

        Args:
            p: the index of the bound at which the layers begin.
            q: the index of the bound at which they end.
            first: the first stage.
            last: one more than the last stage.
        """
        if last - first == 1:
            end = self.bounds[q]
            stage = self.stage(first, self.bounds[p], end)
            return None if stage.excess_bytes else StageGroup(stage.seconds, (end,))
        middle = first + (last - first + 1) // 2
        of = Halving(p, q, first, middle, last)
        best = None
        for b in self.between(of):
            # With this bound, the slowest stage of any plan takes at least `floor_s`.
            if best and self.floor_s(of, b) >= best.seconds:
                # `floor_s` grows with the distance from cb, so later bounds cannot win either. The
                # paper's algorithm 1 stops at the first plan that saves no memory, and so may miss
                # a later bound that wins.
                break
            left = self.best(p, b, first, middle)
            if left is None:
                continue
            if best and left.seconds >= best.seconds:
                continue
            right = self.best(b, q, middle, last)
            if right is None:
                continue
            seconds = max(left.seconds, right.seconds)
            if not best or seconds < best.seconds:
                best = StageGroup(seconds, left.ends + right.ends)
        return best


def try_dawnpiper(problem: Problem) -> Decision | None:
    """Plans under the problem's own limit; None if nothing fits."""
    segments = Segments(problem)
    # In the first search, mb balances the bytes with everything kept; in the second, the least
    # bytes that fates allow.
    for least in (False, True):
        search = BinaryPartition(segments, least)
        plan = search.best(0, len(search.bounds) - 1, 0, problem.stages)
        if plan is not None:
            bounds = (0, *plan.ends)
            choices: list[int] = []
            for s, (i, j) in enumerate(pairwise(bounds)):
                choices += search.stage(s, i, j).choices
            return Decision(bounds, tuple(choices))
    return None
