"""Finds the cuts and fates with the fewest surrogate seconds, and a lower bound for any plan.

The surrogate (`stage_cost.py`) estimates the seconds of a step in closed form. A path is the bounds
of all stages. It cuts the layers into segments, one for each stage. Legend:

    M      the micro-batches of a step
    t      seconds of a segment per micro-batch, with the segment's best fates, plus 1 / M of what
           happens once per step: all-reduces and updates (`Objective.with_once`)
    F      the seconds of the segment's forward, a part of t
    comm   the seconds of the link before the segment per micro-batch, in both directions

Sums and maxima are over the segments of a path:

    asynchronous   M max(t, comm)
    1f1b           sum(t + comm) + (M - 1) max(t, comm)
    gpipe          sum(t + comm) + (M - 1) (max(F, comm / 2) + max(t - F, comm / 2))

Under caps on the maxima, the path with the least sum is a shortest path through the segments that
keep the caps. The search divides the possible caps into boxes. It always opens the box with the
least lower bound, and finds that box's shortest path. It ends when no box has a bound below the
best path found. It begins with a box of caps just above the least ones, because the best path is
often there, and the effort may not suffice for more.

Why the search is exact: each form grows with t, and the t of a segment depends on no other segment.
So each segment can take its best fates, whatever the other segments are. The shortest path of a box
has the least sum of the box. Any better path of the box must therefore have a smaller maximum. So
after a box is opened, only its parts with caps below the maxima of its shortest path are left. A
test compares the best paths with an enumeration of all paths.

Why the search is fast: each t is a lower bound at first. The fates of a segment are searched only
when a shortest path goes through the segment. That happens for few segments. In the table,
a cell is a segment together with the number of its stage. A cell is open while its t is a
lower bound, and settled after that.

How hard to search may be changed (`Effort` in `segment_table.py`). With less effort the result may
not be the best, but its lower bound stays valid.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import count

import numpy as np

from jvpipe.planners.joint.effort import CUTS
from jvpipe.planners.joint.segment_table import Path, StageTable, Table
from jvpipe.planners.model.chain_dp import Matrix, Places, least_max, least_sum
from jvpipe.planners.model.problem import Decision, Problem, with_entry
from jvpipe.planners.model.segments import CutBlock

Caps = tuple[float, ...]
Box = tuple[Caps, Caps]
"""The low and the high caps."""


Stages = Sequence[tuple[CutBlock, Matrix]]
"""The segments of each stage, with their t."""


@dataclass(frozen=True)
class Solution:
    """The paths (cuts of plans) that a search found, and the table that it searched.

    If there were too many cuts, `bounded` in `cut_windows.py` left some of them out of the table.
    `bound_s` and `cap_s` do not hold for plans with these cuts.

    Attributes:
        paths: the paths found, the best first; empty if nothing fits.
        step_s: the seconds of a step with the best path.
        bound_s: no plan takes fewer seconds.
        table: the segments between the cuts that were searched.
        cap_s: a plan with a cut that is not in the table has a stage that takes longer than this.
    """

    paths: tuple[Path, ...]
    step_s: float
    bound_s: float
    table: Table
    cap_s: float = np.inf

    @property
    def feasible(self) -> bool:
        """Whether the search found a plan that fits."""
        return bool(self.paths)

    def decision(self, path: Path | None = None) -> Decision:
        """Turns a path into a decision; the best path if none is given."""
        path = path or self.paths[0]
        return Decision(path, self.table.choices(path))


@dataclass(frozen=True, eq=False)
class Objective:
    """The surrogate of the paths through some segments.

    It bounds all of these paths from below. If the segments make only one path, the bounds are the
    exact numbers of that path.

    Attributes:
        problem: the problem to plan for.
        segments: the possible segments of each stage.
    """

    problem: Problem
    segments: Sequence[StageTable]

    @cached_property
    def with_once(self) -> Stages:
        """The segments, with a micro-batch's share of what happens once per step added to t.

        If a stage's all-reduce and updates take A seconds, the share is A / M: the stage is then
        busy for M (t + A / M) = M t + A seconds per step.
        """
        m = self.problem.microbatches
        return [(x.block, x.seconds + x.block.once_s / m) for x in self.segments]

    @cached_property
    def phases(self) -> list[list[Matrix]]:
        """For each phase, how long each segment keeps the others waiting per micro-batch."""
        return phases(self.problem, self.with_once)

    @cached_property
    def maxima(self) -> Caps:
        """For each phase, a lower bound on the maximum over the segments of a path."""
        return tuple(map(least_max, self.phases))

    def shortest(self, caps: Sequence[float]) -> tuple[float, Places | None]:
        """Finds the path with the least sum of t + comm among those that keep the caps of phases.

        Args:
            caps: of the first phases; phases without a cap have no limit.

        Returns:
            The seconds that the sum adds to a step, and the places of the path; infinity and None
            if no path keeps the caps. An asynchronous schedule has no sum in its form.
        """
        sums = [t + block.comm_s for block, t in self.with_once]
        for phase, cap in zip(self.phases, caps, strict=False):
            if np.isfinite(cap):
                both = zip(phase, sums, strict=True)
                sums = [np.where(waits <= cap, total, np.inf) for waits, total in both]
        total_s, places = least_sum(sums)
        if places and not self.problem.schedule.synchronous:
            total_s = 0.0
        return total_s, places

    @property
    def step_s(self) -> float:
        """A lower bound on the seconds of a step."""
        total_s, _ = self.shortest(())
        return _step_s(self.problem, total_s, self.maxima)


def _step_s(
    problem: Problem,
    total_s: float,
    maxima: Caps,
) -> float:
    """Returns the seconds of a step by the module's forms, from their sum and their maxima."""
    return total_s + (problem.microbatches - problem.schedule.synchronous) * sum(maxima)


def phases(problem: Problem, stages: Stages) -> list[list[Matrix]]:
    """Returns for each phase how long each segment keeps the others waiting per micro-batch.

    GPipe has two phases: forwards wait for the slowest forward, and backwards for the slowest
    backward. Other schedules have one phase.
    """
    if problem.phases == 1:
        return [[np.maximum(t, x.comm_s) for x, t in stages]]
    # Each phase uses one direction of the link. The two directions take equal parts of comm.
    forward = [np.maximum(x.forward_s, x.comm_s / 2) for x, _ in stages]
    backward = [np.maximum(t - x.forward_s, x.comm_s / 2) for x, t in stages]
    return [forward, backward]


def search(problem: Problem, table: Table) -> Solution:
    """Finds the best paths through a table; no paths if nothing fits.

    A box has a low and a high cap for each phase. It stands for the paths whose maxima lie between
    the low and the high caps. A box is bounded by the least sum of any path under the high caps,
    with the low caps as maxima. No path of the box has a smaller sum or smaller maxima.
    """
    effort = table.effort
    ticks = count()
    # Boxes with equal bounds are opened in the order in which they were added.
    boxes = sorted((begin_s, next(ticks), box) for begin_s, box in _first_boxes(problem, table))
    paths = dict[Path, float]()
    best_s = np.inf
    bound_s = 0.0
    left_s = np.inf  # no path that was left out of the boxes takes less
    # Boxes are opened, least bound first, until none can hold a better path or effort runs out.
    while boxes and boxes[0][0] < best_s * (1 - effort.tolerance):
        if paths and table.layers > effort.layers:
            break
        expected_s, _, box = heappop(boxes)
        low, high = box
        if table.proven:
            bound_s = max(bound_s, expected_s)
        total_s, places = Objective(problem, table.stages).shortest(high)
        if places is None:
            continue
        path = table.path(places)
        # The seconds of open cells are only lower bounds. The path's open cells are refined,
        # and the box is pushed again, because another path may now be the shortest. This ends,
        # because a cell is refined at most twice.
        inside = [box]
        opened = table.open_cells(path)
        if opened:
            table.refine(opened)
        if not table.open_cells(path):
            met = Objective(problem, table.along(path))
            step_s = met.step_s
            if np.isfinite(step_s):
                paths[path] = step_s
            best_s = min(best_s, step_s)
            # If the path has the least sum of its box, or nearly so, then a better path of the box
            # has a smaller maximum in some phase.
            sum_s, _ = met.shortest(())
            if sum_s <= total_s * (1 + effort.tolerance):
                left_s = min(left_s, _step_s(problem, total_s, met.maxima))
                inside = _rest(low, high, met.maxima)
        for part in inside:
            part_s = _step_s(problem, total_s, part[0])
            heappush(boxes, (max(part_s, expected_s), next(ticks), part))
    if table.proven:
        bound_s = min(left_s, boxes[0][0]) if boxes else left_s
    else:
        # The search for the fates of some cells was too short to prove that their t is the least.
        # So the step is bounded again, by proven lower bounds of t.
        bound_s = max(bound_s, Objective(problem, table.lower()).step_s)
    best_first = tuple(sorted(paths, key=paths.__getitem__))
    return Solution(best_first, best_s, min(bound_s, best_s), table)


def _first_boxes(problem: Problem, table: Table) -> Iterator[tuple[float, Box]]:
    """Yields boxes of all paths, and their lower bounds; the first has the least caps.

    In each of the other boxes, one phase is over its cap, and the phases before it are not.
    """
    least, near = _near_caps(problem, table)
    sum_s, _ = Objective(problem, table.stages).shortest(())
    yield _step_s(problem, sum_s, least), (least, near)
    for phase, cap in enumerate(near):
        low = with_entry(least, phase, cap)
        high = near[:phase] + (np.inf,) * (len(near) - phase)
        yield _step_s(problem, sum_s, low), (low, high)


def _near_caps(problem: Problem, table: Table) -> Box:
    """Finds nearly the least cap of each phase, and caps just above that some path keeps.

    All cells of a path under these caps get prices, which raise the bounds of other cells, too.
    Then the least caps are found again, until such a path has no cell without prices. This takes
    far less time than choosing the fates of one path.
    """
    while True:
        objective = Objective(problem, table.stages)
        near = least = objective.maxima
        places = None
        # No path may keep the least caps of two phases at once, so larger ones are tried, too.
        for factor in CUTS.near_caps:
            near = tuple(factor * cap * (1 + table.effort.tolerance) for cap in least)
            _, places = objective.shortest(near)
            if places:
                break
        opened = table.open_cells(table.path(places)) if places else []
        unpriced = [cell for cell in opened if cell not in table.prices]
        if not unpriced:
            return least, tuple(CUTS.near_cap * cap for cap in near)
        table.refine(unpriced)


def _rest(
    low: Caps,
    high: Caps,
    maxima: Caps,
) -> list[Box]:
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
        # In the boxes of later phases, this phase has at least the given maximum, so no two boxes
        # overlap.
        low = with_entry(low, phase, maximum)
    return boxes
