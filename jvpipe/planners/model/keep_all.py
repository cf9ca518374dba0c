"""What every stage takes if each residual is kept, for planners that do not choose fates.

Legend: a grid's entry (a, b) is for the layers from the a-th to the b-th place where the model may be cut (`cuts`);
where there is no layer between them it is infinite.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from jvpipe.planners.model.chain_dp import least_path
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Block, Cuts, Grid, Segments, between, most_up_to, sums
from jvpipe.planners.model.stage_bytes import StageBytes, on_device_bytes, option_bytes


class KeepAll:
    """The numbers of `stage_cost` for all segments, with `options[0]` of each layer."""

    def __init__(
        self, problem: Problem, segments: Segments | None = None, cuts: Cuts | None = None
    ) -> None:
        self.problem = problem
        self.segments = segments or Segments(problem)
        self.cuts = self.segments.cuts if cuts is None else cuts
        self._compute_s: dict[tuple[float, ...], Grid] = {}
        self._others: dict[int, KeepAll] = {}

    def of(self, s: int) -> "KeepAll":
        """The same as the devices of stage s take it, on their shares of micro-batches."""
        segments = self.segments.of(s)
        if segments is self.segments:
            return self
        if id(segments) not in self._others:
            self._others[id(segments)] = KeepAll(self.problem, segments, self.cuts)
        return self._others[id(segments)]

    def at(self, cuts: Cuts) -> "KeepAll":
        """The same between some of the cuts."""
        return KeepAll(self.problem, self.segments, cuts)

    def forward_s(self, s: int) -> Grid:
        """Counts the seconds of stage s's forward."""
        return self._inside(between(self.segments.forward_of(s), self.cuts, self.cuts))

    def compute_s(self, s: int) -> Grid:
        """Counts the seconds of stage s's forward and backward."""
        if self.of(s) is not self:
            return self.of(s).compute_s(s)
        slowness = self.problem.slowness(s)
        if slowness not in self._compute_s:
            extra_s = sums(layer.options[0].extra_s for layer in self.problem.layers_on(s))
            total = self.segments.compute_of(s) + extra_s
            self._compute_s[slowness] = self._inside(between(total, self.cuts, self.cuts))
        return self._compute_s[slowness]

    def seconds(self, s: int) -> Grid:
        """Says how far apart micro-batches are: of stage s's work and of what takes its own link, the longer."""
        return np.maximum(self.compute_s(s), self._block.traffic_s)

    @cached_property
    def comm_s(self) -> Grid:
        """Seconds of what comes from earlier stages, and of its cotangents."""
        return self._inside(self._block.comm_s)

    def peak_bytes(self, s: int) -> Grid:
        """Counts the bytes on the device of stage s, and those that it has less than others."""
        if self.of(s) is not self:
            return self.of(s).peak_bytes(s)
        in_flight, static = self.segments.in_flight[s], self.static_bytes(s)
        held = StageBytes(in_flight, static, self.kept_bytes, np.zeros(()), self.beyond_bytes)
        if self.problem.group(s).replicas == 1:
            return self._inside(held.peak)
        reducing_bytes = self.segments.block(s, self.cuts, self.cuts).reducing_bytes
        return self._inside(np.maximum(held.peak, reducing_bytes))

    def static_bytes(self, s: int) -> Grid:
        """Counts what stage s holds whatever is in flight."""
        fixed = self.segments.of(s).fixed_bytes(s, self.cuts, self.cuts)
        return fixed - on_device_bytes(self.segments.in_flight[s], self._block.shared_bytes)

    def where_it_fits(self, s: int, grid: Grid) -> Grid:
        """Gives the grid, infinite where stage s would be over the limit."""
        limit = self.problem.memory_limit_bytes
        return grid if limit is None else np.where(self.peak_bytes(s) <= limit, grid, np.inf)

    def decision(self, places: Sequence[int]) -> Decision:
        """Decides for the cuts at these places."""
        return Decision.keeping_all([int(self.cuts[place]) for place in places])

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


def nothing_fits(planner: str, limit: int | None, peaks: Sequence[float]) -> Infeasible:
    """Makes the error for a limit that no cuts keep, given the bytes of the stages of those that need least.

    Args:
        planner: its name.
        limit: bytes per device.
        peaks: bytes of the stages of those cuts.

    >>> nothing_fits("dapple", 100, [80.0, 124.0]).smallest_limit_bytes
    124
    """
    assert limit is not None, "without a limit everything fits"
    stage = int(np.argmax(peaks))
    smallest = int(peaks[stage])
    return Infeasible(
        f"{planner} keeps every activation, and then nothing fits into {limit} bytes per device: stage {stage} of the "
        f"smallest plan takes {smallest - limit} bytes more. The smallest limit that would do is {smallest} bytes; "
        f"or use smaller micro-batches, or a planner that swaps and recomputes",
        stage=stage,
        excess_bytes=smallest - limit,
        smallest_limit_bytes=smallest,
    )
