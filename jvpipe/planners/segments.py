"""What segments of layers take whatever is kept, swapped or recomputed: all segments between two sets of cuts at once.

Legend: a segment [i, j) on stage s; k micro-batches in flight, v versions. A `Block` holds one number for each i of
`starts` (rows) and each j of `ends` (columns); where j <= i the numbers mean nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

from jvpipe.cost.hardware import Link
from jvpipe.planners.problem import Problem

Grid = Float[np.ndarray, "_ _"]
Cuts = Int[np.ndarray, "_"]


@dataclass(frozen=True, eq=False)
class Block:
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

    def at(self, rows: Cuts, columns: Cuts) -> "Block":
        """The segments of some starts and ends, given by their places."""
        numbers = (self.inside, self.forward_s, self.compute_s, self.comm_s, self.traffic_s, self.fixed_bytes)
        return Block(self.s, self.starts[rows], self.ends[columns], *(x[np.ix_(rows, columns)] for x in numbers))


class Spans:
    """Weights w at pairs of layers (a, b), a < b, that count for a segment with a < i <= b < j.

    So does a value that layer a made (or read) and that layer b is the next to read: the segment receives it.
    """

    def __init__(self, pairs: Iterable[tuple[int, int, float]]) -> None:
        found = sorted(((b, a, w) for a, b, w in pairs if w), key=lambda pair: pair[0])
        self.b = np.array([b for b, _, _ in found], dtype=np.int64)
        self.a = np.array([a for _, a, _ in found], dtype=np.int64)
        self.w = np.array([w for _, _, w in found], dtype=np.float64)

    def over(self, starts: Cuts, ends: Cuts) -> Grid:
        """The weights that count, summed for every segment."""
        near = slice(*np.searchsorted(self.b, (starts[0], ends[-1])))
        a, b, w = self.a[near], self.b[near], self.w[near]
        rows, columns = np.searchsorted(starts, a, "right"), np.searchsorted(ends, b, "right")
        there = (rows < len(starts)) & (columns < len(ends))
        flat = np.bincount((rows * len(ends) + columns)[there], w[there], len(starts) * len(ends))
        total = flat.reshape(len(starts), len(ends)).cumsum(0).cumsum(1)
        passed = np.concatenate([[0.0], np.cumsum(w)])[np.searchsorted(b, starts)]  # b < i: the segment begins later
        return total - passed[:, None]


class Segments:
    """A problem's segments, from sums over its layers."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.n = len(problem.costs.layers)
        self.k = problem.schedule.in_flight(problem.stages, problem.microbatches)
        self.v = tuple(problem.schedule.versions(s, problem.stages) for s in range(problem.stages))
        layers = problem.costs.layers
        self.forward_s = sums(layer.forward_s for layer in layers)
        self.compute_s = self.forward_s + sums(layer.backward_s for layer in layers)
        self.parameter_bytes = sums(layer.parameter_bytes for layer in layers)
        self.state_bytes = sums(layer.gradient_bytes + layer.optimizer_bytes for layer in layers)
        edges = problem.costs.edges
        self._received = Spans(p for e in edges for p in _hops(e.producer, e.readers, e.bytes))
        self._returned = Spans(p for e in edges if e.differentiable for p in _hops(e.producer, e.readers, e.bytes))
        # What a segment sends is what it would receive if the layers ran the other way.
        last = self.n - 1
        self._sent = Spans((last - max(e.readers), last - e.producer, (1 + e.differentiable) * e.bytes) for e in edges)
        self._tensors = Spans(
            p for x in problem.costs.shared if not x.per_version for p in _hops(-1, x.layers, x.bytes)
        )
        self._copies = Spans(p for x in problem.costs.shared if x.per_version for p in _hops(-1, x.layers, x.bytes))

    @cached_property
    def cuts(self) -> Cuts:
        """Where a stage may begin or end; ValueError if `together` leaves too few places for the stages."""
        together, stages = self.problem.costs.together, self.problem.stages
        forbidden = {b for group in together for b in range(min(group) + 1, max(group) + 1)}
        cuts = np.array([b for b in range(self.n + 1) if b not in forbidden])
        if len(cuts) <= stages:
            most = len(cuts) - 1
            raise ValueError(
                f"{stages} stages: layers that must share a stage leave {most} pieces, use at most {most} stages"
            )
        return cuts

    def static_bytes(self, s: int) -> Float[np.ndarray, "J"]:
        """Sums over layers of what stage s holds for parameters, gradients and optimizer."""
        return self.v[s] * self.parameter_bytes + self.state_bytes

    def block(self, s: int, starts: Cuts, ends: Cuts) -> Block:
        """The segments of stage s between these cuts."""
        received, returned = self._received.over(starts, ends), self._returned.over(starts, ends)
        sent = self._sent.over(self.n - ends[::-1], self.n - starts[::-1])[::-1, ::-1].T
        transit = received + returned + sent
        shared = self.k[s] * self._tensors.over(starts, ends) + self.v[s] * self._copies.over(starts, ends)
        peer = self.problem.peer
        return Block(
            s,
            starts,
            ends,
            inside=ends > starts[:, None],
            forward_s=between(self.forward_s, starts, ends),
            compute_s=between(self.compute_s, starts, ends),
            comm_s=seconds(peer, received) + seconds(peer, returned),
            traffic_s=seconds(peer, transit) if self.problem.peer_uses_host else np.zeros_like(transit),
            fixed_bytes=between(self.static_bytes(s), starts, ends) + shared + transit,
        )


def sums(values: Iterable[float]) -> Float[np.ndarray, "J"]:
    """Sums over the first j layers, j from 0."""
    return np.concatenate([[0.0], np.cumsum(np.array(list(values), dtype=np.float64))])


def between(total: Float[np.ndarray, "N"], starts: Cuts, ends: Int[np.ndarray, "J"]) -> Grid:
    """Sums over each segment, from sums over the first layers."""
    return total[ends] - total[starts][:, None]


def seconds(link: Link, sizes: np.ndarray) -> np.ndarray:
    """How long so many bytes take, each on its own."""
    return np.where(sizes > 0, link.latency_s + sizes / link.bytes_per_s, 0.0)


def _hops(producer: int, readers: Iterable[int], size: int) -> list[tuple[int, int, int]]:
    """A value's way from its producer to its first reader and from reader to reader."""
    stops = [producer, *sorted(readers)]
    return [(a, b, size) for a, b in pairwise(stops)]
