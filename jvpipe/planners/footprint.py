"""What stages take apart from what fates change, for every segment [i, j) of layers, read from tables.

Legend: as in `memory.py`, which defines what is tabled here: k micro-batches in flight, v versions. Arrays are indexed
by j, 0 to the number of layers; entries with j <= i mean nothing.
"""

from functools import cached_property

import numpy as np
from jaxtyping import Float

from jvpipe.cost.hardware import Link
from jvpipe.planners.problem import Problem

OverJ = Float[np.ndarray, "J"]


class Footprints:
    """The bytes and seconds of a problem's segments that are the same whatever is kept, swapped or recomputed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.k = problem.schedule.in_flight(problem.stages, problem.microbatches)
        self.v = tuple(problem.schedule.versions(s, problem.stages) for s in range(problem.stages))
        layers = problem.costs.layers
        self.forward_s = _sums([layer.forward_s for layer in layers])
        self.backward_s = _sums([layer.backward_s for layer in layers])
        self.compute_s = self.forward_s + self.backward_s
        self.parameter_bytes = _sums([layer.parameter_bytes for layer in layers])
        self.state_bytes = _sums([layer.gradient_bytes + layer.optimizer_bytes for layer in layers])
        self._rows: dict[int, _Row] = {}

    def fixed_bytes(self, s: int, i: int) -> OverJ:
        """Parameters, gradients, optimizer state, shared values and what is in transit, of [i, j) on stage s."""
        row = self._row(i)
        own = self.v[s] * (self.parameter_bytes - self.parameter_bytes[i]) + self.state_bytes - self.state_bytes[i]
        return own + self.v[s] * row.copies_bytes + self.k[s] * row.shared_bytes + row.transit_bytes

    def traffic_s(self, i: int) -> OverJ:
        """How long what crosses the bounds of [i, j) takes of the stage's own link to the host."""
        return self._row(i).traffic_s

    def comm_s(self, i: int) -> OverJ:
        """Seconds of values from and cotangents to the stages before [i, j)."""
        return self._row(i).comm_s

    @cached_property
    def crossing_bytes(self) -> OverJ:
        """Bytes of values and cotangents that cross a bound at j."""
        return self._edges.across(self._edges.bytes + self._edges.back_bytes, 0)

    @cached_property
    def bounds(self) -> list[int]:
        """Where a stage may begin or end: not inside a group of layers that must stay together.

        Raises ValueError if there are too few for the stages.
        """
        costs = self.problem.costs
        inside = {b for group in costs.together for b in range(min(group) + 1, max(group) + 1)}
        found = [b for b in range(len(costs.layers) + 1) if b not in inside]
        if len(found) <= self.problem.stages:
            raise ValueError(
                f"{self.problem.stages} stages: layers that must share a stage leave only {len(found) - 1} "
                f"groups of layers; use at most {len(found) - 1} stages"
            )
        return found

    @cached_property
    def _edges(self) -> "_Reads":
        return _Reads.of_edges(self.problem)

    @cached_property
    def _shared(self) -> "_Reads":
        return _Reads.of_shared(self.problem)

    def _row(self, i: int) -> "_Row":
        if i not in self._rows:
            self._rows[i] = _Row(self.problem, self._edges, self._shared, i)
        return self._rows[i]


class _Reads:
    """Values and who reads them, flat: one entry per value and reader, with the reader before it (or -1)."""

    def __init__(self, found: list[tuple[int, tuple[int, ...], int, int]], layers: int) -> None:
        flat = [
            (producer, reader, before, size, back, max(readers))
            for producer, readers, size, back in found
            for before, reader in zip((-1, *sorted(readers)), sorted(readers), strict=False)
        ]
        table = np.array(flat, dtype=np.int64).reshape(-1, 6)
        self.producer, self.reader, self.before, self.bytes, self.back_bytes, self.last = table.T
        self.layers = layers

    @staticmethod
    def of_edges(problem: Problem) -> "_Reads":
        found = [(e.producer, e.readers, e.bytes, e.bytes * e.differentiable) for e in problem.costs.edges]
        return _Reads(found, len(problem.costs.layers))

    @staticmethod
    def of_shared(problem: Problem) -> "_Reads":
        found = [(-1, x.layers, x.bytes * (not x.per_version), x.bytes * x.per_version) for x in problem.costs.shared]
        return _Reads(found, len(problem.costs.layers))

    def within(self, size: np.ndarray, i: int) -> OverJ:
        """Over j: bytes of values from before layer i of which a reader is in [i, j), each counted once."""
        first = (self.producer < i) & (self.before < i) & (self.reader >= i)
        return np.cumsum(np.bincount(self.reader[first] + 1, size[first], self.layers + 1), dtype=np.float64)

    def across(self, size: np.ndarray, i: int) -> OverJ:
        """Over j: bytes of values made in [i, j) of which a reader is in j or after it, each counted once."""
        made = (self.producer >= i) & (self.before == -1)
        begin = np.bincount(self.producer[made] + 1, size[made], self.layers + 1)
        end = np.bincount(self.last[made] + 1, size[made], self.layers + 2)
        return np.cumsum(begin - end[: self.layers + 1], dtype=np.float64)


class _Row:
    """The segments that begin with layer i, over j."""

    def __init__(self, problem: Problem, edges: _Reads, shared: _Reads, i: int) -> None:
        received, returned = edges.within(edges.bytes, i), edges.within(edges.back_bytes, i)
        sent = edges.across(edges.bytes + edges.back_bytes, i)
        self.transit_bytes = received + returned + sent
        self.shared_bytes = shared.within(shared.bytes, i)
        self.copies_bytes = shared.within(shared.back_bytes, i)
        self.comm_s = _seconds(problem.peer, received) + _seconds(problem.peer, returned)
        self.traffic_s = _seconds(problem.peer, self.transit_bytes) * problem.peer_uses_host


def _seconds(link: Link, size: OverJ) -> OverJ:
    return size / link.bytes_per_s + link.latency_s * (size > 0)


def _sums(values: list) -> OverJ:
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])
