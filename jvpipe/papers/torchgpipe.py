"""torchgpipe's block partition: no two stages differ by more than the costliest layer.

Papers: Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models", 2020;
Barany and Grinberg, "Block partitions of sequences", 2015.

Legend, in the second paper's words:
    block   consecutive layers, which become a stage; its size is the sum of their costs
    p       the index of the largest block
    q       the index of the smallest block

An example, in which each digit is the cost of a layer:

    1 1 1 1 | 1 1 | 1 1       sizes 4, 2, 2: p = 0, q = 1, so block 1 takes a layer from block 0
    1 1 1 | 1 1 1 | 1 1       sizes 3, 3, 2: no two differ by more than the costliest layer
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from jvpipe.planners.model.chain_dp import least_path
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Segments


def torchgpipe(problem: Problem) -> Decision:
    """Plans blocks of about equal seconds, forward plus backward, as `balance_by_time` does.

    Every residual is kept. The memory limit is not considered.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> layers = tuple(LayerCost("layer", s, s, (Option(8),)) for s in (1.0, 1.0, 1.0, 3.0))
    >>> torchgpipe(Problem(Costs(layers), 2, find_schedule("gpipe"), 4)).bounds
    (0, 3, 4)
    """
    layers = problem.costs.layers
    seconds = [layer.forward_s + layer.backward_s for layer in layers]
    return _balanced(problem, seconds)


def torchgpipe_size(problem: Problem) -> Decision:
    """Plans blocks of about equal bytes of parameters, after torchgpipe's `balance_by_size`."""
    layers = problem.costs.layers
    sizes = [float(layer.parameter_bytes) for layer in layers]
    return _balanced(problem, sizes)


def _balanced(problem: Problem, costs: Sequence[float]) -> Decision:
    """Plans a block partition by layers' costs; layers that must stay together count as one."""
    cuts = [int(cut) for cut in Segments(problem).cuts]
    pieces = [costs[i:j] for i, j in pairwise(cuts)]
    between_cuts = [sum(piece) for piece in pieces]
    blocks = block_partition(between_cuts, problem.stages)
    places = accumulate(blocks, initial=0)
    return Decision.keeping_all([cuts[place] for place in places])


def block_partition(costs: Sequence[float], stages: int) -> list[int]:
    """Returns the number of layers of each block; no two differ by more than the costliest layer.

    The search starts from a partition whose largest block is as small as possible. While the
    largest and the smallest block differ by more than the costliest layer, the smallest block takes
    a layer from its neighbor on the side of the largest block. No move makes the largest block
    larger.

    Args:
        costs: the cost of each layer.
        stages: the number of blocks.

    >>> block_partition([1.0, 1.0, 1.0, 3.0], 2)
    [3, 1]
    """
    total = np.concatenate([[0.0], np.cumsum(costs)])
    bounds = _smallest_largest(total, stages)
    allowed = max(costs) * (1 + 1e-9)  # sums of floats are not exact
    while True:
        sizes = np.diff(total[bounds])
        p = int(sizes.argmax())
        q = int(sizes.argmin())
        if sizes[p] - sizes[q] <= allowed:
            break
        if p < q:
            bounds[q] -= 1
        else:
            bounds[q + 1] += 1
    # An empty block gets the nearest layer of its neighbor. The new block is no larger than the
    # largest one, because it has a single layer.
    places = np.arange(stages + 1)
    bounds = np.maximum.accumulate(bounds - places) + places
    bounds = np.minimum(bounds, len(costs) - stages + places)
    return [int(n) for n in np.diff(bounds)]


def _smallest_largest(total: np.ndarray, stages: int) -> np.ndarray:
    """Returns the bounds that make the largest block as small as possible, given running costs."""
    costs = total[None] - total[:, None]
    costs[np.tril_indices(len(total))] = np.inf
    _, bounds = least_path([costs] * stages, np.maximum)
    assert bounds is not None, "there are as many layers as stages need"
    return np.array(bounds)
