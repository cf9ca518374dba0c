"""The costs of a model at any local batch: one replica's share of the examples of a micro-batch.

Costs are known at a few sizes of local batches. For another size, each number that depends on the
batch lies on the line through the costs at two known sizes: the next smaller and the next larger
size or, beyond the known sizes, the nearest two. The line need not pass through 0, so a small local
batch may cost more per example than a large one. If only one size is known, these numbers are in
proportion to the number of examples b. A layer has the options of the larger of the two sizes.
Their bytes are scaled like those of the first option, and their extra seconds like those of the
forward.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from jvpipe.cost.costs import Costs, LayerCost, SplitCost

Mix = Callable[[float | int, float | int], float | int]
"""Returns a number at b examples, given the number at the smaller and at the larger size."""


@dataclass(frozen=True)
class LocalCosts:
    """The costs of a model at a few sizes of local batches, in rising order.

    >>> from jvpipe.cost.costs import Option
    >>> one = Costs((LayerCost("block", 1.0, 2.0, (Option(8),), parameter_bytes=100),))
    >>> layer = LocalCosts((4,), (one,)).at(2).layers[0]
    >>> layer.forward_s, layer.options[0].kept_bytes, layer.parameter_bytes
    (0.5, 4, 100)
    """

    batches: tuple[int, ...]
    costs: tuple[Costs, ...]
    _between: dict[int, Costs] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(costs: Mapping[int, Costs]) -> "LocalCosts":
        """Collects the costs of some numbers of examples."""
        batches = tuple(sorted(costs))
        return LocalCosts(batches, tuple(costs[b] for b in batches))

    def at(self, b: int) -> Costs:
        """Returns the costs of `b` examples; parameters and what belongs to them do not change."""
        if b in self.batches:
            return self.costs[self.batches.index(b)]
        if b not in self._between:
            self._between[b] = self._mixed(b)
        return self._between[b]

    def _mixed(self, b: int) -> Costs:
        """Returns the costs of `b` examples on the line through the costs at two known sizes.

        Bytes are rounded.
        """
        last = len(self.batches) - 1
        # Beyond the known sizes, the line through the nearest two continues.
        high = min(max(bisect_left(self.batches, b), 1), last)
        low = max(high - 1, 0)
        at = self.batches[low]
        to = self.batches[high]

        def mix(less: float | int, more: float | int) -> float | int:
            if at == to:
                return less * b / at
            share = (b - at) / (to - at)
            # Far below the smallest size, the line may fall below 0.
            return max(0.0, less + share * (more - less))

        near, far = self.costs[low], self.costs[high]
        layers = (_layer(*both, mix) for both in zip(near.layers, far.layers, strict=True))
        edge_pairs = zip(near.edges, far.edges, strict=True)
        edges = (replace(x, bytes=round(mix(a.bytes, x.bytes))) for a, x in edge_pairs)
        # What counts per version, such as a parameter, does not depend on the batch.
        shared = (
            x if x.per_version else replace(x, bytes=round(mix(a.bytes, x.bytes)))
            for a, x in zip(near.shared, far.shared, strict=True)
        )
        return replace(far, layers=tuple(layers), edges=tuple(edges), shared=tuple(shared))


def _layer(near: LayerCost, far: LayerCost, mix: Mix) -> LayerCost:
    """Returns the cost of a layer at b examples, given its costs at both sizes."""
    forward_s = mix(near.forward_s, far.forward_s)
    backward_s = mix(near.backward_s, far.backward_s)
    kept_bytes = mix(near.options[0].kept_bytes, far.options[0].kept_bytes)
    # The bytes of all options are scaled like those of the first option, which keeps everything.
    share = _ratio(kept_bytes, far.options[0].kept_bytes)
    backward_share = _ratio(backward_s, far.backward_s)
    # Recomputation repeats parts of the forward, so its seconds are scaled like the forward's. If
    # the forward takes no time, they are scaled like the backward's.
    again_share = _ratio(forward_s, far.forward_s) or backward_share
    options = (
        replace(
            option,
            kept_bytes=round(option.kept_bytes * share),
            swapped_bytes=round(option.swapped_bytes * share),
            extra_s=option.extra_s * again_share,
            extra_bytes=round(option.extra_bytes * share),
        )
        for option in far.options
    )
    return replace(
        far,
        forward_s=forward_s,
        backward_s=backward_s,
        options=tuple(options),
        input_bytes=round(mix(near.input_bytes, far.input_bytes)),
        temporary_bytes=round(mix(near.temporary_bytes, far.temporary_bytes)),
        split=far.split and _split(near.split or far.split, far.split, backward_share, mix),
    )


def _split(near: SplitCost, far: SplitCost, seconds_share: float, mix: Mix) -> SplitCost:
    """Returns the cost of a backward in halves at b examples, given its costs at both sizes."""
    return replace(
        far.slower(seconds_share),
        handed_bytes=round(mix(near.handed_bytes, far.handed_bytes)),
        kept_bytes=round(mix(near.kept_bytes, far.kept_bytes)),
    )


def _ratio(value: float | int, of: float | int) -> float:
    return value / of if of else 0.0
