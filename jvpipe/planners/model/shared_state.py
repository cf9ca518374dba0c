"""The optimizer's state that the replicas of a stage share out: what each of them is spared."""

from collections.abc import Sequence

import numpy as np

from jvpipe.cost.costs import LayerCost
from jvpipe.planners.model.segments import Cuts, Grid, between, sums
from jvpipe.programs.shards import packed


def spared_bytes(layers: Sequence[LayerCost], replicas: int) -> int:
    """Counts the bytes that each replica of a stage of these layers is spared at least, as its leaves are packed.

    >>> from jvpipe.cost.costs import Option
    >>> spared_bytes([LayerCost("block", 1.0, 2.0, (Option(0),), leaf_bytes=(10, 30, 10))], 2)
    20
    """
    if replicas == 1:
        return 0
    leaves = [size for layer in layers for size in layer.leaf_bytes]
    shards = packed([(size, 0) for size in leaves], replicas)
    loads = [sum(size for size, shard in zip(leaves, shards, strict=True) if shard == q) for q in range(replicas)]
    return sum(leaves) - max(loads)


def surely_spared_bytes(layers: Sequence[LayerCost], cuts: Cuts, replicas: int) -> Grid:
    """Counts for all segments of layers what is spared at least; never more than there is, and rarely much less.

    The largest is packed first, each to where least is: one of size s that ends up where most is found there no more
    than all larger ones and its equals, but for itself, divided by the replicas.

    Args:
        layers: all.
        cuts: where segments begin and end.
        replicas: of a stage.
    """
    total = between(sums(sum(layer.leaf_bytes) for layer in layers), cuts, cuts)
    most = np.zeros_like(total)
    for size in sorted({size for layer in layers for size in layer.leaf_bytes} - {0}):
        there = between(sums(layer.leaf_bytes.count(size) for layer in layers), cuts, cuts)
        larger = between(sums(sum(x for x in layer.leaf_bytes if x >= size) for layer in layers), cuts, cuts)
        most = np.where(there > 0, np.maximum(most, (larger - size) // replicas + size), most)
    return np.maximum(total - most, 0)
