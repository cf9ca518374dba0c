"""Finds the cuts and fates with the fewest surrogate seconds, and a lower bound for any plan.

The surrogate (`stage_cost.py`) estimates the seconds of a step in closed form. A path is the bounds
of all stages. It cuts the layers into segments, one for each stage. Legend:

    M      the micro-batches of a step
    t      seconds of a segment per micro-batch, with the segment's best fates; also its part of
           what happens once per step, all-reduces and updates (`Objective.with_once`)
    F      the seconds of the segment's forward, a part of t
    comm   the seconds of the link before the segment per micro-batch, in both directions

Sums and maxima are over the segments of a path:

    asynchronous   M max(t, comm)
    1f1b           sum(t + comm) + (M - 1) max(t, comm)
    gpipe          sum(t + comm) + (M - 1) (max(F, comm / 2) + max(t - F, comm / 2))

Under caps on the maxima, the path with the least sum is a shortest path through the segments that
keep the caps. The search divides the possible caps into boxes. It always opens the box with the
least lower bound, and finds that box's shortest path. It ends when no box has a bound below the
best path found.

Why the search is exact: each form grows with t, and the t of a segment depends on no other segment.
So each segment can take its best fates, whatever the other segments are. The shortest path of a box
has the least sum of the box, so a better path must have a smaller maximum. Only boxes with caps
below the maxima of the shortest path are left. A test compares the best paths with those of an
enumeration.

Why the search is fast: each t is a lower bound at first. The fates of a segment are searched only
when a shortest path goes through the segment. That happens for few segments. The table calls a
segment as a stage a cell. A cell is open while its t is a lower bound, and settled after that.

How hard to search may be changed (`Effort` in `segment_table.py`). With less effort the result may
not be the best, but its lower bound stays valid.
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
    """Paths through a table, the best first.

    Attributes:
        paths: the paths met; empty if nothing fits.
        step_s: the seconds of a step with the best path.
        bound_s: no path in the table takes fewer seconds.
        cap_s: a path whose maxima (see the module) add up to more is not better than the best path.
    """

    paths: tuple[Path, ...]
    step_s: float
    bound_s: float
    cap_s: float


@dataclass(frozen=True)
class Objective:
    """The surrogate as a function of a path: a sum over stages, and a maximum for each phase.

    The maximum of a phase is how long a micro-batch waits for the phase's slowest stage. GPipe has
    two phases, forwards and backwards. Other schedules have one.
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
        """Adds to each t a micro-batch's share of what happens once per step.

        If a stage's all-reduce and updates take A seconds, the share is A / M: the stage is then
        busy for M (t + A / M) = M t + A seconds per step.
        """
        m = self.problem.microbatches
        stages = self.table.stages
        return [t + stage.block.once_s / m for t, stage in zip(seconds, stages, strict=True)]

    def sums(self, seconds: list[Matrix]) -> list[Matrix]:
        """Returns t + comm of each segment."""
        once = zip(self.with_once(seconds), self.table.stages, strict=True)
        return [t + stage.block.comm_s for t, stage in once]

    def phases(self, seconds: list[Matrix]) -> list[list[Matrix]]:
        """Returns for each phase how long each segment keeps the others waiting per micro-batch."""
        blocks = [stage.block for stage in self.table.stages]
        stages = list(zip(self.with_once(seconds), blocks, strict=True))
        if not self.two_phases:
            return [[np.maximum(t, x.comm_s) for t, x in stages]]
        # Each phase uses one direction of the link. The two directions take equal parts of comm.
        forward = [np.maximum(x.forward_s, x.comm_s / 2) for x in blocks]
        backward = [np.maximum(t - x.forward_s, x.comm_s / 2) for t, x in stages]
        return [forward, backward]

    def parts_s(self, cell: Cell) -> tuple[float, float, float]:
        """Returns t (as in `with_once`), F and comm of a cell."""
        t, forward_s, comm_s = self.table.parts_s(cell)
        stage = self.table.stage(cell)
        once_s = float(stage.block.once_s[stage.place(*cell[1:])])
        return t + once_s / self.problem.microbatches, forward_s, comm_s

    def maxima(self, path: Path) -> Caps:
        """Returns for each phase the maximum over a path's segments."""
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
        """Returns the seconds that a sum over stages adds to a step.

        An asynchronous schedule has no sum in its form, so a finite sum becomes 0. An infinite sum
        stays: it marks an impossible path.
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
    # Too little effort was spent on the fates of some cells to prove that their t is the least. So
    # the bound of the step must be computed from proven lower bounds of t.
    lower_s = [table.lower_s(stage) for stage in table.stages]
    bound_s = max(result.bound_s, objective.bound_s(lower_s))
    return replace(result, bound_s=min(result.step_s, bound_s))


@dataclass
class _Boxes:
    """The state of a search: the boxes left to open, and the paths met.

    A box has a low and a high cap for each phase. It stands for the paths whose maxima lie between
    the low and the high caps. The bound of a box is the least sum of any path under the high caps,
    plus `waits` times the low caps. No path of the box takes less, because neither its sum nor its
    maxima are smaller.

    Attributes:
        objective: what is minimized.
        heap: the boxes as (bound, tick, low caps, high caps), the least bound first.
        ticks: numbers the boxes in the order in which they were added.
        paths: the paths met, with the seconds of a step.
        best_s: the seconds of the best path met.
        least_sum_s: a lower bound on the sum of any path.
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
        """Opens boxes, least bound first, until none can hold a better path or effort runs out."""
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
            # The seconds of open cells are only lower bounds. The path's open cells are refined,
            # and the box is pushed again, because another path may now be the shortest. This ends,
            # because a cell is refined at most twice.
            opened = table.open_cells(path)
            if opened:
                table.refine(opened)
                box_s = total_s + self.waits * sum(low)
                self._push(max(box_s, expected_s), low, high)
                if not table.open_cells(path):
                    self._meet(path)
                continue
            # The path has the least sum of its box, so a better path of the box has a smaller
            # maximum in some phase.
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
        """Tells whether a box that may have a better path is left, and effort to open the box."""
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
        """Removes the cuts through which no path can be better than the best path met.

        For an asynchronous schedule all cuts stay: `lower_bound.py` searches without transfers, and
        bounds all cells of the table again with transfers.
        """
        if not self.objective.problem.schedule.synchronous:
            return
        seconds = [self.table.lower_s(stage) for stage in self.table.stages]
        sums = self.objective.sums(seconds)
        phases = self.objective.phases(seconds)
        low = [least_max(phase) for phase in phases]
        least_s, _ = least_sum(sums)
        self.least_sum_s = max(self.least_sum_s, float(self.objective.summed(least_s)))
        # The maxima of a better path add up to less than the cap. Each maximum is at least the
        # least of its phase. So a maximum is at most the cap minus the other phases' least maxima.
        caps = tuple(self._cap_s() - sum(low) + low_s for low_s in low)
        through = sums_through(_under(sums, phases, caps))
        enough_s = self.best_s * (1 + 1e-12) - self.waits * sum(low)
        kept = [np.flatnonzero(self.objective.summed(x) <= enough_s) for x in through]
        if all(len(places) for places in kept):
            self.table.narrow(kept)

    def _cap_s(self) -> float:
        """Returns the most that the maxima of a path add up to if it beats the best path met."""
        if not self.waits:
            return np.inf
        # A better path takes less than `best_s`, of which its sum takes `least_sum_s` or more. The
        # rest is left for `waits` times the maxima.
        return (self.best_s - self.least_sum_s) / self.waits * (1 + 1e-12)


def _under(
    matrices: list[Matrix],
    phases: list[list[Matrix]],
    caps: Caps,
) -> list[Matrix]:
    """Returns the matrices with infinity for each cell that is over the cap of some phase."""
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
    """Divides what remains of a box into smaller boxes, given the maxima of its shortest path.

    A better path has a smaller maximum in some phase. For each phase, the caps below the given
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
        # In the boxes of later phases, this phase has at least its maximum: no two boxes overlap.
        low = with_entry(low, phase, maximum)
    return boxes
