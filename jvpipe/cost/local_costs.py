"""The costs of a model as a function of the local batch:
the examples of a micro-batch that one replica works on.

Legend: b examples. At the measured sizes costs are as measured. Between two of them each number
lies on a line, beyond them on the line of the nearest two; so small shares stay as inefficient as
they were measured. With one size, all is in proportion. The options of a layer are those of the
larger size, in proportion to what the layer takes.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from jvpipe.cost.costs import Costs, LayerCost, Option, SplitCost

Mix = Callable[[float | int, float | int], float | int]
"""Returns the number on the line of two sizes, given the numbers at these."""


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
            costs_of: returns the costs of a number of examples.
            batches: these numbers, rising.
        """
        return LocalCosts(tuple(batches), tuple(costs_of(b) for b in batches))

    def at(self, b: int) -> Costs:
        """Returns the costs of `b` examples; parameters and what belongs to them do not change."""
        if b in self.batches:
            return self.costs[self.batches.index(b)]
        if b not in self._between:
            self._between[b] = self._mixed(b)
        return self._between[b]

    def _mixed(self, b: int) -> Costs:
        last = len(self.batches) - 1
        # Beyond the measured sizes the line of the nearest two goes on.
        high = min(max(bisect_left(self.batches, b), 1), last)
        low = max(high - 1, 0)
        at = self.batches[low]
        to = self.batches[high]
        share = (b - at) / (to - at) if low < high else 0.0

        def in_proportion(near: float | int, far: float | int) -> float | int:
            return near * b / at

        def on_line(near: float | int, far: float | int) -> float | int:
            # Far below the smallest size the line may fall under 0.
            return max(0.0, near + share * (far - near))

        mix = on_line if low < high else in_proportion
        return _mixed_costs(self.costs[low], self.costs[high], mix)


def _mixed_costs(near: Costs, far: Costs, mix: Mix) -> Costs:
    """Mixes the costs at two sizes; bytes are rounded.

    Args:
        near: at the smaller size.
        far: at the larger one.
        mix: what is on the line.
    """
    layers = (_layer(*both, mix) for both in zip(near.layers, far.layers, strict=True))
    edges = []
    for a, x in zip(near.edges, far.edges, strict=True):
        edges.append(replace(x, bytes=round(mix(a.bytes, x.bytes))))
    shared = []
    for a, x in zip(near.shared, far.shared, strict=True):
        # What counts per version is a parameter, whatever the batch.
        size = x.bytes if x.per_version else round(mix(a.bytes, x.bytes))
        shared.append(replace(x, bytes=size))
    return replace(
        far,
        layers=tuple(layers),
        edges=tuple(edges),
        shared=tuple(shared),
    )


def _layer(near: LayerCost, far: LayerCost, mix: Mix) -> LayerCost:
    """Mixes what a layer takes at two sizes.

    Args:
        near: at the smaller size.
        far: at the larger one.
        mix: what is on the line.
    """
    forward_s = mix(near.forward_s, far.forward_s)
    backward_s = mix(near.backward_s, far.backward_s)
    kept_bytes = mix(near.options[0].kept_bytes, far.options[0].kept_bytes)
    # The first option keeps everything, so what the others hold is in proportion to it.
    bytes_share = _ratio(kept_bytes, far.options[0].kept_bytes)
    backward_share = _ratio(backward_s, far.backward_s)
    # What runs again is of the kind of the forward; where that takes nothing, of the backward's.
    again_share = _ratio(forward_s, far.forward_s) or backward_share
    options = tuple(_option(option, bytes_share, again_share) for option in far.options)
    return replace(
        far,
        forward_s=forward_s,
        backward_s=backward_s,
        options=options,
        input_bytes=round(mix(near.input_bytes, far.input_bytes)),
        temporary_bytes=round(mix(near.temporary_bytes, far.temporary_bytes)),
        split=far.split and _split(far.split, backward_share, bytes_share),
    )


def _option(option: Option, bytes_share: float, seconds_share: float) -> Option:
    """Scales the bytes and seconds of an option."""
    return replace(
        option,
        kept_bytes=round(option.kept_bytes * bytes_share),
        swapped_bytes=round(option.swapped_bytes * bytes_share),
        extra_s=option.extra_s * seconds_share,
        extra_bytes=round(option.extra_bytes * bytes_share),
    )


def _split(split: SplitCost, seconds_share: float, bytes_share: float) -> SplitCost:
    """Scales the seconds and bytes of a backward in halves."""
    return replace(
        split.slower(seconds_share),
        handed_bytes=round(split.handed_bytes * bytes_share),
        kept_bytes=round(split.kept_bytes * bytes_share),
    )


def _ratio(value: float | int, of: float | int) -> float:
    return value / of if of else 0.0
