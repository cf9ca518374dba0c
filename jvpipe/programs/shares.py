"""The shares of replicas in an update: which of them updates a layer,
and keeps the optimizer's state for that.

It sends the new parameters to the others: ZeRO's first stage (Rajbhandari et al., 2020), by whole
layers. The layers of a stage are packed onto its replicas by the bytes of their state. Single
parameters could be packed more evenly, but then the programs of an update would depend on the cut,
and the compiler rounds differently in different programs.
"""

from collections.abc import Sequence

from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.programs.optimizer import OptimizerCut


def updating(
    graph: LayerGraph,
    plan: Plan,
    optimizer: OptimizerCut,
) -> dict[int, int]:
    """Returns the replica that updates each layer.

    Args:
        graph: the layers.
        plan: their stages.
        optimizer: whose state is shared out.
    """
    state_bytes = [0] * len(graph.layers)
    parameter_bytes = [0] * len(graph.layers)
    for j, layer in optimizer.holders:
        if layer is not None:
            state_bytes[layer] += optimizer.state[j].array.bytes
    for parameter in graph.parameters:
        parameter_bytes[parameter.owner] += parameter.array.bytes
    replicas: dict[int, int] = {}
    for stage in plan.stages:
        sizes = [(state_bytes[layer], parameter_bytes[layer]) for layer in stage.layers]
        keepers = packed(sizes, len(stage.devices))
        replicas |= zip(stage.layers, keepers, strict=True)
    return replicas


def packed(sizes: Sequence[tuple[int, int]], replicas: int) -> list[int]:
    """Packs layers onto replicas: the largest first, each onto the replica that has least so far.

    Args:
        sizes: of each layer the bytes of the optimizer's state, then those of parameters.
        replicas: how many there are.

    Returns:
        The replica of each layer.

    >>> packed([(2, 1), (6, 3), (2, 1), (4, 2)], 2)
    [1, 0, 0, 1]
    """
    loads = [(0, 0)] * replicas
    replica_of = [0] * len(sizes)
    # Ties are broken by the layers' numbers, and by those of the replicas: all processes pack
    # alike.
    largest_first = sorted(
        enumerate(sizes),
        key=lambda item: item[1],
        reverse=True,
    )
    for i, (state_bytes, parameter_bytes) in largest_first:
        replica = loads.index(min(loads))
        replica_of[i] = replica
        load = loads[replica]
        loads[replica] = load[0] + state_bytes, load[1] + parameter_bytes
    return replica_of
