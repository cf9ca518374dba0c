"""Reads the JSON files of dnn-partitioning, which describe a model and the machine that runs it.

The format is that of Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph
Operators", 2020.

    field of a node     meaning
    fpgaLatency         the milliseconds that the node takes on an accelerator
    size                the bytes that the node needs on an accelerator
    colorClass          a number; all nodes with the same number must share a device
    isBackwardNode      1 for a node of the backward. Most backward nodes have the color class of
                        their forward node; losses and sums of gradients may have other classes

    field of an edge    meaning
    cost                the milliseconds that moving the output of the edge's source takes
    size                the bytes of this output; few files have it
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jvpipe.cost.hardware import Link
from jvpipe.profiles.graph_parts import GraphFile, topological_order
from jvpipe.profiles.located_json import Located, parse_located
from jvpipe.profiles.operator_graph import Operator, operator_costs
from jvpipe.util.sizes import MOST_BYTES

_PCIE_3 = Link(16e9)  # assumed if no edge of a file has both a cost and a size


@dataclass(frozen=True, slots=True)
class _Edge:
    """An edge and its object in the file; `bytes` is 0 if the file does not give the size."""

    place: Located
    seconds: float
    bytes: int


def read_graph_json(text: str, file: str) -> GraphFile:
    """Reads costs, memory limit, number of devices and link from a dnn-partitioning file.

    Each forward node becomes a layer (see `operator_graph.py`). The `size` of a forward node counts
    as bytes of parameters, and the `size` of its backward node as bytes of gradients. The format
    does not say which bytes are activations, so the plan swaps and recomputes nothing.

    All edges use one link, whose rate is the median over the edges that have both `cost` and
    `size`; without such edges, 16 GB/s. An edge counts as the bytes that the link moves in its
    `cost`. Its `size` is not used otherwise.

    Args:
        text: the text of the file.
        file: the name of the file, for messages.

    >>> import json
    >>> node = dict(id=7, fpgaLatency=1, size=100, isBackwardNode=0, colorClass=1)
    >>> grad = dict(node, id=8, fpgaLatency=2, size=60, isBackwardNode=1)
    >>> text = json.dumps(dict(maxSizePerFPGA=1e9, maxFPGAs=2, nodes=[node, grad], edges=[]))
    >>> graph = read_graph_json(text, "graph.json")
    >>> graph.memory_limit_bytes, graph.devices, graph.costs.ids
    (1000000000, 2, (7,))
    >>> layer = graph.costs.layers[0]
    >>> layer.forward_s, layer.backward_s, layer.parameter_bytes, layer.gradient_bytes
    (0.001, 0.002, 100, 60)
    """
    whole = parse_located(text, file)
    limit = whole.amount("maxSizePerFPGA")
    devices = whole.count("maxFPGAs")
    if devices < 1:
        raise whole.wrong("the field maxFPGAs is 0: at least one accelerator is needed")
    nodes = _nodes(whole)
    edges = _edges(whole, nodes)
    # If the edges run in a cycle, the message names the line of one of them.
    lines = {ends: edge.place.line for ends, edge in edges.items()}
    order = topological_order(nodes, lines, file)
    rates = _rates(edges.values())
    link = Link(statistics.median(rates)) if rates else _PCIE_3
    whose = "of this file's edges" if rates else "that are assumed without edges of cost and size"
    for edge in edges.values():
        # A comparison with NaN is false, so `not ... <=` refuses NaN, too.
        if not edge.seconds * link.bytes_per_s <= MOST_BYTES:
            milliseconds = 1e3 * edge.seconds
            raise edge.place.wrong(
                f"the field cost is {milliseconds:.3g}: at the {link.bytes_per_s:.3g} bytes "
                f"per second {whose}, that is more than {MOST_BYTES} bytes"
            )
    seconds = {ends: edge.seconds for ends, edge in edges.items()}
    costs = operator_costs([nodes[node] for node in order], seconds, link)
    return GraphFile(costs, int(limit), devices, link)


def _nodes(whole: Located) -> dict[int, Operator]:
    """Reads the nodes of a file, by their ids."""
    nodes: dict[int, Operator] = {}
    lines: dict[int, int] = {}
    for place in whole.objects("nodes"):
        name = place.count("id")
        if name in nodes:
            raise place.wrong(f"node {name} was described on line {lines[name]} already")
        if "supportedOnFpga" in place and not place.flag("supportedOnFpga"):
            raise place.wrong(
                f"the field supportedOnFpga of node {name} is 0: layers run on accelerators only"
            )
        nodes[name] = _operator(name, place)
        lines[name] = place.line
    if all(node.is_backward for node in nodes.values()):
        raise whole.wrong("the field nodes holds no forward node: there is nothing to plan")
    return nodes


def _operator(number: int, place: Located) -> Operator:
    """Reads a node; a node without a color class gets a color that no other node has."""
    has_class = "colorClass" in place
    return Operator(
        number,
        name=str(place.get("name", f"node{number}")),
        seconds=place.amount("fpgaLatency") / 1e3,
        bytes=round(place.amount("size")),
        is_backward=place.flag("isBackwardNode"),
        color=place.count("colorClass") if has_class else ("alone", number),
    )


def _edges(
    whole: Located,
    nodes: Mapping[int, Operator],
) -> dict[tuple[int, int], _Edge]:
    """Reads the edges of a file, by the pair of their source and target nodes."""
    edges: dict[tuple[int, int], _Edge] = {}
    for place in whole.objects("edges"):
        source = place.count("sourceId")
        target = place.count("destId")
        ends = source, target
        for field, end in zip(("sourceId", "destId"), ends, strict=True):
            if end not in nodes:
                raise place.wrong(
                    f"the edge dangles: the field {field} is {end}, and there is no such node"
                )
        if nodes[source].is_backward and not nodes[target].is_backward:
            raise place.wrong(
                f"the edge leads from backward node {source} to forward node {target}"
            )
        seconds = place.amount("cost") / 1e3  # the file has milliseconds
        size = round(place.amount("size")) if "size" in place else 0
        # If an edge is described twice, the first description counts.
        edges.setdefault(ends, _Edge(place, seconds, size))
    return edges


def _rates(edges: Iterable[_Edge]) -> list[float]:
    """Lists the rates of the edges that have both bytes and seconds, in bytes per second."""
    return [edge.bytes / edge.seconds for edge in edges if edge.bytes and edge.seconds]
