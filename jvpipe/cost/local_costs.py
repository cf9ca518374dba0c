"""What a model takes as a function of the local batch: the examples of a micro-batch that one replica works on.

Legend: b examples. At sizes that are known costs are as they are. Between two of them each number
lies on a line; beyond them, on that of the nearest two; so small shares are as inefficient as they
were seen to be. If only one size is known, all is in proportion. What a layer's options take is in
proportion to what the layer takes: they are those of the larger size.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option, SplitCost

Mix = Callable[[float | int, float | int], float | int]
"""What is on the line of two sizes, by what is at these."""


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
    _between: dict[int, Costs] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip((0, *self.batches), self.batches, strict=False))
        if not self.batches or not rising or len(self.batches) != len(self.costs):
            raise ValueError(
                f"local batches {self.batches} must rise from 1 on, with costs of each"
            )

    @staticmethod
    def of(costs_of: Callable[[int], Costs], batches: Sequence[int]) -> "LocalCosts":
        """Collects the costs at some local batches.

        Args:
            costs_of: tells those of a number of examples.
            batches: these numbers, rising.
        """
        return LocalCosts(tuple(batches), tuple(costs_of(b) for b in batches))

    def at(self, b: int) -> Costs:
        """The costs of `b` examples; parameters and what belongs to them do not change."""
        if b in self.batches:
            return self.costs[self.batches.index(b)]
        if b not in self._between:
            self._between[b] = self._mixed(b)
        return self._between[b]

    def _mixed(self, b: int) -> Costs:
        last = len(self.batches) - 1
        high = min(max(bisect_left(self.batches, b), 1), last)
        low = max(high - 1, 0)
        at, to = self.batches[low], self.batches[high]
        if low == high:
            return _on_line(self.costs[low], self.costs[high], lambda near, _: near * b / at)
        share = (b - at) / (to - at)
        mix: Mix = lambda near, far: max(0.0, near + share * (far - near))  # noqa: E731
        return _on_line(self.costs[low], self.costs[high], mix)


def _on_line(near: Costs, far: Costs, mix: Mix) -> Costs:
    """The costs on the line of those at two sizes; bytes are rounded.

    Args:
        near: at the smaller size.
        far: at the larger one.
        mix: what is on the line.
    """
    layers = tuple(_layer(*both, mix) for both in zip(near.layers, far.layers, strict=True))
    edges = tuple(
        Edge(x.producer, x.readers, round(mix(a.bytes, x.bytes)), x.name, x.differentiable)
        for a, x in zip(near.edges, far.edges, strict=True)
    )
    shared = tuple(
        x if x.per_version else replace(x, bytes=round(mix(a.bytes, x.bytes)))
        for a, x in zip(near.shared, far.shared, strict=True)
    )
    return replace(far, layers=layers, edges=edges, shared=shared)


def _layer(near: LayerCost, far: LayerCost, mix: Mix) -> LayerCost:
    """A layer on the line of what it takes at two sizes.

    Args:
        near: at the smaller size.
        far: at the larger one.
        mix: what is on the line.
    """
    forward_s, backward_s = mix(near.forward_s, far.forward_s), mix(near.backward_s, far.backward_s)
    kept_bytes = mix(near.options[0].kept_bytes, far.options[0].kept_bytes)
    bytes_share = _ratio(kept_bytes, far.options[0].kept_bytes)
    # What runs again is of the kind of the forward; where that takes nothing, of the backward's.
    again_s = _ratio(forward_s, far.forward_s) or _ratio(backward_s, far.backward_s)
    options = tuple(_option(option, bytes_share, again_s) for option in far.options)
    split = far.split and _split(far.split, _ratio(backward_s, far.backward_s), bytes_share)
    return replace(
        far,
        forward_s=forward_s,
        backward_s=backward_s,
        options=options,
        input_bytes=round(mix(near.input_bytes, far.input_bytes)),
        temporary_bytes=round(mix(near.temporary_bytes, far.temporary_bytes)),
        split=split,
    )


def _option(option: Option, bytes_share: float, seconds_share: float) -> Option:
    """An option that takes such shares of its bytes and seconds."""
    return Option(
        round(option.kept_bytes * bytes_share),
        round(option.swapped_bytes * bytes_share),
        option.extra_s * seconds_share,
        round(option.extra_bytes * bytes_share),
        option.fates,
        option.swaps_input,
    )


def _split(split: SplitCost, seconds_share: float, bytes_share: float) -> SplitCost:
    """Halves of a backward that take such shares of their seconds and bytes."""
    slower = split.slower(seconds_share)
    return replace(
        slower,
        handed_bytes=round(split.handed_bytes * bytes_share),
        kept_bytes=round(split.kept_bytes * bytes_share),
    )


def _ratio(value: float | int, of: float | int) -> float:
    return value / of if of else 0.0
