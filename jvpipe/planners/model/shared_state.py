"""Counts the bytes that a replica saves because the replicas of a stage divide optimizer state.

`spared_bytes` counts them for one stage, and `surely_spared_bytes` bounds them from below for many
segments at once.

Only one replica of a stage keeps the state of a layer. `packed` (programs/shares.py) chooses this
replica. In a run, `packed` also gets the bytes of parameters, by which it breaks ties. They are
left out here, because ties do not change how full the fullest replica is.
"""

from collections.abc import Sequence

import numpy as np

from jvpipe.cost.costs import LayerCost
from jvpipe.planners.model.grids import between, sums
from jvpipe.planners.model.spans import Cuts, Grid
from jvpipe.programs.shares import packed


def spared_bytes(layers: Sequence[LayerCost], replicas: int) -> int:
    """Counts the bytes of optimizer state that the fullest replica of a stage does not keep.

    Without sharing, each replica would keep the state of all layers.

    Args:
        layers: the layers of the stage.
        replicas: how many replicas the stage has.

    >>> from jvpipe.cost.costs import Option
    >>> small = LayerCost("block", 1.0, 2.0, (Option(0),), state_bytes=10)
    >>> large = LayerCost("block", 1.0, 2.0, (Option(0),), state_bytes=30)
    >>> spared_bytes([small, large, small], 2)
    20
    """
    if replicas == 1:
        return 0
    sizes = [layer.state_bytes for layer in layers if layer.state_bytes]
    shares = packed([(size, 0) for size in sizes], replicas)
    loads = [0] * replicas
    for size, share in zip(sizes, shares, strict=True):
        loads[share] += size
    return sum(sizes) - max(loads)


def surely_spared_bytes(
    layers: Sequence[LayerCost],
    starts: Cuts,
    ends: Cuts,
    replicas: int,
) -> Grid:
    """Returns, for each segment, a lower bound on the bytes that `spared_bytes` counts.

    Layers are packed by the size of their state, the largest first, each onto the replica that
    holds least (`spared_bytes`). Let x be the last size packed onto the replica that ends up
    fullest. Just before, this replica held least: at most an even share of the sizes packed so far,
    which are all at least x. So it ends up with at most that share plus x. The bound does not know
    x, so it takes the largest such sum over all sizes.

    Args:
        layers: the layers of the whole model.
        starts: where segments begin.
        ends: where they end.
        replicas: how many replicas the stage has.
    """
    sizes = [layer.state_bytes for layer in layers]
    total = between(sums(layer.state_bytes for layer in layers), starts, ends)
    # `largest` bounds the fullest replica's bytes. Each size is tried as x, and may raise it.
    largest = np.zeros_like(total)
    for size in sorted(set(sizes) - {0}):
        equals = sums(x == size for x in sizes)
        as_large = sums(x if x >= size else 0 for x in sizes)
        there = between(equals, starts, ends) > 0
        larger = between(as_large, starts, ends)
        found = (larger - size) // replicas + size
        largest = np.where(there, np.maximum(largest, found), largest)
    return np.maximum(total - largest, 0)
