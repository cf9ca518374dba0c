"""Operators that others profiled, forward and backward ones, as the layers of a pipeline.

A stage runs the forward of its layers and later their backward; operators of one color share a device. Forward edges
say which layers come first, and where a color has no forward operator its backward edges do, the other way round.
Between other colors backward edges say nothing: they mirror forward ones, and some files have them run the same way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.hardware import Link
from jvpipe.profiles.graph_pieces import pieces_of


@dataclass(frozen=True, slots=True)
class Operator:
    """A node of a graph file: its seconds and bytes on a device, which it shares with all others of its color."""

    id: int
    name: str
    seconds: float
    bytes: int
    is_backward: bool
    color: object


@dataclass(frozen=True, slots=True)
class _Sent:
    """A value that an operator of layer `source` sends to layer `target`, and the seconds that it takes."""

    operator: Operator
    source: int
    target: int
    seconds: float


def operator_costs(
    operators: Sequence[Operator], edges: Mapping[tuple[int, int], float], link: Link
) -> Costs:
    """The costs of operators that stand in a topological order.

    A forward operator is a layer: its bytes count as parameters, those of backward ones as gradients. These count for
    the last forward operator of their color, and are a layer of their own where there is none. Layers come in an order
    that keeps colors together, so that there are as many places to cut as there can be.

    Args:
        operators: forward ones and backward ones.
        edges: by source and target, the seconds that the source's output takes over the link.
        link: what joins the devices.

    >>> a, b = Operator(1, "a", 1.0, 8, False, "red"), Operator(2, "b", 1.0, 8, False, "blue")
    >>> costs = operator_costs([a, b, Operator(3, "da", 2.0, 4, True, "red")], {(1, 2): 0.5, (1, 3): 0.5}, Link(100.0))
    >>> [(layer.name, layer.forward_s, layer.backward_s, layer.gradient_bytes) for layer in costs.layers]
    [('a', 1.0, 2.0, 4), ('b', 1.0, 0.0, 0)]
    >>> costs.edges
    (Edge(producer=0, readers=(1,), bytes=50, name='node1', differentiable=False),)
    """
    node, home = {operator.id: operator for operator in operators}, _homes(operators)
    colors: dict[object, list[int]] = {}
    backward: dict[int, list[Operator]] = {}
    for operator in operators:
        if home[operator.id] == operator.id:
            colors.setdefault(operator.color, []).append(operator.id)
        if operator.is_backward:
            backward.setdefault(home[operator.id], []).append(operator)
    sent = [
        _Sent(node[source], home[source], home[target], seconds)
        for (source, target), seconds in edges.items()
        if node[source].is_backward or node[target].is_backward == node[home[target]].is_backward
    ]
    layers = [operator.id for operator in operators if home[operator.id] == operator.id]
    groups = pieces_of(layers, _order(sent, node), colors.values())
    place = {layer: i for i, layer in enumerate(layer for group in groups for layer in group)}
    return Costs(
        tuple(_layer(node[layer], backward.get(layer, ())) for layer in place),
        _values(sent, node, place, link),
        together=tuple(
            tuple(place[layer] for layer in group) for group in groups if len(group) > 1
        ),
        ids=tuple(place),
    )


def _homes(operators: Sequence[Operator]) -> dict[int, int]:
    """Per operator the layer that it counts for."""
    first = {operator.color: operator.id for operator in reversed(operators)}
    last = {operator.color: operator.id for operator in operators if not operator.is_backward}
    layer_of = first | last
    return {x.id: layer_of[x.color] if x.is_backward else x.id for x in operators}


def _layer(operator: Operator, backward: Sequence[Operator]) -> LayerCost:
    seconds, size = (0.0, 0) if operator.is_backward else (operator.seconds, operator.bytes)
    return LayerCost(
        operator.name,
        seconds,
        sum((x.seconds for x in backward), 0.0),
        (Option(0),),
        parameter_bytes=size,
        gradient_bytes=sum(x.bytes for x in backward),
    )


def _order(sent: Sequence[_Sent], node: Mapping[int, Operator]) -> list[tuple[int, int]]:
    """Layers of which the first must come first."""
    forward = [(x.source, x.target) for x in sent if not x.operator.is_backward]
    back = [x for x in sent if x.operator.is_backward]
    mirrored = [
        (x.target, x.source)
        for x in back
        if node[x.source].is_backward or node[x.target].is_backward
    ]
    return forward + mirrored


def _values(
    sent: Sequence[_Sent], node: Mapping[int, Operator], place: Mapping[int, int], link: Link
) -> tuple[Edge, ...]:
    """One edge per output, to all readers that it costs the same, in the order of the layers.

    It has a cotangent if anything goes back between a reader's color and its maker's. What goes back where nothing came
    (a sum of gradients may stand between) is an edge without one: a link takes as long for it in either direction.
    """
    ways = [
        (x, *sorted((x.source, x.target), key=place.__getitem__))
        for x in sent
        if x.source != x.target
    ]
    came = {(node[a].color, node[b].color) for x, a, b in ways if not x.operator.is_backward}
    returned = {(node[a].color, node[b].color) for x, a, b in ways if x.operator.is_backward}
    readers: dict[tuple[int, float, int], dict[int, bool]] = {}
    for x, a, b in ways:
        ends, back = (node[a].color, node[b].color), x.operator.is_backward
        if not (back and (ends in came or ends[0] == ends[1])):
            readers.setdefault((place[a], x.seconds, x.operator.id), {})[place[b]] = (
                not back and ends in returned
            )
    return tuple(
        Edge(
            producer,
            tuple(sorted(to)),
            round(seconds * link.bytes_per_s),
            f"node{name}",
            any(to.values()),
        )
        for (producer, seconds, name), to in sorted(readers.items())
    )
