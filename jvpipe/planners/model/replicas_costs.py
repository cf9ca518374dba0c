"""What a model takes as a function of the local batch: the examples of a micro-batch that one replica works on.

Legend: b examples. Between two sizes that are known, seconds and bytes lie on a line; beyond them, on that of the
nearest two; so small slices are as inefficient as they were seen to be. Of one known size everything is in proportion.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.planners.model.stage_bytes import recompute_peak_bytes


@dataclass(frozen=True)
class LocalCosts:
    """The costs of a model at a few local batches, which rise.

    >>> one = Costs((LayerCost("block", 1.0, 2.0, (Option(8),), parameter_bytes=100),))
    >>> layer = LocalCosts((4,), (one,)).at(2).layers[0]
    >>> layer.forward_s, layer.options[0].kept_bytes, layer.parameter_bytes
    (0.5, 4, 100)
    """

    batches: tuple[int, ...]
    costs: tuple[Costs, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip((0, *self.batches), self.batches, strict=False))
        if not self.batches or not rising or len(self.batches) != len(self.costs):
            raise ValueError(
                f"local batches {self.batches} must rise from 1 on, with costs of each"
            )

    def at(self, b: int) -> Costs:
        """The costs of `b` examples; parameters and what belongs to them do not change."""
        low, high, mix = self.line(b)
        every = zip(self._numbers[low], self._numbers[high], strict=True)
        return _with(self.costs[low], _Numbers(*(mix(near, far) for near, far in every)))

    def seconds(self, b: int) -> Float[np.ndarray, "3 layers"]:
        """The seconds of each layer's forward, of its backward, and of what runs again for it, on `b` examples."""
        low, high, mix = self.line(b)
        return mix(self._numbers[low].seconds, self._numbers[high].seconds)

    def compute_s(self, b: int) -> Float[np.ndarray, " layers"]:
        """The seconds of each layer's forward and backward on `b` examples."""
        return self.seconds(b).sum(0)

    def line(self, b: int) -> tuple[int, int, Callable[[np.ndarray, np.ndarray], np.ndarray]]:
        """The places of the known sizes on whose line a size lies, and what is there, by what is at these."""
        high = min(max(bisect_right(self.batches, b), 1), len(self.batches) - 1)
        low = max(high - 1, 0)
        at, to = self.batches[low], self.batches[high]
        if low == high:
            return low, high, lambda near, _: near * b / at
        share = (b - at) / (to - at)
        return low, high, lambda near, far: np.maximum(0.0, near + share * (far - near))

    @cached_property
    def _numbers(self) -> list["_Numbers"]:
        """At each known size, what changes with it."""
        return [_Numbers.of(costs) for costs in self.costs]

    def recomputed(self) -> "LocalCosts":
        """The same with every layer run again before its backward, from its input."""
        return LocalCosts(self.batches, tuple(_recomputed(costs) for costs in self.costs))


def local_costs(costs_of: Callable[[int], Costs], batches: Sequence[int]) -> LocalCosts:
    """Collects the costs at some local batches.

    Args:
        costs_of: tells those of a number of examples.
        batches: these numbers, rising.
    """
    return LocalCosts(tuple(batches), tuple(costs_of(b) for b in batches))


def _recomputed(costs: Costs) -> Costs:
    layers = (
        replace(x, options=(Option(0, extra_s=x.forward_s, extra_bytes=recompute_peak_bytes(x)),))
        for x in costs.layers
    )
    return replace(costs, layers=tuple(layers))


class _Numbers(NamedTuple):
    """What changes with the local batch: of each layer, and the bytes of each edge and of what is shared."""

    seconds: Float[np.ndarray, "3 layers"]  # forward, backward, and what runs again for it
    sizes: Float[np.ndarray, "4 layers"]  # what is kept, what runs again, inputs, temporaries
    edges: Float[np.ndarray, " edges"]
    shared: Float[np.ndarray, " shared"]

    @staticmethod
    def of(costs: Costs) -> "_Numbers":
        every = [(x, x.options[0]) for x in costs.layers]
        seconds = [(x.forward_s, x.backward_s, option.extra_s) for x, option in every]
        sizes = [
            (option.kept_bytes, option.extra_bytes, x.input_bytes, x.temporary_bytes)
            for x, option in every
        ]
        edges, shared = ([float(x.bytes) for x in values] for values in (costs.edges, costs.shared))
        return _Numbers(
            np.array(seconds).T, np.array(sizes, dtype=float).T, np.array(edges), np.array(shared)
        )


def _with(costs: Costs, numbers: _Numbers) -> Costs:
    """The same costs, but for what changes with the local batch; bytes are rounded."""
    seconds = zip(*numbers.seconds.tolist(), strict=True)
    sizes, edges, shared = (np.rint(x).astype(int).tolist() for x in numbers[1:])
    layers = (
        LayerCost(
            x.name,
            forward_s,
            backward_s,
            (Option(kept, extra_s=extra_s, extra_bytes=extra),),
            x.parameter_bytes,
            x.gradient_bytes,
            x.optimizer_bytes,
            inputs,
            temporary,
            state_bytes=x.state_bytes,
        )
        for x, (forward_s, backward_s, extra_s), (kept, extra, inputs, temporary) in zip(
            costs.layers, seconds, zip(*sizes, strict=True), strict=True
        )
    )
    return replace(
        costs,
        layers=tuple(layers),
        edges=tuple(
            Edge(x.producer, x.readers, size, x.name, x.differentiable)
            for x, size in zip(costs.edges, edges, strict=True)
        ),
        shared=tuple(
            x if x.per_version else replace(x, bytes=size)
            for x, size in zip(costs.shared, shared, strict=True)
        ),
    )
