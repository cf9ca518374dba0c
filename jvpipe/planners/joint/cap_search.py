"""Finds the best cuts and fates for the surrogate of `stage_cost.py`, with a bound on any plan.

The surrogate estimates the seconds of a step in closed form, for M micro-batches. For a segment,
t is its seconds with its best fates, F is the seconds of its forward, and comm is the seconds of
the link before it. Sums and maxima are over the segments of a path, that is, over all stages:

    asynchronous   M max(t, comm)
    1f1b           sum(t + comm) + (M - 1) max(t, comm)
    gpipe          sum(t + comm) + (M - 1) (max(F, comm / 2) + max(t - F, comm / 2))

Here t includes a share of what happens once per step, all-reduces and updates
(`Objective.with_once`). A test compares the best paths with an enumeration by the surrogate.

Why the search is exact: each form grows with t, and t of a segment depends on no other segment. So
if each maximum is capped, the best cuts are a shortest path, by the sum, through the segments that
keep the caps. The search divides the possible caps into boxes, and always opens the box with the
least bound. It ends when that bound is not below the best path found. The t of a segment is only
a lower bound until a shortest path goes through the segment; the fates of few segments are ever
searched.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import count

import numpy as np

from jvpipe.planners.joint.segment_table import Cell, Path, Table, cells
from jvpipe.planners.model.chain_dp import Matrix, least_max, least_sum, sums_through
from jvpipe.planners.model.problem import Problem, with_entry

Caps = tuple[float, ...]


@dataclass(frozen=True)
class SearchResult:
    """Paths through a table, the best first, and the seconds of the best.

    No path in the table takes less than `bound_s`. A path is not better than the best if its maxima
    (see the module) are together above `cap_s`.
    """

    paths: tuple[Path, ...]
    step_s: float
    bound_s: float
    cap_s: float


@dataclass(frozen=True)
class Objective:
    """The surrogate's parts: a sum over stages, and for each phase the wait for its slowest stage.

    GPipe has two phases, forwards and backwards; other schedules have one.
    """

    problem: Problem
    table: Table

    @cached_property
    def two_phases(self) -> bool:
        """Whether forwards wait for the slowest forward, and backwards for the slowest backward."""
        return self.problem.phases == 2

    @property
    def waits(self) -> int:
        """How often a step waits for the slowest stage."""
        return self.problem.microbatches - self.problem.schedule.synchronous

    def with_once(self, seconds: list[Matrix]) -> list[Matrix]:
        """Adds to the seconds t of stages the share of a micro-batch in what happens once per step.

        A stage whose all-reduce and updates take A seconds is busy for M (t + A / M) per step.
        """
        m = self.problem.microbatches
        stages = self.table.stages
        return [t + stage.block.once_s / m for t, stage in zip(seconds, stages, strict=True)]

    def sums(self, seconds: list[Matrix]) -> list[Matrix]:
        """Counts the seconds of stages plus those of the links before them."""
        once = zip(self.with_once(seconds), self.table.stages, strict=True)
        return [t + stage.block.comm_s for t, stage in once]

    def phases(self, seconds: list[Matrix]) -> list[list[Matrix]]:
        """Counts for each phase the seconds for which a stage keeps the others waiting."""
        blocks = [stage.block for stage in self.table.stages]
        stages = list(zip(self.with_once(seconds), blocks, strict=True))
        if not self.two_phases:
            return [[np.maximum(t, x.comm_s) for t, x in stages]]
        # Each phase uses one direction of the link, which is half of what two stages exchange.
        forward = [np.maximum(x.forward_s, x.comm_s / 2) for x in blocks]
        backward = [np.maximum(t - x.forward_s, x.comm_s / 2) for t, x in stages]
        return [forward, backward]

    def parts_s(self, cell: Cell) -> tuple[float, float, float]:
        """Returns the seconds of a cell (as `with_once`), its forward, and the link before it."""
        t, forward_s, comm_s = self.table.parts_s(cell)
        stage = self.table.stage(cell)
        once_s = float(stage.block.once_s[stage.place(*cell[1:])])
        return t + once_s / self.problem.microbatches, forward_s, comm_s

    def maxima(self, path: Path) -> Caps:
        """Counts for each phase the seconds of the path's slowest stage."""
        waits_s = list[Caps]()
        for t, forward_s, comm_s in map(self.parts_s, cells(path)):
            if self.two_phases:
                way_s = comm_s / 2
                waits_s.append((max(forward_s, way_s), max(t - forward_s, way_s)))
            else:
                waits_s.append((max(t, comm_s),))
        return tuple(max(phase) for phase in zip(*waits_s, strict=True))

    def step_s(self, path: Path) -> float:
        """Counts the seconds of a step with a path's cuts."""
        total_s = sum(t + comm_s for t, _, comm_s in map(self.parts_s, cells(path)))
        waits_s = self.waits * sum(self.maxima(path))
        return float(self.summed(total_s)) + waits_s

    def bound_s(self, seconds: list[Matrix]) -> float:
        """Bounds the seconds of a step from below, whatever the path."""
        total_s, _ = least_sum(self.sums(seconds))
        waits_s = self.waits * sum(map(least_max, self.phases(seconds)))
        return float(self.summed(total_s)) + waits_s

    def summed(self, total_s: float | np.ndarray) -> float | np.ndarray:
        """Counts the seconds that a sum over stages adds to a step.

        To a stream it adds nothing, unless it is infinite: then the path is impossible.
        """
        if self.problem.schedule.synchronous:
            return total_s
        return np.where(np.isinf(total_s), total_s, 0.0)


def search(problem: Problem, table: Table) -> SearchResult:
    """Finds the best paths through a table; no paths if nothing fits."""
    objective = Objective(problem, table)
    result = _Boxes(objective).search()
    if table.proven:
        return result
    lower_s = [table.lower_s(stage) for stage in table.stages]
    bound_s = max(result.bound_s, objective.bound_s(lower_s))
    return replace(result, bound_s=min(result.step_s, bound_s))


@dataclass
class _Boxes:
    """The boxes that are left to open, by their bounds, and the paths met, with their seconds.

    A box has a low and a high cap for each phase, and stands for the paths whose maxima lie between
    them. The bound of a box adds the least sum of a path under the high caps to the waits at the
    low caps. No path of the box takes less, because its sum and its waits are at least these.
    """

    objective: Objective
    heap: list[tuple[float, int, Caps, Caps]] = field(default_factory=list)
    ticks: Iterator[int] = field(default_factory=count)
    paths: dict[Path, float] = field(default_factory=dict)
    best_s: float = np.inf
    least_sum_s: float = 0.0

    def __post_init__(self) -> None:
        self.table = self.objective.table
        self.waits = self.objective.waits
        self.low = tuple(least_max(phase) for phase in self.objective.phases(self.table.seconds))

    def search(self) -> SearchResult:
        """Finds the best paths."""
        table = self.table
        bound_s = 0.0
        self._push(0.0, self.low, (np.inf,) * len(self.low))
        while self._may_be_better():
            expected_s, _, low, high = heappop(self.heap)
            if table.proven:
                bound_s = max(bound_s, expected_s)
            total_s, path = self._shortest(high)
            if path is None:
                continue
            # If cells of the path are open, their seconds are lower bounds. They are refined, and
            # the box is pushed again with a bound that is not less. This ends, because a cell is
            # settled after a few refinements.
            opened = table.open_cells(path)
            if opened:
                table.refine(opened)
                box_s = total_s + self.waits * sum(low)
                self._push(max(box_s, expected_s), low, high)
                if not table.open_cells(path):
                    self._meet(path)
                continue
            # The path has the least sum of all paths in its box. A better path of the box must have
            # a smaller maximum in some phase: only caps below the path's maxima are left.
            self._meet(path)
            for below, above in _rest(low, high, self.objective.maxima(path)):
                self._push(total_s + self.waits * sum(below), below, above)
        if table.proven:
            bound_s = self.heap[0][0] if self.heap else self.best_s
        paths = tuple(sorted(self.paths, key=lambda path: self.paths[path]))
        return SearchResult(
            paths,
            self.best_s,
            min(bound_s, self.best_s),
            self._cap_s(),
        )

    def _push(self, bound_s: float, low: Caps, high: Caps) -> None:
        """Adds a box; of boxes with equal bounds, the one that was added first is opened first."""
        heappush(self.heap, (bound_s, next(self.ticks), low, high))

    def _may_be_better(self) -> bool:
        """Tells whether a box is left that may have a better path, and effort to open the box."""
        if not self.heap or (self.table.exhausted and self.paths):
            return False
        enough_s = self.best_s * (1 - self.table.effort.tolerance)
        return self.heap[0][0] < enough_s

    def _shortest(self, caps: Caps) -> tuple[float, Path | None]:
        seconds = self.table.seconds
        sums = self.objective.sums(seconds)
        phases = self.objective.phases(seconds)
        total_s, path = self.table.shortest(_under(sums, phases, caps))
        return float(self.objective.summed(total_s)), path

    def _meet(self, path: Path) -> None:
        """Records a path whose cells are all settled."""
        step_s = self.objective.step_s(path)
        if np.isfinite(step_s):
            self.paths[path] = step_s
        if step_s < self.best_s:
            self.best_s = step_s
            self._narrow()

    def _narrow(self) -> None:
        """Removes the cuts through which no path can be better than the best path known.

        For a stream all cuts stay, because `lower_bound` uses them again with the links between
        stages.
        """
        if not self.objective.problem.schedule.synchronous:
            return
        seconds = [self.table.lower_s(stage) for stage in self.table.stages]
        sums = self.objective.sums(seconds)
        phases = self.objective.phases(seconds)
        low = [least_max(phase) for phase in phases]
        least_s, _ = least_sum(sums)
        self.least_sum_s = max(self.least_sum_s, float(self.objective.summed(least_s)))
        # The maxima of a better path are together below the cap, and each is at least its phase's
        # least. So one maximum is at most the cap less the least of the other phases.
        caps = tuple(self._cap_s() - sum(low) + low_s for low_s in low)
        through = sums_through(_under(sums, phases, caps))
        enough_s = self.best_s * (1 + 1e-12) - self.waits * sum(low)
        kept = [np.flatnonzero(self.objective.summed(x) <= enough_s) for x in through]
        if all(len(places) for places in kept):
            self.table.narrow(kept)

    def _cap_s(self) -> float:
        """Bounds from above the sum of the maxima of any path that is better than the best."""
        if not self.waits:
            return np.inf
        return (self.best_s - self.least_sum_s) / self.waits * (1 + 1e-12)


def _under(
    matrices: list[Matrix],
    phases: list[list[Matrix]],
    caps: Caps,
) -> list[Matrix]:
    """Returns the matrices with infinity for cells whose seconds in a phase exceed its cap."""
    capped = matrices
    for phase, cap in zip(phases, caps, strict=True):
        if np.isfinite(cap):
            both = zip(phase, capped, strict=True)
            capped = [np.where(waits <= cap, total, np.inf) for waits, total in both]
    return capped


def _rest(
    low: Caps,
    high: Caps,
    maxima: Caps,
) -> list[tuple[Caps, Caps]]:
    """Divides what is left of a box once its path of the least sum is known.

    Better paths have a smaller maximum in some phase. For each phase, the caps below the path's
    maximum make a box, which is halved.
    """
    boxes = []
    for phase, maximum in enumerate(maxima):
        lowest = low[phase]
        highest = float(np.nextafter(maximum, 0))
        above = with_entry(high, phase, highest)
        if highest >= lowest:
            middle = (lowest + highest) / 2
            boxes.append((low, with_entry(above, phase, middle)))
            if middle < highest:
                boxes.append((with_entry(low, phase, middle), above))
        # Boxes of later phases begin at this phase's maximum, so that boxes do not overlap.
        low = with_entry(low, phase, maximum)
    return boxes
