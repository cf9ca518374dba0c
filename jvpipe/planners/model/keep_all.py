"""What every stage holds if each residual is kept.

Legend: a grid's entry (a, b) is for the layers from the a-th to the b-th place where the model may be cut (`cuts`);
where there is no layer between them it is infinite.
"""

from functools import cached_property

import numpy as np

from jvpipe.planners.model.chain_dp import least_path
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.segments import Block, Cuts, Grid, Segments, between, most_up_to, sums
from jvpipe.planners.model.stage_bytes import StageBytes, on_device_bytes, option_bytes


class KeepAll:
    """The bytes of `stage_cost` for all segments, with `options[0]` of each layer."""

    def __init__(self, problem: Problem, cuts: Cuts | None = None, s: int = 0) -> None:
        self.problem, self.segments = problem, Segments(problem).of(s)
        self.cuts = self.segments.cuts if cuts is None else cuts

    def peak_bytes(self, s: int) -> Grid:
        """Counts the bytes on the device of stage s, and those that it has less than others."""
        if self.segments.of(s) is not self.segments:
            return KeepAll(self.problem, self.cuts, s).peak_bytes(s)
        in_flight, fixed = (
            self.segments.in_flight[s],
            self.segments.fixed_bytes(s, self.cuts, self.cuts),
        )
        static = fixed - on_device_bytes(in_flight, self._block.shared_bytes)
        stage_bytes = StageBytes(
            in_flight, static, self.kept_bytes, np.zeros(()), self.beyond_bytes
        )
        if self.problem.group(s).replicas == 1:
            return self._inside(stage_bytes.peak)
        reducing_bytes = self.segments.block(s, self.cuts, self.cuts).reducing_bytes
        return self._inside(np.maximum(stage_bytes.peak, reducing_bytes))

    @cached_property
    def _block(self) -> Block:
        """All segments: what crosses their bounds depends on no stage, where all links are alike."""
        return self.segments.block(0, self.cuts, self.cuts)

    @cached_property
    def _layers(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that each layer keeps of one micro-batch, and works with."""
        layers = [option_bytes(layer, layer.options[0]) for layer in self.segments.costs.layers]
        return np.array([float(x.kept) for x in layers]), np.array(
            [float(x.working) for x in layers]
        )

    @cached_property
    def kept_bytes(self) -> Grid:
        """What is kept of one micro-batch, shared values included."""
        return between(sums(self._layers[0]), self.cuts, self.cuts) + self._block.shared_bytes

    @cached_property
    def beyond_bytes(self) -> Grid:
        """What the layer at work needs beyond what its micro-batch keeps in the end."""
        return most_up_to(self.at_work, self.cuts, self.cuts) - self.kept_bytes

    @cached_property
    def at_work(self) -> Grid:
        """What is there of one micro-batch while each layer is at work."""
        return self.segments.at_work(self.cuts, self.cuts, *self._layers)

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
