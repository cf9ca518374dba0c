"""Holds the seconds of all possible stages between given cuts, for a search for the best cuts.

The search needs the seconds of each stage with its best fates. Choosing fates takes long,
and most stages never matter. So each stage first has a lower bound of its seconds, which is
counted quickly, and the search refines only the stages of the plans that look best so far:

    open       the seconds are a lower bound: at first the seconds without recomputation and swaps,
               later the bound that prices of bytes and seconds prove, if higher (`dual_bounds.py`)
    settled    the seconds are those of fates that were found (`stage_fates.py`), or of keeping
               everything; infinite if no fates fit

Bounds only rise. So if a plan is the best by these numbers and its stages are all settled,
no plan is better. There is one exception: a search for the fates of a cell may miss the best
ones. Then the cell is recorded in `Table.unproven`.

Legend: a cell (s, i, j) is the segment of layers [i, j) as stage s. A path is the bounds of
all stages, from 0 to the number of layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
from jaxtyping import Bool

from jvpipe.ir.kinds import Kind
from jvpipe.planners.joint.dual_bounds import DualBounds, Prices, Pricing
from jvpipe.planners.joint.lot import Cell, Lot, cells
from jvpipe.planners.joint.stage_fates import FateQuery, FateSearch
from jvpipe.planners.model.chain_dp import Matrix
from jvpipe.planners.model.keep_all import KeptBytes
from jvpipe.planners.model.segments import CutBlock
from jvpipe.planners.model.spans import Cuts
from jvpipe.simulate.work_parts import PARTS

Path = tuple[int, ...]


@dataclass(frozen=True)
class Effort:
    """How hard to search: more effort finds better plans, and takes longer (see `surrogate.py`).

    Attributes:
        quick: how many states a first search for a cell's fates keeps after each layer.
        thorough: how many states a second search keeps, if the first may have missed the best.
        tolerance: the relative difference up to which seconds count as equal.
        layers: the search ends once fates were chosen for this many layers, over all cells.
    """

    quick: int
    thorough: int
    tolerance: float
    layers: int


@dataclass(eq=False)
class StageTable:
    """The cells of one stage, as matrices with a row for each start and a column for each end.

    Attributes:
        pricing: the choices of the layers.
        block: the cells, with what does not depend on fates.
        seconds: the seconds of settled cells, and the lower bounds of open cells.
        settled: whether a cell is settled.
    """

    pricing: Pricing
    block: CutBlock
    seconds: Matrix
    settled: Bool[np.ndarray, "_ _"]

    @staticmethod
    def of(pricing: Pricing, block: CutBlock) -> "StageTable":
        """Makes the table of a block, and settles the cells that keep everything or cannot fit."""
        limit = pricing.limit_bytes
        least_s = np.maximum(block.compute_s, block.traffic_s)
        possible = block.inside & (block.reducing_bytes <= limit)
        keeps = possible & (_keeping_bytes(pricing, block) <= limit)
        fits = keeps | (possible & (pricing.least_bytes(block) <= limit))
        seconds = np.where(fits, least_s, np.inf)
        return StageTable(pricing, block, seconds, keeps | ~fits)

    def place(self, i: int, j: int) -> tuple[int, int]:
        """Finds a segment's row and column."""
        row = np.searchsorted(self.block.starts, i)
        column = np.searchsorted(self.block.ends, j)
        return int(row), int(column)

    def loads_s(
        self,
        rows: np.ndarray,
        columns: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the seconds of cells as arguments of `least_steps_s` (`stage_simulation.py`).

        All seconds beyond those of keeping everything count as recomputation that may run
        while a backward waits for its cotangents. Any other work delays a step at least as
        much. So `least_steps_s` still bounds a step from below, even if some of these
        seconds are swaps.

        Args:
            rows: the row of each cell.
            columns: the column of each cell.

        Returns:
            The seconds of each part of the work (`PARTS`), and the seconds of the traffic. For an
            open cell, they follow from its lower bound.
        """
        block = self.block
        at = (rows, columns)
        seconds = self.seconds[at]
        forward_s = block.forward_s[at]
        compute_s = block.compute_s[at]
        traffic_s = block.traffic_s[at]
        kept_s = np.maximum(compute_s, traffic_s)
        work_s = np.where(seconds > kept_s, seconds, compute_s)
        # The halves of split backwards get 0 seconds: these cells stand for whole backwards.
        by_part = {
            Kind.F: forward_s,
            Kind.B: compute_s - forward_s,
            Kind.R: work_s - compute_s,
            Kind.RETURN: block.comm_s[at] / 2,
            Kind.U: block.once_s[at] / self.pricing.segments.problem.updates,
        }
        nothing = np.zeros_like(forward_s)
        parts_s = [by_part.get(part, nothing) for part in PARTS]
        return np.array(parts_s), traffic_s

    def price(self, prices: Prices) -> None:
        """Raises the lower bound of each cell to the one that these prices prove, if higher."""
        proven_s = np.maximum(self.seconds, self.pricing.bound_s(self.block, prices))
        self.seconds = np.where(self.settled, self.seconds, proven_s)

    def at(self, row: int, column: int) -> "StageTable":
        """Returns the table of one cell."""
        places = np.array([row]), np.array([column])
        at = np.ix_(*places)
        block = self.block.at(*places)
        return StageTable(self.pricing, block, self.seconds[at], self.settled[at])


def _keeping_bytes(pricing: Pricing, block: CutBlock) -> Matrix:
    """Counts the bytes of segments that keep everything; infinite if other choices may be faster.

    They may be faster if some layer has a choice that takes fewer seconds, or if the choice that
    keeps everything swaps something. Then a cell that could keep everything stays open.
    """
    choices = pricing.choices
    segments = pricing.segments
    layers = slice(block.starts[0], block.ends[-1])
    kept_s = choices.own_s[layers, :1]
    others_s = np.c_[choices.own_s, choices.forward_s][layers]
    if (others_s < kept_s).any() or choices.swapped_bytes[layers, 0].any():
        return np.full(block.inside.shape, np.inf)
    kept = KeptBytes.of(
        segments,
        block,
        choices.left_bytes[:, 0],
        choices.working_bytes[:, 0],
    )
    return kept.peak(segments.in_flight[block.s], block.fixed_bytes)


class Table:
    """The cells of all stages, refined along the paths that a search asks for.

    Args:
        pricing: the choices of all layers, and the memory limit.
        cuts: for each bound of the stages, the cuts at which it may lie.
        effort: how hard to search for fates.
        most_swapped_bytes: for each stage, what it may swap per micro-batch; empty: any amount.
    """

    def __init__(
        self,
        pricing: Pricing,
        cuts: Sequence[Cuts],
        effort: Effort,
        most_swapped_bytes: Sequence[float] = (),
    ) -> None:
        self.pricing = pricing
        self.effort = effort
        self.cuts = list(cuts)
        self.stages = [
            StageTable.of(pricing.at(s), pricing.segments.block(s, *near))
            for s, near in enumerate(pairwise(cuts))
        ]
        self.most_swapped_bytes = most_swapped_bytes or (np.inf,) * len(self.stages)
        self.fates: dict[Cell, tuple[int, ...]] = {}
        self.prices: dict[Cell, Prices] = {}
        # Lower bounds of the settled cells whose known choices may not be the best.
        self.unproven: dict[Cell, float] = {}
        self.layers = 0  # for how many layers fates were chosen so far, over all cells

    def found(self, cell: Cell) -> tuple[StageTable, tuple[int, int]]:
        """Finds the stage of a cell, and the cell's row and column in that stage."""
        stage = self.stages[cell[0]]
        return stage, stage.place(*cell[1:])

    @property
    def proven(self) -> bool:
        """Whether the seconds of every settled cell are the least possible."""
        return not self.unproven

    def lower(self) -> list[StageTable]:
        """Returns the stages with proven lower bounds in place of the seconds of all cells."""
        stages = [replace(stage, seconds=stage.seconds.copy()) for stage in self.stages]
        for (s, i, j), bound_s in self.unproven.items():
            stage = stages[s]
            stage.seconds[stage.place(i, j)] = bound_s
        return stages

    def along(self, path: Path) -> list[StageTable]:
        """Returns the stages, each with only its cell of a path."""
        return [stage.at(*at) for stage, at in map(self.found, cells(path))]

    def path(self, places: Sequence[int] | np.ndarray) -> Path:
        """Returns the cuts at these indices, one for each bound."""
        pairs = zip(self.cuts, places, strict=True)
        return tuple(int(cuts[place]) for cuts, place in pairs)

    def open_cells(self, path: Path) -> list[Cell]:
        """Lists the open cells of a path."""
        found = {cell: self.found(cell) for cell in cells(path)}
        return [cell for cell, (stage, at) in found.items() if not stage.settled[at]]

    def refine(self, open_cells: Sequence[Cell]) -> None:
        """Refines open cells: first by prices, then by choosing fates, which settles them."""
        new = [cell for cell in open_cells if cell not in self.prices]
        if new:
            self._price(new)
            return
        for cell in open_cells:
            self._choose(cell)

    def _price(self, open_cells: Sequence[Cell]) -> None:
        """Finds the best prices of some cells, which also raise the bounds of their neighbors."""
        asked = []
        for cell in open_cells:
            stage, _ = self.found(cell)
            query = self.query(cell)
            limits = query.room_bytes, query.compute_s, query.traffic_s
            asked.append(stage.pricing.relaxed(cell, *limits))
        bounds = DualBounds(asked)
        solved = zip(open_cells, bounds.solve(), bounds.best, strict=True)
        for cell, prices, bound_s in solved:
            self.prices[cell] = prices
            stage, at = self.found(cell)
            if bound_s > stage.seconds[at] * (1 + self.effort.tolerance):
                stage.price(prices)

    def _choose(self, cell: Cell) -> None:
        """Searches for the best choices of a cell, and settles the cell with what is found."""
        stage, at = self.found(cell)
        bound_s = float(stage.seconds[at])
        self.layers += cell[2] - cell[1]
        search = FateSearch(stage.pricing, self.query(cell), self.prices[cell])
        fates = search.least_seconds(self.effort.quick)
        enough_s = bound_s * (1 + self.effort.tolerance)
        may_be_better = not fates.proven and enough_s < fates.seconds
        if may_be_better and self.effort.thorough > self.effort.quick:
            better = search.least_seconds(self.effort.thorough, fates.seconds)
            fates = better if better.choices else replace(fates, bound_s=better.bound_s)
        # If nothing was found, the states that were dropped may have led to choices that
        # fit. Then the choices that hold few bytes are tried.
        if not fates.choices and np.isfinite(fates.bound_s):
            fates = search.emptiest()
        self.fates[cell] = fates.choices
        if not fates.proven and enough_s < fates.seconds:
            self.unproven[cell] = bound_s
        stage.settled[at] = True
        stage.seconds[at] = fates.seconds

    def query(self, cell: Cell) -> FateQuery:
        """Makes the query by which fates are chosen for a cell."""
        stage, at = self.found(cell)
        block = stage.block
        return FateQuery(
            Lot.of_stage(self.pricing.segments.in_flight[block.s], cell),
            float(block.compute_s[at]),
            float(block.traffic_s[at]),
            self.pricing.limit_bytes - float(block.fixed_bytes[at]),
            self.most_swapped_bytes[block.s],
        )

    def seconds(self, cell: Cell) -> float:
        """Returns a settled cell's seconds (infinite if nothing fits), or an open cell's bound."""
        stage, at = self.found(cell)
        return float(stage.seconds[at])

    def choices(self, path: Path) -> tuple[int, ...]:
        """Returns the choices of a path whose cells are all settled and fit.

        A cell keeps all if no search was needed.
        """
        of_cells = (self.fates.get((s, i, j), (0,) * (j - i)) for s, i, j in cells(path))
        return tuple(chain.from_iterable(of_cells))
