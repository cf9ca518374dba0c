"""The shares of replicas in an update: which of them updates a layer, and keeps the optimizer's state for that.

It sends the new parameters to the others: ZeRO's first stage (Rajbhandari et al., 2020), by whole layers. Layers of a
stage are packed onto its replicas by the bytes of their state. By parameters they would lie more evenly, but an update
is then made by other programs, depending on the cut, and the compiler gives these other bits.
"""

from collections.abc import Sequence

from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.programs.optimizer import OptimizerCut


def updating(graph: LayerGraph, plan: Plan, optimizer: OptimizerCut) -> dict[int, int]:
    """The replica of each layer that updates it.

    Args:
        graph: the layers.
        plan: their stages.
        optimizer: whose state is shared out.
    """
    state, own = [0] * len(graph.layers), [0] * len(graph.layers)
    for j, layer in optimizer.holders:
        if layer is not None:
            state[layer] += optimizer.state[j].array.bytes
    for parameter in graph.parameters:
        own[parameter.owner] += parameter.array.bytes
    replicas: dict[int, int] = {}
    for stage in plan.stages:
        sizes = [(state[layer], own[layer]) for layer in stage.layers]
        replicas |= zip(stage.layers, packed(sizes, len(stage.devices)), strict=True)
    return replicas


def packed(sizes: Sequence[tuple[int, int]], replicas: int) -> list[int]:
    """Packs layers onto replicas: the largest first, each to where least is.

    Args:
        sizes: of each layer bytes of the optimizer's state, then of parameters.
        replicas: how many there are.

    >>> packed([(2, 1), (6, 3), (2, 1), (4, 2)], 2)
    [1, 0, 0, 1]
    """
    loads, found = [(0, 0)] * replicas, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i][0], -sizes[i][1], i)):
        found[i] = least = loads.index(min(loads))
        loads[least] = loads[least][0] + sizes[i][0], loads[least][1] + sizes[i][1]
    return found
