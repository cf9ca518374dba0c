"""What every stage holds if each residual is kept.

It is `stage_bytes` of many segments at once, held to it by property tests
(tests/papers/test_kept_stages.py, tests/planners/model/test_groups.py).

Legend: a grid's entry (a, b) is for the layers from the a-th to the b-th place where the model may
be cut (`cuts`); where there is no layer between them it is infinite.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jvpipe.planners.model.chain_dp import least_path
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.segments import (
    CutBlock,
    Cuts,
    Grid,
    OverJ,
    Segments,
    between,
    most_up_to,
    sums,
)
from jvpipe.planners.model.stage_bytes import StageBytes, on_device_bytes, option_bytes


@dataclass(frozen=True)
class KeptBytes:
    """What segments hold of one micro-batch if all is kept, whatever the stage.

    Attributes:
        shared: of values that several layers read.
        kept: in the end, shared values included.
        beyond: what the layer at work needs beyond what its micro-batch keeps in the end, at most.
    """

    shared: Grid
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
            segments: of the model.
            block: those that are looked at.
            kept: bytes that each layer keeps of a micro-batch.
            working: bytes that each layer works with.
        """
        starts, ends = block.starts, block.ends
        in_the_end = between(sums(kept), starts, ends) + block.shared_bytes
        at_work = segments.at_work(starts, ends, kept, working)
        beyond = most_up_to(at_work, starts, ends) - in_the_end
        return KeptBytes(block.shared_bytes, in_the_end, beyond)

    def peak(self, in_flight: int, fixed_bytes: Grid) -> Grid:
        """Counts what a stage of each segment holds at most.

        Args:
            in_flight: micro-batches on the stage.
            fixed_bytes: what `Segments.fixed_bytes` counts, shared values of all micro-batches
                included.
        """
        static = fixed_bytes - on_device_bytes(in_flight, self.shared)
        return StageBytes(in_flight, static, self.kept, np.zeros(()), self.beyond).peak


class KeepAll:
    """The bytes of `stage_cost` for all segments, with `options[0]` of each layer."""

    def __init__(
        self,
        problem: Problem,
        cuts: Cuts | None = None,
        s: int = 0,
    ) -> None:
        self.problem = problem
        self.segments = Segments(problem).of(s)
        self.cuts = self.segments.cuts if cuts is None else cuts

    def peak_bytes(self, s: int) -> Grid:
        """Counts the bytes on the device of stage s, and those that it has less than others."""
        # Devices of this stage work on other shares, for which layers have other bytes.
        if self.segments.of(s) is not self.segments:
            return KeepAll(self.problem, self.cuts, s).peak_bytes(s)
        fixed_bytes = self.segments.fixed_bytes(s, self.cuts, self.cuts)
        peak_bytes = self._kept.peak(self.segments.in_flight[s], fixed_bytes)
        if self.problem.group(s).replicas == 1:
            return self._inside(peak_bytes)
        reducing_bytes = self.segments.block(s, self.cuts, self.cuts).reducing_bytes
        return self._inside(np.maximum(peak_bytes, reducing_bytes))

    @cached_property
    def _block(self) -> CutBlock:
        """All segments: what crosses their bounds depends on no stage, if all links are alike."""
        return self.segments.block(0, self.cuts, self.cuts)

    @cached_property
    def _kept(self) -> KeptBytes:
        layers = [option_bytes(layer, layer.options[0]) for layer in self.segments.costs.layers]
        kept = np.array([float(x.kept) for x in layers])
        working = np.array([float(x.working) for x in layers])
        return KeptBytes.of(self.segments, self._block, kept, working)

    @property
    def kept_bytes(self) -> Grid:
        """What is kept of one micro-batch, shared values included."""
        return self._kept.kept

    def _inside(self, grid: Grid) -> Grid:
        return np.where(self._block.inside, grid, np.inf)


def least_kept_bytes(problem: Problem) -> float:
    """Counts the fewest bytes of the fullest device, over all cuts, if everything is kept.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> costs = Costs(tuple(LayerCost("layer", 1.0, 2.0, (Option(kept),)) for kept in (10, 20, 40)))
    >>> least_kept_bytes(Problem(costs, 2, find_schedule("gpipe"), 4))
    160.0
    """
    kept = KeepAll(problem)
    return least_path(map(kept.peak_bytes, range(problem.stages)), np.maximum)[0]
