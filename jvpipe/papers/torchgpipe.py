"""torchgpipe's block partition (Kim et al., 2020; Barany and Grinberg, "Block partitions of sequences", 2015).

Legend: a block is a run of layers; its size is the sum of their costs; p is the largest block, q the smallest.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from jvpipe.planners.model.chain_dp import least_path
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Segments


def torchgpipe(problem: Problem) -> Decision:
    """Blocks of equal seconds, forward and backward (`balance_by_time`); everything kept, no limit looked at.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> layers = tuple(LayerCost("layer", s, s, (Option(8),)) for s in (1.0, 1.0, 1.0, 3.0))
    >>> torchgpipe(Problem(Costs(layers), 2, find_schedule("gpipe"), 4)).bounds
    (0, 3, 4)
    """
    return _balanced(
        problem, [layer.forward_s + layer.backward_s for layer in problem.costs.layers]
    )


def torchgpipe_size(problem: Problem) -> Decision:
    """Blocks of equal bytes of parameters (after `balance_by_size`); everything kept, no limit looked at."""
    return _balanced(problem, [float(layer.parameter_bytes) for layer in problem.costs.layers])


def _balanced(problem: Problem, costs: Sequence[float]) -> Decision:
    """The block partition of a sequence of layers, those that stay together as one."""
    cuts = [int(cut) for cut in Segments(problem).cuts]
    blocks = block_partition([sum(costs[i:j]) for i, j in pairwise(cuts)], problem.stages)
    return Decision.keeping_all([cuts[place] for place in (0, *accumulate(blocks))])


def block_partition(costs: Sequence[float], stages: int) -> list[int]:
    """Layers per stage: the largest block is as small as can be, no two differ by more than the costliest layer.

    The smallest block takes a layer from its neighbour on the side of the largest, again and again. That never
    makes the largest grow; therefore it starts where the largest is smallest, and not at an even partition.

    >>> block_partition([1.0, 1.0, 1.0, 3.0], 2)
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
    """The bounds that make the largest block smallest, given the costs of the first layers."""
    costs = total[None] - total[:, None]
    costs[np.tril_indices(len(total))] = np.inf
    _, bounds = least_path([costs] * stages, np.maximum)
    assert bounds is not None, "there are as many layers as stages need"
    return np.array(bounds)
