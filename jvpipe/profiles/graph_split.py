"""The splits of a graph file over devices that experts made, which lie beside the dnn-partitioning files.

The load of a device is the seconds of its nodes and of its transfers: each output that others read is sent once, each
that it reads from others comes once, and so do their cotangents. The largest load is the time per sample, which the
paper minimises. A `load` of -1 in a file says that nobody computed it.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jvpipe.profiles.graph_parts import GraphFile
from jvpipe.profiles.located_json import parse_located


def expert_split(path: str | Path) -> tuple[tuple[int, ...], ...]:
    """Returns the node ids on each accelerator; raises ValueError with file, line and field if the file is wrong."""
    whole = parse_located(Path(path).read_text(), str(path))
    if "cpus" in whole and any(device.items_of("nodes") for device in whole.objects("cpus")):
        raise whole.wrong("the field cpus holds nodes: only splits over accelerators can be used")
    parts: list[tuple[int, ...]] = []
    for device in whole.objects("fpgas"):
        nodes = device.items_of("nodes")
        if bad := [node for node in nodes if type(node) is not int]:
            raise device.wrong(f"the field nodes holds {bad[0]!r}, which is not the id of a node")
        parts.append(tuple(nodes))
    if twice := [
        node for node, times in Counter(n for nodes in parts for n in nodes).items() if times > 1
    ]:
        raise whole.wrong(f"the field nodes holds {twice[0]} twice: a node is on one device")
    return tuple(parts)


def split_loads_s(graph: GraphFile, split: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Each device's load in seconds; `split` are node ids per device.

    Nodes that are not layers (backward ones) count where their forward is. A layer on no device is a ValueError.

    >>> from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
    >>> from jvpipe.cost.hardware import Link
    >>> layers = tuple(LayerCost(name, 1.0, 2.0, (Option(0),)) for name in "ab")
    >>> graph = GraphFile(Costs(layers, (Edge(0, (1,), 100),), ids=(4, 5)), link=Link(1000.0))
    >>> split_loads_s(graph, [(4,), (5,)]), split_loads_s(graph, [(4, 5), ()])
    ((3.2, 3.2), (6.0, 0.0))
    """
    device_of = {node: d for d, nodes in enumerate(split) for node in nodes}
    if missing := [node for node in graph.costs.ids if node not in device_of]:
        raise ValueError(f"the split leaves out nodes {missing}: each needs a device")
    device = [device_of[node] for node in graph.costs.ids]
    loads = [0.0] * len(split)
    for d, layer in zip(device, graph.costs.layers, strict=True):
        loads[d] += layer.forward_s + layer.backward_s
    for edge in graph.costs.edges:
        home = device[edge.producer]
        away = {device[reader] for reader in edge.readers} - {home}
        for d in {home, *away} if away else ():
            loads[d] += graph.link.seconds(edge.bytes) * (2 if edge.differentiable else 1)
    return tuple(loads)
