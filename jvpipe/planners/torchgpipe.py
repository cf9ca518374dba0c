"""torchgpipe's block partition (Kim et al., 2020; Barany and Grinberg, "Block partitions of sequences", 2015).

Legend: a block is a run of layers; its size is the sum of their costs; p is the largest block, q the smallest.
"""

from collections.abc import Sequence

import numpy as np


def torchgpipe(costs: Sequence[float], stages: int) -> list[int]:
    """Layers per stage: the largest block is as small as can be, no two differ by more than the costliest layer.

    The smallest block takes a layer from its neighbour on the side of the largest, again and again. That never
    makes the largest grow; therefore it starts where the largest is smallest, and not at an even partition.

    >>> torchgpipe([1.0, 1.0, 1.0, 3.0], 2)
    [3, 1]
    """
    total = np.concatenate([[0.0], np.cumsum(costs)])
    bounds = _smallest_largest(total, stages)
    allowed = max(costs) * (1 + 1e-9)  # sums of floats are not exact
    while True:
        sizes = np.diff(total[bounds])
        p, q = int(sizes.argmax()), int(sizes.argmin())
        if sizes[p] - sizes[q] <= allowed:
            break
        if p < q:
            bounds[q] -= 1
        else:
            bounds[q + 1] += 1
    # A block may have run empty. It gets its neighbour's outermost layer, which is not larger than the largest block.
    places = np.arange(stages + 1)
    bounds = np.maximum.accumulate(bounds - places) + places
    bounds = np.minimum(bounds, len(costs) - stages + places)
    return [int(n) for n in np.diff(bounds)]


def _smallest_largest(total: np.ndarray, stages: int) -> np.ndarray:
    """The bounds that make the largest block smallest, by dynamic programming over (blocks, layers)."""
    largest = np.concatenate([[np.inf], total[1:]])
    last_bound = []
    for _ in range(stages - 1):
        # [j, i]: the first j layers at their best, and layers j to i as one more block
        worst = np.maximum(largest[:, None], total[None] - total[:, None])
        worst[np.tril_indices(len(total))] = np.inf
        last_bound.append(worst.argmin(0))
        largest = worst.min(0)
    bounds = [len(total) - 1]
    for choice in reversed(last_bound):
        bounds.append(int(choice[bounds[-1]]))
    return np.array([0, *reversed(bounds)])
