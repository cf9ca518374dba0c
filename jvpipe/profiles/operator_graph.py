"""Operators that others profiled, forward and backward ones, as the layers of a pipeline.

    forward     a ----> b ----> c          layers a, b, c
                |       |       |
    backward    da <--- db <--- dc         each counts for the forward operator of its color

A stage runs the forward of its layers and later their backward; operators of one color share a
device. Forward edges order the layers. A color without a forward operator is a layer too, which its
backward edges order in reverse. Between other colors backward edges mean nothing: they mirror
forward ones, and in some files they run the same way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.hardware import Link
from jvpipe.profiles.graph_pieces import pieces_of


@dataclass(frozen=True, slots=True)
class Operator:
    """A node of a graph file: its seconds and bytes on a device.

    Operators of one color share a device.
    """

    id: int
    name: str
    seconds: float
    bytes: int
    is_backward: bool
    color: object


@dataclass(frozen=True, slots=True)
class _Sent:
    """A value that an operator of layer `source` sends to layer `target`, and the seconds that it
    takes.
    """

    operator: Operator
    source: int
    target: int
    seconds: float


def operator_costs(
    operators: Sequence[Operator],
    edges: Mapping[tuple[int, int], float],
    link: Link,
) -> Costs:
    """Makes the costs of a model of its operators.

    A forward operator is a layer, and its bytes count as parameters. Bytes of a backward operator
    count as gradients of the last forward operator of its color, or of a layer of their own if
    there is none. Layers come in an order that keeps colors together, which leaves as many places
    to cut as possible.

    Args:
        operators: forward and backward ones, in a topological order.
        edges: by source and target, the seconds that the source's output takes over the link.
        link: that joins the devices.

    >>> a, b = Operator(1, "a", 1.0, 8, False, "red"), Operator(2, "b", 1.0, 8, False, "blue")
    >>> da = Operator(3, "da", 2.0, 4, True, "red")
    >>> costs = operator_costs([a, b, da], {(1, 2): 0.5, (1, 3): 0.5}, Link(100.0))
    >>> [(layer.name, layer.forward_s, layer.backward_s, layer.gradient_bytes) for layer in costs.layers]
    [('a', 1.0, 2.0, 4), ('b', 1.0, 0.0, 0)]
    >>> costs.edges
    (Edge(producer=0, readers=(1,), bytes=50, name='node1', differentiable=False),)
    """
    node = {operator.id: operator for operator in operators}
    home = _homes(operators)
    colors: dict[object, list[int]] = {}
    backward: dict[int, list[Operator]] = {}
    for operator in operators:
        if home[operator.id] == operator.id:
            # Operators of a color share a device.
            colors.setdefault(operator.color, []).append(operator.id)
        if operator.is_backward:
            backward.setdefault(home[operator.id], []).append(operator)
    sent = []
    for (source, target), seconds in edges.items():
        # A forward operator leaves values for the backward of its layer without a transfer.
        at_home = node[target].is_backward == node[home[target]].is_backward
        if node[source].is_backward or at_home:
            sent.append(
                _Sent(
                    node[source],
                    home[source],
                    home[target],
                    seconds,
                )
            )
    layers = [operator.id for operator in operators if home[operator.id] == operator.id]
    groups = pieces_of(layers, _order(sent, node), colors.values())
    # Layers that must share a stage lie next to each other.
    in_order = chain.from_iterable(groups)
    place = {layer: i for i, layer in enumerate(in_order)}
    together = [tuple(place[x] for x in group) for group in groups if len(group) > 1]
    costs = [_layer(node[layer], backward.get(layer, ())) for layer in place]
    return Costs(
        tuple(costs),
        _values(sent, node, place, link),
        together=tuple(together),
        ids=tuple(place),
    )


def _homes(operators: Sequence[Operator]) -> dict[int, int]:
    """Returns for each operator the layer that it counts for."""
    first = {operator.color: operator.id for operator in reversed(operators)}
    last = {operator.color: operator.id for operator in operators if not operator.is_backward}
    # A color without a forward operator is a layer of its own, named by its first operator.
    layer_of = first | last
    return {x.id: layer_of[x.color] if x.is_backward else x.id for x in operators}


def _layer(operator: Operator, backward: Sequence[Operator]) -> LayerCost:
    seconds, size = (0.0, 0) if operator.is_backward else (operator.seconds, operator.bytes)
    backward_s = sum((x.seconds for x in backward), 0.0)
    return LayerCost(
        operator.name,
        seconds,
        backward_s,
        (Option(0),),
        parameter_bytes=size,
        gradient_bytes=sum(x.bytes for x in backward),
    )


def _order(sent: Sequence[_Sent], node: Mapping[int, Operator]) -> list[tuple[int, int]]:
    """Lists pairs of layers of which the first must come before the second."""
    pairs = [(x.source, x.target) for x in sent if not x.operator.is_backward]
    for x in sent:
        without_forward = node[x.source].is_backward or node[x.target].is_backward
        # Nothing else orders a layer that has no forward operator.
        if x.operator.is_backward and without_forward:
            pairs.append((x.target, x.source))
    return pairs


def _values(
    sent: Sequence[_Sent],
    node: Mapping[int, Operator],
    place: Mapping[int, int],
    link: Link,
) -> tuple[Edge, ...]:
    """Makes an edge per output, to all readers that it costs the same, in the order of the layers.

    An edge has a cotangent if anything goes back between the colors of a reader and of its maker.
    What goes back where nothing came (past a sum of gradients) is an edge without cotangent, from
    the earlier layer to the later one: the link takes as long for it in either direction.
    """
    ways: list[tuple[_Sent, int, int]] = []
    for x in sent:
        if x.source != x.target:
            a, b = sorted((x.source, x.target), key=place.__getitem__)
            ways.append((x, a, b))
    # Pairs of colors, in the order of the layers, between which a value goes forward, or comes
    # back.
    came: set[tuple[object, object]] = set()
    returned: set[tuple[object, object]] = set()
    for x, a, b in ways:
        colors = returned if x.operator.is_backward else came
        colors.add((node[a].color, node[b].color))
    readers: dict[tuple[int, float, int], dict[int, bool]] = {}
    for x, a, b in ways:
        ends = node[a].color, node[b].color
        back = x.operator.is_backward
        is_cotangent = back and (ends in came or ends[0] == ends[1])
        if not is_cotangent:
            output = place[a], x.seconds, x.operator.id
            readers.setdefault(output, {})[place[b]] = not back and ends in returned
    edges = []
    for (producer, seconds, number), to in sorted(readers.items()):
        size = round(seconds * link.bytes_per_s)
        name = f"node{number}"
        differentiable = any(to.values())
        edges.append(
            Edge(
                producer,
                tuple(sorted(to)),
                size,
                name,
                differentiable,
            )
        )
    return tuple(edges)
