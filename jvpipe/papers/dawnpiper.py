"""DawnPiper's binary partition, with Capuchin's memory optimization on each stage.

Paper: Peng et al., "DawnPiper", 2025, theorem 4.1, algorithms 1 and 2.

Legend, in the paper's symbols; a bound is a cut between two groups of consecutive stages:
    cb          the compute-balanced bound: both groups have equal seconds per stage
    mb          the memory-balanced bound: both groups fill their devices equally
    phi         the number of bounds from cb to mb
    S           the number of stages

    layers   p . . . . . cb . . . . mb . . . . . . . q     a dot is a layer; the bound between the
             [ first group of stages ][ second group ]     groups is tried at cb, mb, and between;
                                                           each group is divided in the same way

By theorem 4.1 the best bound of two stages lies between cb and mb, under three conditions: seconds
and bytes grow with the number of layers, a transfer takes less than a stage, and the bytes that can
be saved are spread evenly over the model. The paper's recursion takes phi^log2(S) steps. Here the
plan for each segment and group of stages is stored, so that it is made only once.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jvpipe.papers.capuchin import optimize
from jvpipe.papers.effort import PAPER
from jvpipe.papers.limits import plan_or_raise
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
    """A plan of consecutive stages: the slowest one's seconds, and the layers at which they end."""

    seconds: float
    ends: tuple[int, ...]


class BinaryPartition:
    """The search for the best stages of each segment.

    A segment is the layers between two bounds. Arguments p, q and b are indices of bounds in the
    list `bounds`: p begins the segment, q ends it, and b is between them.

    Args:
        segments: the costs of the problem's segments.
        least: whether mb balances the least bytes that fates allow, instead of the bytes with
            everything kept.
    """

    def __init__(self, segments: Segments, least: bool = False) -> None:
        self.segments = segments
        self.bounds: list[int] = segments.cuts.tolist()
        self.crossing = segments.crossing_bytes
        self.changes = {k: FateChanges(segments.problem, k) for k in set(segments.in_flight)}
        self.seconds = [float(segments.compute_s[b]) for b in self.bounds]
        self.need = [self._need(s, least) for s in range(segments.problem.stages)]
        self.parts: dict[tuple[int, int, int, int], StageGroup | None] = {}

    def _need(self, s: int, least: bool) -> list[float]:
        """Returns for each bound the bytes on stage s of all layers before the bound."""
        every = self.changes[self.segments.in_flight[s]].layers
        held_bytes = [layer[0].held_bytes for layer in every]
        if least:
            held_bytes = [min(t.held_bytes for t in layer) for layer in every]
        held_before = np.concatenate([[0], np.cumsum(held_bytes)])
        total = held_before + self.segments.static_bytes(s)
        return [float(total[b]) for b in self.bounds]

    def compute_balanced(
        self,
        p: int,
        q: int,
        left: int,
        right: int,
    ) -> int:
        """Finds cb: the bound from p to q whose sides have the most nearly equal seconds per stage.

        Args:
            p: the index of the segment's first bound.
            q: the index of its last bound.
            left: the number of stages before cb.
            right: the number of stages after cb.
        """
        # The running seconds at which the left side has its share.
        inside_s = self.seconds[q] - self.seconds[p]
        share = self.seconds[p] + inside_s * left / (left + right)
        near = bisect_left(self.seconds, share, p, q)
        best = min((near - 1, near), key=lambda b: self.floor_s(p, b, q, left, right))
        return self._clip(best, p, q, left, right)

    def floor_s(
        self,
        p: int,
        b: int,
        q: int,
        left: int,
        right: int,
    ) -> float:
        """Returns a lower bound on the slowest stage's seconds: the larger mean of the two sides.

        Args:
            p: the index of the segment's first bound.
            b: the index of the bound between the two sides.
            q: the index of the segment's last bound.
            left: the number of stages before b.
            right: the number of stages after b.
        """
        before_s = self.seconds[b] - self.seconds[p]
        behind_s = self.seconds[q] - self.seconds[b]
        return max(before_s / left, behind_s / right)

    def memory_balanced(
        self,
        p: int,
        q: int,
        first: int,
        middle: int,
        last: int,
    ) -> int:
        """Finds mb: the bound before stage `middle` if all stages fill to the same level of bytes.

        This is algorithm 2, for any number of micro-batches in flight and of versions. A bisection
        finds the smallest level at which the stages hold all layers from p to q.

        Args:
            p: the index of the segment's first bound.
            q: the index of its last bound.
            first: the first stage.
            middle: the stage that begins at mb.
            last: one more than the last stage.
        """

        def fill(level: float) -> tuple[int, int]:
            """Fills stages to a level; returns the bound before `middle`, and that at the end."""
            at = bound = p
            for s in range(first, last):
                bound = at if s == middle else bound
                need = self.need[s]
                end = bisect_right(need, need[at] + level, at, q + 1) - 1
                at = max(at, end)
            return bound, at

        # At the level `below` the stages do not hold all layers, at `enough` they do. The first
        # `enough` lets any single stage hold all of them.
        below = 0.0
        enough = max(self.need[s][q] - self.need[s][p] for s in range(first, last))
        # The loop ends because each round halves the distance between `below` and `enough`.
        while enough - below > 1e-3 * enough + 1:
            level = (below + enough) / 2
            _, reached = fill(level)
            if reached == q:
                enough = level
            else:
                below = level
        bound, _ = fill(enough)
        return self._clip(
            bound,
            p,
            q,
            middle - first,
            last - middle,
        )

    @staticmethod
    def _clip(
        b: int,
        p: int,
        q: int,
        left: int,
        right: int,
    ) -> int:
        """Moves a bound inward until each stage on either side can have a layer."""
        return max(p + left, min(q - right, b))

    def between(
        self,
        p: int,
        q: int,
        first: int,
        middle: int,
        last: int,
    ) -> Sequence[int]:
        """Lists the bounds that theorem 4.1 leaves, from cb to mb, at most `PAPER.bounds`.

        Args:
            p: the index of the segment's first bound.
            q: the index of its last bound.
            first: the first stage.
            middle: the stage that begins at the listed bounds.
            last: one more than the last stage.
        """
        cb = self.compute_balanced(
            p,
            q,
            middle - first,
            last - middle,
        )
        mb = self.memory_balanced(p, q, first, middle, last)
        step = 1 if cb <= mb else -1
        bounds = range(cb, mb + step, step)
        if len(bounds) <= PAPER.bounds:
            return bounds
        by_crossing = sorted(bounds[1:-1], key=lambda b: self.crossing[self.bounds[b]])
        narrow = by_crossing[: PAPER.bounds - 2]
        return [cb, *sorted(narrow, key=bounds.index), mb]

    def stage(self, s: int, p: int, q: int) -> Selection:
        """Makes one stage and optimizes its memory.

        Args:
            s: the number of the stage.
            p: the index of the bound at which it begins.
            q: the index of the bound at which it ends.
        """
        changes = self.changes[self.segments.in_flight[s]]
        begin = self.bounds[p]
        end = self.bounds[q]
        chosen = Selection(
            self.segments,
            changes,
            s,
            begin,
            end,
        )
        if chosen.may_fit:
            optimize(chosen)
        return chosen

    def best(
        self,
        p: int,
        q: int,
        first: int,
        last: int,
    ) -> StageGroup | None:
        """Plans stages with the layers between bounds p and q; None if nothing fits.

        Args:
            p: the index of the segment's first bound.
            q: the index of its last bound.
            first: the first stage.
            last: one more than the last stage.
        """
        key = p, q, first, last
        if key not in self.parts:
            self.parts[key] = self._best(*key)
        return self.parts[key]

    def _best(
        self,
        p: int,
        q: int,
        first: int,
        last: int,
    ) -> StageGroup | None:
        if last - first == 1:
            stage = self.stage(first, p, q)
            return None if stage.excess_bytes else StageGroup(stage.seconds, (self.bounds[q],))
        middle = first + (last - first + 1) // 2
        sides = middle - first, last - middle  # numbers of stages
        best = None
        for b in self.between(p, q, first, middle, last):
            # No plan with this bound has a slowest stage below `floor_s`.
            floor_s = self.floor_s(p, b, q, *sides)
            if best and floor_s >= best.seconds:
                # `floor_s` grows with the distance from cb, so later bounds cannot win either.
                # Algorithm 1 stops as soon as a plan saves no memory, which does not prove this.
                break
            left = self.best(p, b, first, middle)
            if left is None or (best and left.seconds >= best.seconds):
                continue
            right = self.best(b, q, middle, last)
            if right is None:
                continue
            part = StageGroup(max(left.seconds, right.seconds), left.ends + right.ends)
            if not best or part.seconds < best.seconds:
                best = part
        return best


def try_dawnpiper(problem: Problem) -> Decision | None:
    """Plans under the problem's own limit; None if nothing fits."""
    segments = Segments(problem)
    for least in (False, True):
        search = BinaryPartition(segments, least)
        part = search.best(
            0,
            len(search.bounds) - 1,
            0,
            problem.stages,
        )
        if part is not None:
            bounds = (0, *part.ends)
            place = {b: at for at, b in enumerate(search.bounds)}
            choices: list[int] = []
            for s, (i, j) in enumerate(pairwise(bounds)):
                choices += search.stage(s, place[i], place[j]).choices
            return Decision(bounds, tuple(choices))
    return None
