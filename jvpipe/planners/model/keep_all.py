"""Counts the bytes of every possible stage if each residual is kept, for many segments at once.

A segment is some consecutive layers, considered as a possible stage. `stage_bytes.py` counts the
same numbers for one stage at a time. Tests compare both (tests/papers/test_kept_stages.py,
tests/planners/model/test_groups.py). For stages of several devices, the peaks are upper bounds.

Legend: `cuts` are the layers before which the model may be cut. A grid's entry (a, b) is for the
segment from the a-th to the b-th cut. If b <= a, the segment has no layer: its entry is infinite
in the result of `peak_bytes`, and means nothing in other grids.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jvpipe.planners.model.chain_dp import least_path
from jvpipe.planners.model.grids import OverJ, between, most_up_to, sums
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.segments import CutBlock, Segments
from jvpipe.planners.model.spans import Cuts, Grid
from jvpipe.planners.model.stage_bytes import option_bytes


@dataclass(frozen=True)
class KeptBytes:
    """The bytes that segments hold of one micro-batch if all is kept; the same for every stage.

    Attributes:
        own: the bytes that are held once all forwards of the segment have run, except the values
            that several layers read.
        kept: the same bytes with these values.
        beyond: the most bytes that are held while a layer runs, minus `kept`.
    """

    own: Grid
    kept: Grid
    beyond: Grid

    @staticmethod
    def of(
        segments: Segments,
        block: CutBlock,
        kept: OverJ,
        working: OverJ,
    ) -> "KeptBytes":
        """Counts the bytes of a block's segments.

        Args:
            segments: the segments of the model.
            block: the segments that are counted.
            kept: for each layer, the bytes that it keeps of a micro-batch.
            working: for each layer, the bytes that it needs only while it runs.
        """
        starts, ends = block.starts, block.ends
        own = between(sums(kept), starts, ends)
        in_the_end = own + block.shared_bytes
        at_work = segments.at_work(starts, ends, kept, working)
        beyond = most_up_to(at_work, starts, ends) - in_the_end
        return KeptBytes(own, in_the_end, beyond)

    def peak(self, in_flight: int, fixed_bytes: Grid) -> Grid:
        """Counts the most bytes that each segment holds as a stage.

        Args:
            in_flight: how many micro-batches are in flight on the stage.
            fixed_bytes: the result of `Segments.fixed_bytes`. It includes the shared values of all
                micro-batches in flight.
        """
        return fixed_bytes + in_flight * self.own + self.beyond


class KeepAll:
    """The bytes of all segments, if each layer has its first option, which keeps everything.

    Args:
        problem: gives the costs, the schedule and the devices.
        cuts: the cuts between which segments are counted; None: all allowed cuts.
        s: the stage whose devices' costs are used.
    """

    def __init__(
        self,
        problem: Problem,
        cuts: Cuts | None = None,
        s: int = 0,
    ) -> None:
        self.problem = problem
        self.s = s
        self.segments = Segments(problem).of(s)
        self.cuts = self.segments.cuts if cuts is None else cuts

    def peak_bytes(self, s: int) -> Grid:
        """Counts each segment's peak on a device of stage s, plus the device's `less_bytes`.

        The backwards of the stage are counted as whole, and its device as having no other stage.
        """
        # If the devices of stage s work on other shares of micro-batches, layers have other bytes.
        if self.segments.of(s) is not self.segments:
            return KeepAll(self.problem, self.cuts, s).peak_bytes(s)
        fixed_bytes = self.segments.fixed_bytes(s, self.cuts, self.cuts)
        peak_bytes = self._kept.peak(self.segments.in_flight[s], fixed_bytes)
        if self.problem.group(s).replicas > 1:
            reducing_bytes = self.segments.block(s, self.cuts, self.cuts).reducing_bytes
            peak_bytes = np.maximum(peak_bytes, reducing_bytes)
        return self._inside(peak_bytes)

    @cached_property
    def _block(self) -> CutBlock:
        """All segments as stage s; only numbers that do not differ between stages are read."""
        return self.segments.block(self.s, self.cuts, self.cuts)

    @cached_property
    def _kept(self) -> KeptBytes:
        """The bytes of one micro-batch in every segment."""
        # A layer's first option keeps every residual.
        layers = [option_bytes(layer, layer.options[0]) for layer in self.segments.costs.layers]
        kept = np.array([float(x.kept) for x in layers])
        working = np.array([float(x.working) for x in layers])
        return KeptBytes.of(self.segments, self._block, kept, working)

    @property
    def kept_bytes(self) -> Grid:
        """The bytes that are kept of one micro-batch, shared values included."""
        return self._kept.kept

    def _inside(self, grid: Grid) -> Grid:
        return np.where(self._block.inside, grid, np.inf)


def least_kept_bytes(problem: Problem) -> float:
    """Counts the bytes of the fullest stage if all is kept, with the cuts that make it least full.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> costs = Costs(tuple(LayerCost("layer", 1.0, 2.0, (Option(kept),)) for kept in (10, 20, 40)))
    >>> least_kept_bytes(Problem(costs, 2, find_schedule("gpipe"), 4))
    160.0
    """
    peak_bytes = map(KeepAll(problem).peak_bytes, range(problem.stages))
    return least_path(peak_bytes, np.maximum)[0]
