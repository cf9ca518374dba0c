"""Splits of graph files over devices that experts made;
they lie beside the files of dnn-partitioning.

The load of a device is the seconds of its nodes and of its transfers: an output that other devices
read is sent once, an output of others is received once, and so are their cotangents. The largest
load is the time per sample, which the paper (Tarnawski et al., 2020) minimizes. The field `load` of
a file is not read: it is -1 if nobody computed it.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jvpipe.profiles.graph_parts import GraphFile
from jvpipe.profiles.located_json import parse_located


def expert_split(path: str | Path) -> tuple[tuple[int, ...], ...]:
    """Reads the node ids on each accelerator.

    Raises:
        ValueError: the file is wrong; the message names file, line and field.
    """
    whole = parse_located(Path(path).read_text(), str(path))
    if "cpus" in whole and any(device.items_of("nodes") for device in whole.objects("cpus")):
        raise whole.wrong("the field cpus holds nodes: only splits over accelerators can be used")
    parts: list[tuple[int, ...]] = []
    for device in whole.objects("fpgas"):
        nodes = device.items_of("nodes")
        if bad := [node for node in nodes if type(node) is not int]:
            raise device.wrong(f"the field nodes holds {bad[0]!r}, which is not the id of a node")
        parts.append(tuple(nodes))
    times = Counter(node for nodes in parts for node in nodes)
    if twice := [node for node, count in times.items() if count > 1]:
        raise whole.wrong(f"the field nodes holds {twice[0]} twice: a node is on one device")
    return tuple(parts)


def split_loads_s(graph: GraphFile, split: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Computes each device's load in seconds.

    Nodes that are not layers (backward ones) count where their forward is.

    Args:
        graph: with the costs of its nodes.
        split: the node ids on each device.

    Raises:
        ValueError: a layer is on no device.

    >>> from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
    >>> from jvpipe.cost.hardware import Link
    >>> layers = tuple(LayerCost(name, 1.0, 2.0, (Option(0),)) for name in "ab")
    >>> graph = GraphFile(Costs(layers, (Edge(0, (1,), 100),), ids=(4, 5)), link=Link(1000.0))
    >>> split_loads_s(graph, [(4,), (5,)]), split_loads_s(graph, [(4, 5), ()])
    ((3.2, 3.2), (6.0, 0.0))
    """
    device_of: dict[int, int] = {}
    for d, nodes in enumerate(split):
        device_of |= dict.fromkeys(nodes, d)
    if missing := [node for node in graph.costs.ids if node not in device_of]:
        raise ValueError(f"the split leaves out nodes {missing}: each needs a device")
    # By layer: backward nodes have no place in `ids`.
    device = [device_of[node] for node in graph.costs.ids]
    loads = [0.0] * len(split)
    for d, layer in zip(device, graph.costs.layers, strict=True):
        loads[d] += layer.forward_s + layer.backward_s
    for edge in graph.costs.edges:
        home = device[edge.producer]
        away = {device[reader] for reader in edge.readers} - {home}
        if away:
            times = 2 if edge.differentiable else 1  # the cotangent comes back
            for d in {home, *away}:
                # Both ends of a link are busy while a value passes.
                loads[d] += graph.link.seconds(edge.bytes) * times
    return tuple(loads)
