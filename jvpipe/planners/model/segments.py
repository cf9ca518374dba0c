"""What segments take before fates are chosen: all segments between two sets of cuts at once.

Legend: a segment [i, j) on stage s; k micro-batches in flight, v versions. Layers take what a
device of the stage takes for its share of a micro-batch; what crosses cuts is that of whole
micro-batches. A `CutBlock` holds one number for each i of `starts` (rows) and each j of `ends`
(columns); where j <= i the numbers mean nothing. `stage_cost.py` defines what is counted, for one
segment at a time; a property test holds these sums to it (tests/planners/model/test_segments.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

from jvpipe.cost.costs import Costs, Edge, LayerCost, bounds_inside
from jvpipe.cost.hardware import Link
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.spans import Cuts, Grid, Hops, Spans, joined_spans
from jvpipe.planners.model.stage_bytes import on_device_bytes

OverJ = Float[np.ndarray, "J"]
ROWS_AT_ONCE = 256
"""Up to this many layers, a row is counted together with all others of its stage."""


@dataclass(frozen=True, eq=False)
class CutBlock:
    """Segments of stage s: seconds without fates, and bytes that no fate changes."""

    s: int
    starts: Cuts
    ends: Cuts
    inside: np.ndarray  # bool: j > i
    forward_s: Grid
    compute_s: Grid  # forward and backward
    comm_s: Grid
    traffic_s: Grid  # on the stage's own link to the host
    fixed_bytes: Grid
    shared_bytes: Grid  # of these, what each micro-batch in flight holds
    once_s: Grid  # per step: in which replicas add up gradients, and updates
    reducing_bytes: Grid  # the most that is there while they do, if nothing is in flight

    def at(self, rows: Cuts, columns: Cuts) -> "CutBlock":
        """Picks the segments of some starts and ends, given by their places."""
        grids = {
            name: x[np.ix_(rows, columns)]
            for name, x in vars(self).items()
            if name not in ("s", "starts", "ends")
        }
        return CutBlock(
            self.s,
            self.starts[rows],
            self.ends[columns],
            **grids,
        )


class Segments:
    """A problem's segments, from sums over its layers.

    Stages whose devices work on other shares of micro-batches have `Segments` of their own: `of`
    finds them.
    """

    def __init__(self, problem: Problem, costs: Costs | None = None) -> None:
        self.problem = problem
        self.costs = costs or problem.costs
        self._others: dict[int, Segments] = {}
        self.n = len(problem.costs.layers)
        self.in_flight = problem.in_flight
        self.versions = tuple(
            problem.schedule.versions(s, problem.devices) for s in range(problem.stages)
        )
        layers = self.costs.layers
        self.forward_s = sums(layer.forward_s for layer in layers)
        self.compute_s = self.forward_s + sums(layer.backward_s for layer in layers)
        self.parameter_bytes = sums(layer.parameter_bytes for layer in layers)
        self.state_bytes = sums(layer.gradient_bytes + layer.optimizer_bytes for layer in layers)
        edges = self.costs.edges
        shared = self.costs.shared
        self._values = _hops(edges)
        self._cotangents = _hops(e for e in edges if e.differentiable)
        # What crosses cuts is of whole micro-batches, whatever the shares of replicas are.
        whole = problem.costs.edges
        self._received = _hops(whole).spans()
        self._returned = _hops(e for e in whole if e.differentiable).spans()
        # A value passes all cuts up to its last reader, and its cotangent passes them back.
        sent = Hops.of(
            (e.producer, [max(e.readers)], (1 + e.differentiable) * e.bytes) for e in whole
        )
        self._sent = Spans(
            self._mirrored(sent.b),
            self._mirrored(sent.a),
            sent.bytes,
        )
        # A shared value comes from before the model: its first layer in a segment holds it.
        tensors = [x for x in shared if not x.per_version]
        copies = [x for x in shared if x.per_version]
        self._tensors = Hops.of((-1, x.layers, x.bytes) for x in tensors).spans()
        self._copies = Hops.of((-1, x.layers, x.bytes) for x in copies).spans()
        self._rows: dict[tuple[int, int], CutBlock] = {}
        self._timed: dict[tuple[float, ...], tuple[OverJ, OverJ]] = {
            (): (self.forward_s, self.compute_s)
        }
        self._early_known: dict[tuple[int, ...], Spans] = {}
        self._late_known: dict[int, Spans] = {}

    def of(self, s: int) -> "Segments":
        """Returns the segments as a stage's devices take them, on their shares of micro-batches."""
        costs = self.problem.costs_of(s)
        if costs is self.costs:
            return self
        if id(costs) not in self._others:
            self._others[id(costs)] = Segments(self.problem, costs)
        return self._others[id(costs)]

    def forward_of(self, s: int) -> OverJ:
        """Gives the sums of the layers' forwards on a device of a stage."""
        return self.of(s)._seconds(s)[0]

    def compute_of(self, s: int) -> OverJ:
        """Gives the sums of the layers' forwards and backwards on a device of a stage."""
        return self.of(s)._seconds(s)[1]

    def _seconds(self, s: int) -> tuple[OverJ, OverJ]:
        slowness = self.problem.slowness(s)
        if slowness not in self._timed:
            forward_s, compute_s = (np.diff(x) * slowness for x in self._timed[()])
            self._timed[slowness] = sums(forward_s), sums(compute_s)
        return self._timed[slowness]

    @cached_property
    def least_compute_s(self) -> OverJ:
        """Sums of what layers take on the fastest device for each."""
        if not self.problem.groups:
            return self.compute_s
        every = [np.diff(self.compute_of(s)) for s in range(self.problem.stages)]
        return sums(np.minimum.reduce(every))

    @cached_property
    def share_s(self) -> float:
        """What the slowest stage takes at least, however the work is divided.

        A stage takes for any layers at least the share of their seconds that it takes for the layer
        it is best at.
        """
        if not self.problem.groups:
            return float(self.compute_s[-1]) / self.problem.stages
        # A stage that takes r times as long does 1 / r of the work in the same time. If all end
        # together, each takes the whole work over the sum of these rates.
        each_s = np.diff(self.compute_s)
        there = each_s > 0
        rates = 0.0
        for s in range(self.problem.stages):
            stage_s = np.diff(self.compute_of(s))
            ratios = stage_s[there] / each_s[there]
            rates += 1 / max(float(ratios.min(initial=np.inf)), 1e-300)
        return float(self.compute_s[-1]) / rates

    def _mirrored(self, layers: Cuts) -> Cuts:
        """Mirrors the layers: what a segment sends is what it would receive the other way."""
        return self.n - 1 - layers

    def early_bytes(
        self,
        more: tuple[int, ...],
        starts: Cuts,
        ends: Cuts,
    ) -> Grid:
        """Counts values that arrive early, once per micro-batch more in flight where they are made.

        That stage is at least d stages before this one if the value is made at least d layers
        before the segment.

        Args:
            more: micro-batches in flight d stages before this one, beyond those on the stage after
                that, from d = 1 on.
            starts: where segments begin.
            ends: where they end.
        """
        hops = self._values
        if more not in self._early_known:  # the same for most stages of a model without long edges
            parts = []
            for d, times in enumerate(more, 1):
                far = hops.at(hops.b - hops.producer >= d)
                begin = np.maximum(far.a, far.producer + d - 1)
                parts.append((begin, far.b, times * far.bytes))
            self._early_known[more] = joined_spans(parts)
        return self._early_known[more].over(starts, ends)

    def late_bytes(self, count: int, starts: Cuts, ends: Cuts) -> Grid:
        """Counts cotangents that wait (mirrored), once per stage up to the next reader's.

        Args:
            count: how many stages there are behind this one, or as far as a cotangent goes.
            starts: where segments begin.
            ends: where they end.
        """
        hops = self._cotangents
        if count not in self._late_known:
            parts = []
            for d in range(1, count + 1):
                far = hops.at(hops.b - hops.a >= d)
                begin = self._mirrored(far.b - d + 1)
                parts.append((begin, self._mirrored(far.a), far.bytes))
            self._late_known[count] = joined_spans(parts)
        return self._backwards(self._late_known[count], starts, ends)

    @cached_property
    def cuts(self) -> Cuts:
        """Where a stage may begin or end.

        Raises:
            ValueError: `together` leaves too few places for the stages.
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
        """Each bound's cuts, whatever stages take."""
        cuts = self.cuts
        stages = self.problem.stages
        # Each stage has a layer at least: s cuts lie before bound s, and stages - s behind it.
        inner = (cuts[s : len(cuts) - (stages - s)] for s in range(1, stages))
        return [cuts[:1], *inner, cuts[-1:]]

    def static_bytes(self, s: int) -> OverJ:
        """Sums over layers what stage s holds for parameters, gradients and optimizer."""
        return self.versions[s] * self.parameter_bytes + self.state_bytes

    def waiting_bytes(self, s: int, starts: Cuts, ends: Cuts) -> Grid:
        """Counts values that arrive early and cotangents that wait, at most.

        Args:
            s: the stage.
            starts: where segments begin.
            ends: where they end.
        """
        reach = min(s, self._values.reach)
        before = self.in_flight[s - reach : s + 1]
        more = tuple(earlier - later for earlier, later in pairwise(before))
        count = min(self.problem.stages - 1 - s, self._cotangents.longest)
        early = self.early_bytes(more[::-1], starts, ends)
        return early + self.late_bytes(count, starts, ends)

    def fixed_bytes(self, s: int, starts: Cuts, ends: Cuts) -> Grid:
        """Counts parameters, gradients, optimizer, shared values, what waits, and what is not free.

        Args:
            s: the stage.
            starts: where segments begin.
            ends: where they end.
        """
        tensors = self._tensors.over(starts, ends)
        copies = self._copies.over(starts, ends)
        shared = on_device_bytes(self.in_flight[s], tensors) + self.versions[s] * copies
        static = between(self.static_bytes(s), starts, ends)
        fixed = static + shared + self.waiting_bytes(s, starts, ends)
        if not self.problem.groups:
            return fixed
        replicas = self.problem.group(s).replicas
        if replicas > 1:
            fixed = fixed - surely_spared_bytes(self.costs.layers, starts, ends, replicas)
        # What the device has less than others is taken from all limits at once, as if it were held.
        return fixed + self.problem.less_bytes(s)

    def given(self, i: int) -> Float[np.ndarray, "N"]:
        """Counts the shared bytes of a segment from i, from each layer on, per micro-batch."""
        return self._tensors.at(i, self.n)

    def at_work(
        self,
        starts: Cuts,
        ends: Cuts,
        left: np.ndarray,
        working: np.ndarray,
    ) -> Grid:
        """Counts what the layers up to each one leave of one micro-batch, and what it needs.

        Args:
            starts: where segments begin.
            ends: where they end; columns are all layers up to the last end, from the first start
                on.
            left: bytes that each layer leaves.
            working: bytes that each layer works with.
        """
        every = _ends_up_to(starts, ends)
        built = between(sums(left), starts, every) + self._tensors.over(starts, every)
        return np.where(
            every > starts[:, None],
            built + working[every - 1],
            0.0,
        )

    def block(self, s: int, starts: Cuts, ends: Cuts) -> CutBlock:
        """Describes the segments of stage s between these cuts.

        Args:
            s: the stage.
            starts: where segments begin.
            ends: where they end.
        """
        if self.of(s) is not self:
            return self.of(s).block(s, starts, ends)
        received = self._received.over(starts, ends)
        returned = self._returned.over(starts, ends)
        transit = received + returned + self._backwards(self._sent, starts, ends)
        peer = self.problem.link_into(s)
        traffic_s = np.zeros_like(transit)
        if self.problem.peer_uses_host:
            traffic_s = link_seconds(peer, transit)
        fixed_bytes = self.fixed_bytes(s, starts, ends)
        shared_bytes = self._tensors.over(starts, ends)
        once_s = self._updates_s(s, starts, ends)
        reducing_bytes = np.zeros_like(transit)
        group = self.problem.group(s)
        if group.replicas > 1:
            once_s = once_s + self._reduce_s(s, group.reduces, starts, ends)
            static = fixed_bytes - on_device_bytes(self.in_flight[s], shared_bytes)
            reducing_bytes = static + 2 * self._most_reduced_bytes(starts, ends)
        return CutBlock(
            s,
            starts,
            ends,
            inside=ends > starts[:, None],
            forward_s=between(self.forward_of(s), starts, ends),
            compute_s=between(self.compute_of(s), starts, ends),
            comm_s=link_seconds(peer, received) + link_seconds(peer, returned),
            traffic_s=traffic_s,
            fixed_bytes=fixed_bytes,
            shared_bytes=shared_bytes,
            once_s=once_s,
            reducing_bytes=reducing_bytes,
        )

    @cached_property
    def _reduced_bytes(self) -> OverJ:
        """Sums of gradients over layers."""
        return sums(layer.reduced_bytes for layer in self.costs.layers)

    def _most_reduced_bytes(self, starts: Cuts, ends: Cuts) -> Grid:
        """Counts the gradients of the layer of each segment that has most."""
        return most_of(np.diff(self._reduced_bytes), starts, ends)

    @cached_property
    def _update_s(self) -> OverJ:
        """What the optimizer takes for each layer, each time."""
        return np.array([layer.update_s for layer in self.costs.layers])

    def _reduce_s(
        self,
        s: int,
        link: Link,
        starts: Cuts,
        ends: Cuts,
    ) -> Grid:
        """Bounds each segment's all-reduce of gradients that its last backward cannot hide."""
        whole_s = link_seconds(link, between(self._reduced_bytes, starts, ends))
        if not self.problem.overlaps:
            return whole_s
        backward_s = between(self.compute_of(s) - self.forward_of(s), starts, ends)
        shown_s = np.maximum(whole_s - backward_s, link.latency_s)
        return np.where(whole_s > 0, shown_s, 0.0)

    def _updates_s(self, s: int, starts: Cuts, ends: Cuts) -> Grid:
        """Counts the updates of a step, of which each replica takes its share."""
        slowness = self.problem.slowness(s)
        each_s = self.problem.updates * self._update_s
        if slowness:
            each_s = each_s * slowness
        whole_s = between(sums(each_s), starts, ends)
        replicas = self.problem.group(s).replicas
        if replicas == 1:
            return whole_s
        return np.maximum(whole_s / replicas, most_of(each_s, starts, ends))

    def row(self, s: int, i: int) -> CutBlock:
        """Describes the segments of stage s that begin at i, for any end: columns are j."""
        if (s, i) not in self._rows:
            is_small = self.n <= ROWS_AT_ONCE
            starts = np.arange(self.n) if is_small else np.array([i])
            ends = np.arange(self.n + 1)
            block = self.block(s, starts, ends)
            for at, start in enumerate(starts.tolist()):
                self._rows[s, start] = block.at(np.array([at]), ends)
        return self._rows[s, i]

    @cached_property
    def crossing_bytes(self) -> OverJ:
        """Bytes of values and cotangents that cross a cut at j."""
        start = np.array([0])
        ends = np.arange(self.n + 1)
        return self._backwards(self._sent, start, ends)[0]

    def _backwards(
        self,
        spans: Spans,
        starts: Cuts,
        ends: Cuts,
    ) -> Grid:
        """Sums spans of mirrored layers: what is sent behind a segment, as if it were received."""
        mirrored = spans.over(self.n - ends[::-1], self.n - starts[::-1])
        return mirrored[::-1, ::-1].T


def _hops(edges: Iterable[Edge]) -> Hops:
    """Makes the hops of edges, from producers to readers and from reader to reader."""
    return Hops.of((edge.producer, edge.readers, edge.bytes) for edge in edges)


def surely_spared_bytes(
    layers: Sequence[LayerCost],
    starts: Cuts,
    ends: Cuts,
    replicas: int,
) -> Grid:
    """Bounds what is spared in all segments of layers from below, and rarely by much.

    The largest is packed first, each to where least is: one of size s that ends up where most is
    found there no more than all larger ones and its equals, without itself, divided by the
    replicas.

    Args:
        layers: all.
        starts: where segments begin.
        ends: where they end.
        replicas: of a stage.
    """
    sizes = [layer.state_bytes for layer in layers]
    total = between(sums(layer.state_bytes for layer in layers), starts, ends)
    largest = np.zeros_like(total)
    for size in sorted(set(sizes) - {0}):
        equals = sums(x == size for x in sizes)
        as_large = sums(x if x >= size else 0 for x in sizes)
        there = between(equals, starts, ends) > 0
        larger = between(as_large, starts, ends)
        found = (larger - size) // replicas + size
        largest = np.where(there, np.maximum(largest, found), largest)
    return np.maximum(total - largest, 0)


def sums(values: Iterable[float]) -> OverJ:
    """Sums over the first j layers, j from 0."""
    if not isinstance(values, np.ndarray):
        values = np.array(list(values), dtype=np.float64)
    total = np.cumsum(values, dtype=np.float64)
    return np.concatenate([[0.0], total])


def between(
    total: Float[np.ndarray, "N"],
    starts: Cuts,
    ends: Int[np.ndarray, "J"],
) -> Grid:
    """Gives sums over each segment, from sums over the first layers.

    Args:
        total: sums over the first layers.
        starts: where segments begin.
        ends: where they end.
    """
    return total[ends] - total[starts][:, None]


def _ends_up_to(starts: Cuts, ends: Cuts) -> Cuts:
    """Lists the cuts behind each layer from the first start up to the last end, one at least."""
    first = int(starts[0]) + 1
    return np.arange(first, max(int(ends[-1]), first) + 1)


def most_of(layers: np.ndarray, starts: Cuts, ends: Cuts) -> Grid:
    """Finds the most that a layer of each segment has.

    Args:
        layers: numbers of each, none below 0.
        starts: where segments begin.
        ends: where they end.
    """
    every = _ends_up_to(starts, ends)
    of_layers = layers[every - 1]
    return most_up_to(np.where(every > starts[:, None], of_layers, 0.0), starts, ends)


def most_up_to(at_work: Grid, starts: Cuts, ends: Cuts) -> Grid:
    """Gives the most of any layer of each segment, from what is there at each one.

    Args:
        at_work: as `Segments.at_work` counts it.
        starts: where segments begin.
        ends: where they end.
    """
    so_far = np.maximum.accumulate(at_work, axis=1)
    lasts = np.maximum(ends - starts[0] - 1, 0)
    return so_far[:, lasts]


def link_seconds(link: Link, sizes: np.ndarray) -> np.ndarray:
    """Says how long so many bytes take, each on its own."""
    seconds = link.latency_s + sizes / link.bytes_per_s
    return np.where(sizes > 0, seconds, 0.0)
