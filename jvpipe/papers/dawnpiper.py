"""DawnPiper's binary partition (Peng et al., 2025, algorithm 1), with Capuchin's memory optimisation on each stage.

Legend: cb, mb are the compute-balanced and the memory-balanced bound between two groups of stages; phi is how many
bounds lie between them. By theorem 4.1 the best bound of two stages is one of these, if seconds and bytes grow with
the layers, transfers take less than stages, and what can be saved is spread evenly over the model. The halves are
divided in the same way; any number of stages will do. That takes phi^log2(S) steps; here segments are looked up.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from jvpipe.papers.capuchin import optimise
from jvpipe.papers.limits import plan_or_raise
from jvpipe.papers.selection import FateChanges, Selection
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Segments

MOST_BOUNDS = 50
"""The most bounds that are tried between two groups; of more, those that fewest bytes cross (appendix B.2)."""


def dawnpiper(problem: Problem) -> Decision:
    """Makes the decision of DawnPiper's planner: it minimises the slowest stage's seconds, whatever the schedule.

    Raises `Infeasible` where none of the cuts that the theorem leaves fits.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> keep, recompute = Option(kept_bytes=4), Option(kept_bytes=0, extra_s=1.0)
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (keep, recompute)),) * 6)
    >>> dawnpiper(Problem(costs, 2, find_schedule("1f1b"), microbatches=4, memory_limit_bytes=16))
    Decision(bounds=(0, 3, 6), choices=(1, 0, 0, 0, 0, 0))
    """
    return plan_or_raise(problem, "dawnpiper", try_dawnpiper)


@dataclass(frozen=True)
class Part:
    """Some consecutive stages: the slowest one's seconds, and where each ends."""

    seconds: float
    ends: tuple[int, ...]


class BinaryPartition:
    """The best parts of segments between bounds, by segment and stages; `least` balances the bytes of least memory."""

    def __init__(self, segments: Segments, least: bool = False) -> None:
        self.segments = segments
        self.bounds: list[int] = segments.cuts.tolist()
        self.crossing = segments.crossing_bytes
        self.changes = {k: FateChanges(segments.problem, k) for k in set(segments.in_flight)}
        self.seconds = [float(segments.compute_s[b]) for b in self.bounds]
        self.need = [self._need(s, least) for s in range(segments.problem.stages)]
        self.parts: dict[tuple[int, int, int, int], Part | None] = {}

    def _need(self, s: int, least: bool) -> list[float]:
        """Running bytes of layers on stage s, at each bound."""
        every = self.changes[self.segments.in_flight[s]].layers
        held_bytes = [
            min(t.held_bytes for t in layer) if least else layer[0].held_bytes for layer in every
        ]
        total = np.concatenate([[0], np.cumsum(held_bytes)]) + self.segments.static_bytes(s)
        return [float(total[b]) for b in self.bounds]

    def compute_balanced(self, p: int, q: int, left: int, right: int) -> int:
        """Finds which bound from p to q divides the seconds best between so many stages on its two sides.

        Args:
            p: the first bound's place.
            q: the last one's.
            left: how many stages lie before the bound.
            right: how many behind it.
        """
        share = self.seconds[p] + (self.seconds[q] - self.seconds[p]) * left / (left + right)
        near = bisect_left(self.seconds, share, p, q)
        return self._clip(
            min((near - 1, near), key=lambda b: self.floor_s(p, b, q, left, right)),
            p,
            q,
            left,
            right,
        )

    def floor_s(self, p: int, b: int, q: int, left: int, right: int) -> float:
        """Bounds what the slowest stage takes from below, if b is the bound between so many stages.

        Args:
            p: the first bound's place.
            b: that of the bound between.
            q: the last one's.
            left: how many stages lie before it.
            right: how many behind it.
        """
        return max(
            (self.seconds[b] - self.seconds[p]) / left, (self.seconds[q] - self.seconds[b]) / right
        )

    def memory_balanced(self, p: int, q: int, first: int, middle: int, last: int) -> int:
        """Finds which bound, of those from p to q, comes before stage `middle` if stages fill to the same level.

        Algorithm 2, for any numbers of micro-batches in flight and of versions: the smallest level that is enough.

        Args:
            p: the first bound's place.
            q: the last one's.
            first: the first stage.
            middle: the stage that begins at the bound.
            last: behind the last stage.
        """

        def fill(level: float) -> tuple[int, int]:
            at = bound = p
            for s in range(first, last):
                bound = at if s == middle else bound
                at = max(at, bisect_right(self.need[s], self.need[s][at] + level, at, q + 1) - 1)
            return bound, at

        below, enough = 0.0, max(self.need[s][q] - self.need[s][p] for s in range(first, last))
        while enough - below > 1e-3 * enough + 1:
            level = (below + enough) / 2
            below, enough = (below, level) if fill(level)[1] == q else (level, enough)
        return self._clip(fill(enough)[0], p, q, middle - first, last - middle)

    @staticmethod
    def _clip(b: int, p: int, q: int, left: int, right: int) -> int:
        return max(p + left, min(q - right, b))

    def between(self, p: int, q: int, first: int, middle: int, last: int) -> Sequence[int]:
        """Lists the bounds that theorem 4.1 leaves, from the compute-balanced to the memory-balanced one.

        Args:
            p: the first bound's place.
            q: the last one's.
            first: the first stage.
            middle: the stage that begins at the bound.
            last: behind the last stage.
        """
        cb = self.compute_balanced(p, q, middle - first, last - middle)
        mb = self.memory_balanced(p, q, first, middle, last)
        bounds = range(cb, mb + 1) if cb <= mb else range(cb, mb - 1, -1)
        if len(bounds) <= MOST_BOUNDS:
            return bounds
        narrow = sorted(bounds[1:-1], key=lambda b: self.crossing[self.bounds[b]])[
            : MOST_BOUNDS - 2
        ]
        return [cb, *sorted(narrow, key=bounds.index), mb]

    def stage(self, s: int, p: int, q: int) -> Selection:
        """Makes one stage, its memory optimised.

        Args:
            s: the stage.
            p: the first bound's place.
            q: the last one's.
        """
        chosen = Selection(
            self.segments,
            self.changes[self.segments.in_flight[s]],
            s,
            self.bounds[p],
            self.bounds[q],
        )
        if chosen.may_fit:
            optimise(chosen)
        return chosen

    def best(self, p: int, q: int, first: int, last: int) -> Part | None:
        """Plans stages with the layers between bounds p and q; None if nothing fits.

        Args:
            p: the first bound's place.
            q: the last one's.
            first: the first stage.
            last: behind the last stage.
        """
        key = p, q, first, last
        if key not in self.parts:
            self.parts[key] = self._best(*key)
        return self.parts[key]

    def _best(self, p: int, q: int, first: int, last: int) -> Part | None:
        if last - first == 1:
            stage = self.stage(first, p, q)
            return None if stage.excess_bytes else Part(stage.seconds, (self.bounds[q],))
        middle = first + (last - first + 1) // 2
        best = None
        for b in self.between(p, q, first, middle, last):
            floor_s = self.floor_s(p, b, q, middle - first, last - middle)
            if best and floor_s >= best.seconds:
                break  # farther from cb it only grows; algorithm 1 stops where nothing had to be saved, with less proof
            left = self.best(p, b, first, middle)
            if left is None or (best and left.seconds >= best.seconds):
                continue
            right = self.best(b, q, middle, last)
            if right is None:
                continue
            part = Part(max(left.seconds, right.seconds), left.ends + right.ends)
            best = part if not best or part.seconds < best.seconds else best
        return best


def try_dawnpiper(problem: Problem) -> Decision | None:
    """Decides, without looking for a limit that would do; None if nothing is found."""
    segments = Segments(problem)
    for least in (False, True):
        search = BinaryPartition(segments, least)
        part = search.best(0, len(search.bounds) - 1, 0, problem.stages)
        if part is not None:
            place = {b: at for at, b in enumerate(search.bounds)}
            stages = [
                search.stage(s, place[i], place[j])
                for s, (i, j) in enumerate(pairwise((0, *part.ends)))
            ]
            return Decision(
                (0, *part.ends), tuple(chain.from_iterable(stage.choices for stage in stages))
            )
    return None
