"""Finds the best cuts and fates for the surrogate of `stage_cost.py`, with a bound on any plan.

Legend: t, F, comm: seconds of a segment with its best fates, of its forward, of the link before it;
M micro-batches.

    asynchronous   M max(t, comm)
    1f1b           sum(t + comm) + (M - 1) max(t, comm)
    gpipe          sum(t + comm) + (M - 1) (max(F, comm / 2) + max(t - F, comm / 2))

where t has a part of what happens once a step, the sums of replicas and updates:
`Objective.with_once`.

These closed forms are the surrogate of `stage_cost.py`; a test compares the best paths with
enumeration by it.

All of them grow with t, and t of a segment depends on no other: given t the best cuts are a
shortest path under a cap on each maximum. The search divides the caps into boxes and opens the box
of the least bound, until that bound is what the best path found takes. t itself is a lower bound
until a shortest path meets it: few segments are ever settled.
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
    """Paths through a table, the best first, and what the best takes.

    Nothing in the table takes less than `bound_s`, and no path whose slowest stage is above `cap_s`
    can be better.
    """

    paths: tuple[Path, ...]
    step_s: float
    bound_s: float
    cap_s: float


@dataclass(frozen=True)
class Objective:
    """What is summed over stages, and what is waited for: in each phase, the slowest."""

    problem: Problem
    table: Table

    @cached_property
    def two_phases(self) -> bool:
        """Whether forwards and backwards wait for a slowest stage of their own."""
        return self.problem.phases == 2

    @property
    def waits(self) -> int:
        """How often a step waits for the slowest stage."""
        return self.problem.microbatches - self.problem.schedule.synchronous

    def with_once(self, seconds: list[Matrix]) -> list[Matrix]:
        """Adds the share of a micro-batch in what happens once a step to seconds of stages.

        M (t + A / M) is what a stage is busy: its micro-batches, its all-reduce and its updates A.
        """
        m = self.problem.microbatches
        stages = self.table.stages
        return [t + stage.block.once_s / m for t, stage in zip(seconds, stages, strict=True)]

    def sums(self, seconds: list[Matrix]) -> list[Matrix]:
        """Counts the seconds of stages and of the links before them."""
        once = zip(self.with_once(seconds), self.table.stages, strict=True)
        return [t + stage.block.comm_s for t, stage in once]

    def phases(self, seconds: list[Matrix]) -> list[list[Matrix]]:
        """Counts how long the other stages wait for one, phase by phase."""
        blocks = [stage.block for stage in self.table.stages]
        stages = list(zip(self.with_once(seconds), blocks, strict=True))
        if not self.two_phases:
            return [[np.maximum(t, x.comm_s) for t, x in stages]]
        # Each phase has one way over the link, half of what two stages exchange.
        forward = [np.maximum(x.forward_s, x.comm_s / 2) for x in blocks]
        backward = [np.maximum(t - x.forward_s, x.comm_s / 2) for t, x in stages]
        return [forward, backward]

    def parts_s(self, cell: Cell) -> tuple[float, float, float]:
        """Returns a cell's seconds with its share of a step, its forward, and its link before."""
        t, forward_s, comm_s = self.table.parts_s(cell)
        stage = self.table.stage(cell)
        once_s = float(stage.block.once_s[stage.place(*cell[1:])])
        return t + once_s / self.problem.microbatches, forward_s, comm_s

    def maxima(self, path: Path) -> Caps:
        """Counts what a path's stages wait for in each phase."""
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
        """Counts what a sum over stages adds to a step.

        It adds nothing to a stream, if it is finite.
        """
        if self.problem.schedule.synchronous:
            return total_s
        return np.where(np.isinf(total_s), total_s, 0.0)


def search(problem: Problem, table: Table) -> SearchResult:
    """Finds the best paths through a table; none if nothing fits."""
    objective = Objective(problem, table)
    result = _Boxes(objective).search()
    if table.proven:
        return result
    lower_s = [table.lower_s(stage) for stage in table.stages]
    bound_s = max(result.bound_s, objective.bound_s(lower_s))
    return replace(result, bound_s=min(result.step_s, bound_s))


@dataclass
class _Boxes:
    """The boxes of caps that are left, by their bounds, and the paths met, with what they take.

    A box of low and high caps stands for the paths whose maxima lie between them. Its bound is the
    least sum under the high caps, and waits at the low ones: nothing in it takes less.
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
            # Cells of the path are lower bounds still: they are refined, and the box comes back
            # with a bound that is no less. A cell is settled after a few times, so that this ends.
            opened = table.open_cells(path)
            if opened:
                table.refine(opened)
                box_s = total_s + self.waits * sum(low)
                self._push(max(box_s, expected_s), low, high)
                if not table.open_cells(path):
                    self._meet(path)
                continue
            # The path has the least sum of all in its box, so that none with larger maxima is
            # better: what is left are caps below one of its maxima.
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
        """Adds a box; of equal bounds, the one that was added first is opened first."""
        heappush(self.heap, (bound_s, next(self.ticks), low, high))

    def _may_be_better(self) -> bool:
        """Tells whether a box is left that may be better, and effort to open it."""
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
        """Forgets the cuts through which no path can be better than the best.

        For a stream all cuts stay: `lower_bound` looks at them again, with the links between
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
        # A better path's maxima are below the cap together, and each of them is above the least.
        caps = tuple(self._cap_s() - sum(low) + low_s for low_s in low)
        through = sums_through(_under(sums, phases, caps))
        enough_s = self.best_s * (1 + 1e-12) - self.waits * sum(low)
        kept = [np.flatnonzero(self.objective.summed(x) <= enough_s) for x in through]
        if all(len(places) for places in kept):
            self.table.narrow(kept)

    def _cap_s(self) -> float:
        """Bounds the maxima of a better path, together."""
        if not self.waits:
            return np.inf
        return (self.best_s - self.least_sum_s) / self.waits * (1 + 1e-12)


def _under(
    matrices: list[Matrix],
    phases: list[list[Matrix]],
    caps: Caps,
) -> list[Matrix]:
    """Makes matrices infinite where a phase exceeds its cap."""
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

    All that is better has smaller maxima: boxes below them, each halved.
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
        # The boxes of later phases have no path that those of this one have.
        low = with_entry(low, phase, maximum)
    return boxes
