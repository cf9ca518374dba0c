"""Shards of an optimizer: which replica of a stage updates which of its parameters, and keeps the state for that.

Each parameter is updated by one replica, which sends it to the others: ZeRO's first stage (Rajbhandari et al., 2020),
by whole leaves. They are packed by the bytes of their state. Where an optimizer mixes leaves of a layer, these stay
together.
"""

from collections.abc import Sequence

from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.programs.optimizer import OptimizerCut

Size = tuple[int, int]
"""Bytes of the optimizer's state, then of parameters."""


def sharded(optimizer: OptimizerCut, graph: LayerGraph, plan: Plan, *, by_layers: bool = False) -> OptimizerCut:
    """Cuts an optimizer once more, for the replicas of a plan.

    Args:
        optimizer: cut for the layers, and perhaps for other replicas.
        graph: the layers.
        plan: their stages.
        by_layers: leaves of a layer stay together: layers are updated at different times.
    """
    source = optimizer.source
    if source is None or not plan.replicated:
        return optimizer if source is None else source.cut()
    sizes = leaf_sizes(optimizer, graph)
    together = [tuple(graph.owned(layer.id)) for layer in graph.layers]
    if not by_layers:
        try:
            return source.cut(_shards([(p,) for p in range(len(sizes))], sizes, graph, plan))
        except ValueError:
            pass  # it mixes leaves of a layer
    return source.cut(_shards(together, sizes, graph, plan))


def leaf_sizes(optimizer: OptimizerCut, graph: LayerGraph) -> list[Size]:
    """The bytes of each parameter's state, and its own."""
    state = [0] * len(graph.parameters)
    for leaf in optimizer.state:
        if leaf.parameter is not None:
            state[leaf.parameter] += leaf.array.bytes
    return [(size, parameter.array.bytes) for size, parameter in zip(state, graph.parameters, strict=True)]


def _shards(groups: Sequence[tuple[int, ...]], sizes: Sequence[Size], graph: LayerGraph, plan: Plan) -> tuple[int, ...]:
    """The shard of each parameter, given those that stay together."""
    shards = [0] * len(sizes)
    for stage in plan.stages:
        mine = [group for group in groups if group and graph.parameters[group[0]].owner in stage.layers]
        totals = [(sum(sizes[p][0] for p in group), sum(sizes[p][1] for p in group)) for group in mine]
        for group, shard in zip(mine, packed(totals, len(stage.devices)), strict=True):
            for p in group:
                shards[p] = shard
    return tuple(shards)


def packed(sizes: Sequence[Size], shards: int) -> list[int]:
    """Packs things into shards: the largest first, each to where least is.

    >>> packed([(2, 1), (6, 3), (2, 1), (4, 2)], 2)
    [1, 0, 0, 1]
    """
    loads, found = [(0, 0)] * shards, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i][0], -sizes[i][1], i)):
        found[i] = least = loads.index(min(loads))
        loads[least] = loads[least][0] + sizes[i][0], loads[least][1] + sizes[i][1]
    return found
