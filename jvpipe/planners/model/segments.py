"""Counts seconds and bytes of segments before fates are chosen, for many pairs of cuts at once.

A segment [i, j) is the layers i to j - 1, considered as a possible stage s. `stage_cost.py`
defines what is counted, for one segment at a time. This file computes the same numbers as
arrays; a property test compares both (tests/planners/model/test_segments.py). For stages of several
devices two numbers are bounds: `fixed_bytes` is never too small, and the seconds of all-reduces are
never too large. `grids.py` sums the numbers of layers over segments, and `crossings.py` counts the
values that cross the bounds of segments.

A `Grid` has one number for each i of `starts` (rows), where segments begin, and each j of
`ends` (columns), where they end. Entries with j <= i mean nothing. The numbers of a layer
are those of one device of the stage, which works on its share of a micro-batch. Traffic is
that of whole micro-batches.
"""

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from jaxtyping import Bool, Float

from jvpipe.cost.costs import Costs, bounds_inside
from jvpipe.lowering.operation import reducing_copies
from jvpipe.planners.model.crossings import Crossings
from jvpipe.planners.model.grids import (
    OverJ,
    between,
    ends_up_to,
    link_seconds,
    most_of,
    reduce_s,
    sums,
)
from jvpipe.planners.model.problem import Problem, Slowness
from jvpipe.planners.model.shared_state import surely_spared_bytes
from jvpipe.planners.model.spans import Cuts, Grid, Spans, hops

ROWS_AT_ONCE = 256
"""For models of at most this many layers, `Segments.row` makes all rows of a stage at once.

This trades memory for time, and changes no result.
"""


@dataclass(frozen=True, eq=False)
class CutBlock:
    """The segments of a stage, with the seconds and bytes that do not depend on fates."""

    s: int
    starts: Cuts
    ends: Cuts
    inside: Bool[np.ndarray, "_ _"]  # j > i
    forward_s: Grid
    compute_s: Grid  # forward and backward
    comm_s: Grid
    traffic_s: Grid  # on the stage's own link to the host
    fixed_bytes: Grid
    shared_bytes: Grid  # the part of fixed_bytes that each micro-batch in flight holds
    once_s: Grid  # per step: adding up the replicas' gradients, and updates
    reducing_bytes: Grid  # held while gradients are added up, when nothing is in flight

    def at(self, rows: Cuts, columns: Cuts) -> "CutBlock":
        """Picks the segments of some starts and ends, given by their indices."""
        at = np.ix_(rows, columns)
        s, starts, ends, *grids = vars(self).values()
        return CutBlock(s, starts[rows], ends[columns], *(grid[at] for grid in grids))


class Segments:
    """The segments of a problem, with prefix sums over its layers.

    An object holds the sums for one `Costs`. If the devices of a stage work on smaller shares of a
    micro-batch, layers cost less there, and `of` returns another object for the stage.
    """

    def __init__(self, problem: Problem, costs: Costs | None = None) -> None:
        self.problem = problem
        self.costs = costs or problem.costs
        self._others: dict[int, Segments] = {}
        self.n = len(problem.costs.layers)
        self.in_flight = problem.in_flight
        versions = problem.schedule.versions
        self.versions = tuple(versions(s, problem.devices) for s in range(problem.stages))
        layers = self.costs.layers
        self.forward_s = sums(layer.forward_s for layer in layers)
        self.compute_s = self.forward_s + sums(layer.backward_s for layer in layers)
        self.parameter_bytes = sums(layer.parameter_bytes for layer in layers)
        self.state_bytes = sums(layer.gradient_bytes + layer.optimizer_bytes for layer in layers)
        self._crossings = Crossings(self.n, self.costs.edges, problem.costs.edges)
        # A shared value counts like an edge whose producer is before the model (-1): a
        # segment holds the value once, from its first reader in the segment on.
        tensors = ((-1, x.layers, x.bytes) for x in self.costs.shared if not x.per_version)
        copies = ((-1, x.layers, x.bytes) for x in self.costs.shared if x.per_version)
        self._tensors = Spans(*hops(tuple(tensors))[1:])
        self._copies = Spans(*hops(tuple(copies))[1:])
        self._update_s = np.array([layer.update_s for layer in layers])
        self._reduced_bytes = np.array([float(layer.reduced_bytes) for layer in layers])
        self._seconds = cache(self._slowed)
        self._square = cache(self._all_starts)
        self.row = cache(self._row)

    def of(self, s: int) -> "Segments":
        """Returns the segments with the costs of one device of a stage, for its share."""
        costs = self.problem.costs_of(s)
        if costs is self.costs:
            return self
        if id(costs) not in self._others:
            self._others[id(costs)] = Segments(self.problem, costs)
        return self._others[id(costs)]

    def forward_of(self, s: int) -> OverJ:
        """Returns the prefix sums of the layers' forward seconds on a device of a stage."""
        return self.of(s)._seconds(self.problem.slowness(s))[0]

    def compute_of(self, s: int) -> OverJ:
        """Returns the prefix sums of forward plus backward seconds on a device of a stage."""
        return self.of(s)._seconds(self.problem.slowness(s))[1]

    def _slowed(self, slowness: Slowness) -> tuple[OverJ, OverJ]:
        """Makes the sums of `forward_of` and `compute_of` on devices of this slowness."""
        if not slowness:
            return self.forward_s, self.compute_s
        return (
            sums(np.diff(self.forward_s) * slowness),
            sums(np.diff(self.compute_s) * slowness),
        )

    @cached_property
    def least_compute_s(self) -> OverJ:
        """Prefix sums of each layer's seconds on the device that is fastest for that layer."""
        if not self.problem.groups:
            return self.compute_s
        every = [np.diff(self.compute_of(s)) for s in range(self.problem.stages)]
        return sums(np.minimum.reduce(every))

    @cached_property
    def share_s(self) -> float:
        """A lower bound on the seconds of the slowest stage, however the layers are divided.

        The work of a layer is its seconds in the costs. A stage takes some multiple of
        these seconds for each layer. If r is the smallest of its multiples, the stage does at
        most 1 / r of work per second. In the best case, all stages take equally long. So the
        bound is the work of all layers, divided by the sum of the rates 1 / r.
        """
        work_s = float(self.compute_s[-1])
        if not self.problem.groups:
            return work_s / self.problem.stages
        if not work_s:
            return 0.0
        each_s = np.diff(self.compute_s)
        there = each_s > 0
        rates = 0.0
        for s in range(self.problem.stages):
            stage_s = np.diff(self.compute_of(s))
            ratios = stage_s[there] / each_s[there]
            rates += 1 / max(float(ratios.min(initial=np.inf)), 1e-300)
        return work_s / rates

    @cached_property
    def cuts(self) -> Cuts:
        """The bounds that stages may have: bound b lies before layer b, the last after all layers.

        Raises:
            ValueError: layers that must share a stage (`together`) leave too few cuts.
        """
        stages = self.problem.stages
        forbidden = bounds_inside(self.problem.together)
        cuts = np.array([b for b in range(self.n + 1) if b not in forbidden])
        if len(cuts) <= stages:
            last = len(cuts) - 1
            raise ValueError(
                f"{stages} stages: layers that must share a stage leave {last} pieces, "
                f"use at most {last} stages"
            )
        return cuts

    @property
    def windows(self) -> list[Cuts]:
        """For each bound of the stages, the cuts that leave at least one layer for every stage."""
        cuts = self.cuts
        spare = len(cuts) - self.problem.stages
        # Bound s needs at least s cuts before it and stages - s cuts after it.
        inner = (cuts[s : spare + s] for s in range(1, self.problem.stages))
        return [cuts[:1], *inner, cuts[-1:]]

    def static_bytes(self, s: int) -> OverJ:
        """Returns prefix sums of the bytes of parameters, gradients and optimizer on stage s."""
        return self.versions[s] * self.parameter_bytes + self.state_bytes

    def fixed_bytes(
        self,
        s: int,
        starts: Cuts,
        ends: Cuts,
    ) -> Grid:
        """Counts the bytes of the segments of stage s that do not depend on fates.

        They are parameters, gradients, the optimizer's state, shared values, values that arrive
        early and cotangents that wait. The `less_bytes` of the stage's devices are added. For a
        stage of several devices, the result is an upper bound (`surely_spared_bytes`).

        Args:
            s: the stage.
            starts: the first layers of the segments, one for each row.
            ends: the layers after their last, one for each column.
        """
        k = self.in_flight[: s + 1]
        following = self.problem.stages - 1 - s
        tensors = self._tensors.over(starts, ends)
        copies = self.versions[s] * self._copies.over(starts, ends)
        shared = k[s] * tensors + copies
        static = between(self.static_bytes(s), starts, ends)
        fixed = static + shared + self._crossings.waiting_bytes(k, following, starts, ends)
        replicas = self.problem.group(s).replicas
        if replicas > 1:
            fixed = fixed - surely_spared_bytes(self.costs.layers, starts, ends, replicas)
        # All stages are compared with the limit of the roomiest device. So the bytes by which the
        # limit of this stage's devices is smaller count as if they were held.
        return fixed + self.problem.less_bytes(s)

    def given(self, i: int) -> Float[np.ndarray, "N"]:
        """Returns, for each layer, the bytes of the shared values that it is the first to read.

        Only layers from i on count as readers.
        """
        return self._tensors.at(i, self.n)

    def at_work(
        self,
        starts: Cuts,
        ends: Cuts,
        left: np.ndarray,
        working: np.ndarray,
    ) -> Grid:
        """Counts the bytes of one micro-batch while each layer of a segment runs.

        Rows are the starts. Columns are all layers from the first start up to the last end.
        An entry counts what the segment's layers up to this layer leave, and what this
        layer needs while it runs.

        Args:
            starts: where segments begin.
            ends: where they end.
            left: for each layer, the bytes that it leaves for its backward.
            working: for each layer, the bytes that it needs only while it runs.
        """
        every = ends_up_to(starts, ends)
        built = between(sums(left), starts, every) + self._tensors.over(starts, every)
        return np.where(every > starts[:, None], built + working[every - 1], 0.0)

    def block(
        self,
        s: int,
        starts: Cuts,
        ends: Cuts,
    ) -> CutBlock:
        """Makes the block of the segments of stage s between these cuts.

        Args:
            s: the stage.
            starts: the first layers of the segments, one for each row.
            ends: the layers after their last, one for each column.
        """
        if self.of(s) is not self:
            return self.of(s).block(s, starts, ends)
        problem = self.problem
        received = self._crossings.received(starts, ends)
        returned = self._crossings.returned(starts, ends)
        sent = self._crossings.sent(starts, ends)
        peer = problem.link_into(s)
        onward = problem.link_out_of(s)
        traffic_s = np.zeros_like(sent)
        if problem.peer_uses_host and onward == peer:
            traffic_s = link_seconds(peer, received + returned + sent)
        elif problem.peer_uses_host:
            traffic_s = link_seconds(peer, received + returned) + link_seconds(onward, sent)
        fixed_bytes = self.fixed_bytes(s, starts, ends)
        shared_bytes = self._tensors.over(starts, ends)
        forward_s = self.forward_of(s)
        compute_s = self.compute_of(s)
        once_s = self._updates_s(s, starts, ends)
        reducing_bytes = np.zeros_like(sent)
        group = problem.group(s)
        if group.replicas > 1:
            backward_s = compute_s - forward_s if problem.overlaps else None
            reduced_bytes = sums(self._reduced_bytes)
            once_s = once_s + reduce_s(group.reduces, reduced_bytes, backward_s, starts, ends)
            static = fixed_bytes - self.in_flight[s] * shared_bytes
            copies = reducing_copies(group.replicas)
            reducing_bytes = static + copies * most_of(self._reduced_bytes, starts, ends)
        return CutBlock(
            s,
            starts,
            ends,
            inside=ends > starts[:, None],
            forward_s=between(forward_s, starts, ends),
            compute_s=between(compute_s, starts, ends),
            comm_s=link_seconds(peer, received) + link_seconds(peer, returned),
            traffic_s=traffic_s,
            fixed_bytes=fixed_bytes,
            shared_bytes=shared_bytes,
            once_s=once_s,
            reducing_bytes=reducing_bytes,
        )

    def _updates_s(
        self,
        s: int,
        starts: Cuts,
        ends: Cuts,
    ) -> Grid:
        """Counts the seconds of a step's updates; replicas divide the layers among them."""
        slowness = self.problem.slowness(s) or 1.0
        each_s = self.problem.updates * self._update_s * slowness
        whole_s = between(sums(each_s), starts, ends)
        replicas = self.problem.group(s).replicas
        if replicas == 1:
            return whole_s
        # A layer's update is not divided among replicas, so all updates take at least as long as
        # the longest one.
        return np.maximum(whole_s / replicas, most_of(each_s, starts, ends))

    def _row(self, s: int, i: int) -> CutBlock:
        """Makes the block of the segments of stage s that begin at i, with all ends j."""
        start = np.array([i])
        ends = np.arange(self.n + 1)
        if self.n > ROWS_AT_ONCE:
            return self.block(s, start, ends)
        return self._square(s).at(start, ends)

    def _all_starts(self, s: int) -> CutBlock:
        """Makes the block of all segments of stage s."""
        ends = np.arange(self.n + 1)
        return self.block(s, ends[:-1], ends)

    @cached_property
    def crossing_bytes(self) -> OverJ:
        """For each j, the bytes of values and cotangents that cross a cut before layer j."""
        ends = np.arange(self.n + 1)
        return self._crossings.sent(ends[:1], ends)[0]
