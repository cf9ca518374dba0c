"""What a model takes as a function of the local batch: the examples of a micro-batch that one replica works on.

Legend: b examples. Between two sizes that are known, seconds and bytes lie on a line; beyond them, on that of the
nearest two; so small slices are as inefficient as they were seen to be. Of one known size everything is in proportion.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Float

from jvpipe.cost.costs import Costs, LayerCost, Option
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
            raise ValueError(f"local batches {self.batches} must rise from 1 on, with costs of each")

    def at(self, b: int) -> Costs:
        """The costs of `b` examples; parameters and what belongs to them do not change."""
        low, high = self._between(b)
        near, far, at, to = self.costs[low], self.costs[high], self.batches[low], self.batches[high]
        if low == high:
            return _mixed(near, near, lambda x, _: x * b / at)
        share = (b - at) / (to - at)
        return _mixed(near, far, lambda x, y: max(0.0, x + share * (y - x)))

    def compute_s(self, b: int) -> Float[np.ndarray, " layers"]:
        """The seconds of each layer's forward and backward on `b` examples, as `at` has them."""
        low, high = self._between(b)
        near, far, at, to = self._seconds[low], self._seconds[high], self.batches[low], self.batches[high]
        each = near * (b / at) if low == high else np.maximum(0.0, near + (b - at) / (to - at) * (far - near))
        return each.sum(0)

    def _between(self, b: int) -> tuple[int, int]:
        """The places of the known sizes on whose line a size lies."""
        high = min(max(bisect_right(self.batches, b), 1), len(self.batches) - 1)
        return max(high - 1, 0), high

    @cached_property
    def _seconds(self) -> list[Float[np.ndarray, "3 layers"]]:
        """At each known size, the seconds of forwards, of backwards, and of what runs again for them."""
        every = [[(x.forward_s, x.backward_s, x.options[0].extra_s) for x in costs.layers] for costs in self.costs]
        return [np.array(one).T for one in every]

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


def _mixed(a: Costs, b: Costs, mix: Callable[[float, float], float]) -> Costs:
    whole = lambda x, y: round(mix(x, y))  # noqa: E731
    layers = tuple(_layer(x, y, mix) for x, y in zip(a.layers, b.layers, strict=True))
    edges = tuple(replace(x, bytes=whole(x.bytes, y.bytes)) for x, y in zip(a.edges, b.edges, strict=True))
    shared = tuple(
        x if x.per_version else replace(x, bytes=whole(x.bytes, y.bytes))
        for x, y in zip(a.shared, b.shared, strict=True)
    )
    return replace(a, layers=layers, edges=edges, shared=shared)


def _layer(a: LayerCost, b: LayerCost, mix: Callable[[float, float], float]) -> LayerCost:
    x, y = a.options[0], b.options[0]
    kept = Option(
        round(mix(x.kept_bytes, y.kept_bytes)),
        extra_s=mix(x.extra_s, y.extra_s),
        extra_bytes=round(mix(x.extra_bytes, y.extra_bytes)),
    )
    return LayerCost(
        a.name,
        mix(a.forward_s, b.forward_s),
        mix(a.backward_s, b.backward_s),
        (kept,),
        a.parameter_bytes,
        a.gradient_bytes,
        a.optimizer_bytes,
        round(mix(a.input_bytes, b.input_bytes)),
        round(mix(a.temporary_bytes, b.temporary_bytes)),
        state_bytes=a.state_bytes,
    )


def _recomputed(costs: Costs) -> Costs:
    layers = (
        replace(x, options=(Option(0, extra_s=x.forward_s, extra_bytes=recompute_peak_bytes(x)),)) for x in costs.layers
    )
    return replace(costs, layers=tuple(layers))
