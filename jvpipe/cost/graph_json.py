"""The JSON files of dnn-partitioning (Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph
Operators", 2020): a model, and the machine that it is to be spread over.

A node has `fpgaLatency`, its milliseconds on an accelerator, and `size`, the bytes that it takes there; nodes of one
`colorClass` share a device. A training file has backward nodes too (`isBackwardNode`), in the class of their forward.
An edge's `cost` is the milliseconds that the source's output takes to or from an accelerator.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.graph_parts import GraphFile, topological_order
from jvpipe.cost.hardware import Link
from jvpipe.cost.located_json import Located, parse

_BYTES_PER_S = 16e9  # of PCIe 3, for files whose edges have a cost but no size


@dataclass(frozen=True, slots=True)
class _Node:
    """A node; without a color it is a class of its own."""

    place: Located
    id: int
    seconds: float
    bytes: int
    is_backward: bool
    color: object


@dataclass(frozen=True, slots=True)
class _Edge:
    """An edge; its bytes are 0 where the file has none."""

    place: Located
    seconds: float
    bytes: int


def read_graph_json(text: str, file: str) -> GraphFile:
    """The costs, limit and link in the text of a dnn-partitioning file; `file` is what errors call it.

    Each forward node is a layer. Its `size` counts as parameters, that of its backward as gradients: the format does
    not tell what they hold, so there is nothing to swap or to compute again. A class of several forward nodes is a
    group that stays together, and its backward nodes count for the last of them. Edges between forward nodes get the
    bytes that the file's link moves in their `cost`; those of backward nodes mirror them and are left out.

    >>> import json
    >>> node = dict(id=7, fpgaLatency=1, size=100, isBackwardNode=0, colorClass=1)
    >>> grad = dict(node, id=8, fpgaLatency=2, size=60, isBackwardNode=1)
    >>> text = json.dumps(dict(maxSizePerFPGA=1e9, maxFPGAs=2, nodes=[node, grad], edges=[]))
    >>> found = read_graph_json(text, "graph.json")
    >>> found.memory_limit_bytes, found.devices, found.costs.ids
    (1000000000, 2, (7,))
    >>> layer = found.costs.layers[0]
    >>> layer.forward_s, layer.backward_s, layer.parameter_bytes, layer.gradient_bytes
    (0.001, 0.002, 100, 60)
    """
    whole = parse(text, file)
    limit, devices = whole.amount("maxSizePerFPGA"), whole.count("maxFPGAs")
    if devices < 1:
        raise whole.wrong("the field maxFPGAs is 0: at least one accelerator is needed")
    nodes = _nodes(whole)
    edges = _edges(whole, nodes)
    lines = {ends: edge.place.line for ends, edge in edges.items()}
    order = [n for n in topological_order(nodes, lines, file) if not nodes[n].is_backward]
    place = {node: i for i, node in enumerate(order)}
    classes: dict[object, list[int]] = {}
    for node in order:
        classes.setdefault(nodes[node].color, []).append(node)
    backward = _backward(nodes.values(), classes)
    forward_edges = {ends: edge for ends, edge in edges.items() if ends[1] in place}
    link = Link(_bytes_per_s(forward_edges.values()))
    costs = Costs(
        tuple(_layer(nodes[node], backward.get(node, ())) for node in order),
        _values(forward_edges, place, link, trained={n for m in classes.values() if m[-1] in backward for n in m}),
        together=tuple(tuple(place[n] for n in members) for members in classes.values() if len(members) > 1),
        ids=tuple(order),
    )
    return GraphFile(costs, int(limit), devices, link)


def _nodes(whole: Located) -> dict[int, _Node]:
    nodes: dict[int, _Node] = {}
    for place in whole.objects("nodes"):
        name = place.count("id")
        if name in nodes:
            raise place.wrong(f"node {name} was described on line {nodes[name].place.line} already")
        if "supportedOnFpga" in place and not place.flag("supportedOnFpga"):
            raise place.wrong(f"the field supportedOnFpga of node {name} is 0: layers run on accelerators only")
        color = place.count("colorClass") if "colorClass" in place else ("alone", name)
        seconds, size = place.amount("fpgaLatency") / 1e3, round(place.amount("size"))
        nodes[name] = _Node(place, name, seconds, size, place.flag("isBackwardNode"), color)
    if all(node.is_backward for node in nodes.values()):
        raise whole.wrong("the field nodes holds no forward node: there is nothing to plan")
    return nodes


def _edges(whole: Located, nodes: Mapping[int, _Node]) -> dict[tuple[int, int], _Edge]:
    edges: dict[tuple[int, int], _Edge] = {}
    for place in whole.objects("edges"):
        ends = source, target = place.count("sourceId"), place.count("destId")
        for field, end in zip(("sourceId", "destId"), ends, strict=True):
            if end not in nodes:
                raise place.wrong(f"the edge dangles: the field {field} is {end}, and there is no such node")
        if nodes[source].is_backward and not nodes[target].is_backward:
            raise place.wrong(f"the edge leads from backward node {source} to forward node {target}")
        size = round(place.amount("size")) if "size" in place else 0
        edges.setdefault(ends, _Edge(place, place.amount("cost") / 1e3, size))
    return edges


def _backward(nodes: Iterable[_Node], classes: Mapping[object, Sequence[int]]) -> dict[int, list[_Node]]:
    """Backward nodes by the forward node that they count for: the last of their class."""
    found: dict[int, list[_Node]] = {}
    for node in nodes:
        if node.is_backward:
            if node.color not in classes:
                raise node.place.wrong(f"the field colorClass of backward node {node.id} names no forward node's class")
            found.setdefault(classes[node.color][-1], []).append(node)
    return found


def _bytes_per_s(edges: Iterable[_Edge]) -> float:
    """How fast the file's edges move; the middle one, should they disagree."""
    rates = [edge.bytes / edge.seconds for edge in edges if edge.bytes and edge.seconds]
    return statistics.median(rates) if rates else _BYTES_PER_S


def _layer(node: _Node, backward: Sequence[_Node]) -> LayerCost:
    return LayerCost(
        str(node.place.get("name", f"node{node.id}")),
        node.seconds,
        sum((b.seconds for b in backward), 0.0),
        (Option(0),),
        parameter_bytes=node.bytes,
        gradient_bytes=sum(b.bytes for b in backward),
    )


def _values(
    edges: Mapping[tuple[int, int], _Edge], place: Mapping[int, int], link: Link, trained: set[int]
) -> tuple[Edge, ...]:
    """One edge per output, to all readers that it costs the same; it has a cotangent if its maker has a backward."""
    readers: dict[tuple[int, float], list[int]] = {}
    for (source, target), edge in edges.items():
        readers.setdefault((source, edge.seconds), []).append(place[target])
    return tuple(
        Edge(place[n], tuple(sorted(to)), round(seconds * link.bytes_per_s), f"node{n}", n in trained)
        for (n, seconds), to in sorted(readers.items(), key=lambda item: (place[item[0][0]], item[0][1]))
    )
