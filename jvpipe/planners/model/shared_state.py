"""The optimizer's state that the replicas of a stage share out: what each of them is spared."""

from collections.abc import Sequence

import numpy as np

from jvpipe.cost.costs import LayerCost
from jvpipe.planners.model.segments import Cuts, Grid, between, sums
from jvpipe.programs.shares import packed


def spared_bytes(layers: Sequence[LayerCost], replicas: int) -> int:
    """Counts the bytes that each replica of a stage of these layers is spared at least, as they are packed.

    >>> from jvpipe.cost.costs import Option
    >>> spared_bytes([LayerCost("block", 1.0, 2.0, (Option(0),), state_bytes=size) for size in (10, 30, 10)], 2)
    20
    """
    sizes = [layer.state_bytes for layer in layers if layer.state_bytes]
    shares = packed([(size, 0) for size in sizes], replicas)
    loads = [
        sum(size for size, share in zip(sizes, shares, strict=True) if share == q)
        for q in range(replicas)
    ]
    return sum(sizes) - max(loads)


def surely_spared_bytes(layers: Sequence[LayerCost], cuts: Cuts, replicas: int) -> Grid:
    """Counts for all segments of layers what is spared at least; never more than there is, and rarely much less.

    The largest is packed first, each to where least is: one of size s that ends up where most is found there no more
    than all larger ones and its equals, but for itself, divided by the replicas.

    Args:
        layers: all.
        cuts: where segments begin and end.
        replicas: of a stage.
    """
    sizes = [layer.state_bytes for layer in layers]
    total = between(sums(layer.state_bytes for layer in layers), cuts, cuts)
    most = np.zeros_like(total)
    for size in sorted(set(sizes) - {0}):
        there = between(sums(x == size for x in sizes), cuts, cuts)
        larger = between(sums(x if x >= size else 0 for x in sizes), cuts, cuts)
        most = np.where(there > 0, np.maximum(most, (larger - size) // replicas + size), most)
    return np.maximum(total - most, 0)
