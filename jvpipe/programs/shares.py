"""The choice of the replica that updates each layer of a stage.

That replica holds the layer's optimizer state, and sends the new parameters to the other replicas.
This is the first stage of ZeRO (Rajbhandari et al., 2020), by whole layers. The layers of a stage
are packed onto its replicas by the bytes of their state. Single parameters could be packed more
evenly. But then the programs of an update would depend on the packing, and the compiler may round
differently in different programs. Layers can be packed in any way, because each layer runs the same
program on any replica. All processes must choose the same packing.
"""

from collections.abc import Sequence

from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.programs.optimizer_pieces import OptimizerCut


def updating(
    graph: LayerGraph,
    plan: Plan,
    optimizer: OptimizerCut,
) -> dict[int, int]:
    """Returns the replica that updates each layer.

    Args:
        graph: the layers.
        plan: the stages of the layers.
        optimizer: the optimizer whose state the replicas divide among themselves.
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
        sizes: for each layer, the bytes of its optimizer state and the bytes of its parameters.
        replicas: the number of replicas.

    Returns:
        The replica of each layer.

    >>> packed([(2, 1), (6, 3), (2, 1), (4, 2)], 2)
    [1, 0, 0, 1]
    """
    loads = [(0, 0)] * replicas
    replica_of = [0] * len(sizes)
    # Ties go to the lowest layer and the lowest replica, so that all processes pack the same way.
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
