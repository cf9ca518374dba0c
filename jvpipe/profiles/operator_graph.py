"""Makes the layers of a pipeline from profiled operators of the forward and of the backward.

    forward     a ----> b ----> c          layers a, b, c
                |       |       |
    backward    da <--- db <--- dc         da has the color of a, so da is the backward of layer a

Each forward operator becomes a layer. A color is a label: operators of one color must share a
device, because a stage runs the forward of its layers and later their backward. A color that has no
forward operator becomes a layer of its own.

The order of the layers follows the edges between forward operators. A layer without a forward
operator is ordered by the reverse of its backward edges. All other backward edges have no influence
on the order: they mirror forward edges, and in some files they even run in the forward's direction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.cost.hardware import Link
from jvpipe.profiles.graph_pieces import pieces_of


@dataclass(frozen=True, slots=True)
class Operator:
    """A node of a graph file, with its seconds and bytes on a device.

    Operators with equal `color` must share a device.
    """

    id: int
    name: str
    seconds: float
    bytes: int
    is_backward: bool
    color: object


@dataclass(frozen=True, slots=True)
class _SentValue:
    """A value that an operator sends between layers; `seconds` is the time that the link takes."""

    operator: Operator
    source: int
    target: int
    seconds: float


def operator_costs(
    operators: Sequence[Operator],
    edges: Mapping[tuple[int, int], float],
    link: Link,
) -> Costs:
    """Makes the costs of a model from its operators.

    Each forward operator becomes a layer, and its bytes count as parameters. A backward operator
    belongs to the last forward operator of its color, and its bytes count as gradients of this
    layer. Layers are ordered so that operators of a color stay close together, which leaves as many
    places to cut as possible.

    Args:
        operators: forward and backward operators, in a topological order.
        edges: for each pair of source and target ids, the seconds of the source's output on the
            link.
        link: the link that joins the devices. Its rate times these seconds gives bytes.

    >>> a, b = Operator(1, "a", 1.0, 8, False, "red"), Operator(2, "b", 1.0, 8, False, "blue")
    >>> da = Operator(3, "da", 2.0, 4, True, "red")
    >>> costs = operator_costs([a, b, da], {(1, 2): 0.5, (1, 3): 0.5}, Link(100.0))
    >>> [(layer.name, layer.forward_s, layer.backward_s, layer.gradient_bytes) for layer in costs.layers]
    [('a', 1.0, 2.0, 4), ('b', 1.0, 0.0, 0)]
    >>> costs.edges
    (Edge(producer=0, readers=(1,), bytes=50, name='node1', differentiable=False),)
    """
    node = {operator.id: operator for operator in operators}
    layer_of = _layers_of(operators)
    layers = [id_ for id_, layer in layer_of.items() if id_ == layer]
    colors: dict[object, list[int]] = {}
    backward: dict[int, list[Operator]] = {}
    for layer in layers:
        colors.setdefault(node[layer].color, []).append(layer)
        backward[layer] = []
    for operator in operators:
        if operator.is_backward:
            backward[layer_of[operator.id]].append(operator)
    sent = _sent(edges, node, layer_of)
    pieces = pieces_of(layers, _order(sent, node), colors.values())
    # In this order, layers that must share a stage are neighbors.
    order = chain.from_iterable(pieces)
    place = {layer: i for i, layer in enumerate(order)}
    several = [piece for piece in pieces if len(piece) > 1]
    together = [tuple(place[layer] for layer in piece) for piece in several]
    costs = [_layer(node[layer], backward[layer]) for layer in place]
    return Costs(
        tuple(costs),
        _values(sent, node, place, link),
        together=tuple(together),
        ids=tuple(place),
    )


def _layers_of(operators: Sequence[Operator]) -> dict[int, int]:
    """Returns the id of the layer that each operator belongs to, by the operator's id."""
    forward = [operator for operator in operators if not operator.is_backward]
    first = {operator.color: operator.id for operator in reversed(operators)}
    last = {operator.color: operator.id for operator in forward}
    # A color without a forward operator is a layer of its own, with the id of its first operator.
    of_color = first | last
    return {x.id: of_color[x.color] if x.is_backward else x.id for x in operators}


def _sent(
    edges: Mapping[tuple[int, int], float],
    node: Mapping[int, Operator],
    layer_of: Mapping[int, int],
) -> list[_SentValue]:
    """Lists the values that operators send.

    Args:
        edges: for each pair of source and target ids, the seconds of the source's output.
        node: the operator of each id.
        layer_of: the layer of each operator.
    """
    sent = []
    for (source, target), seconds in edges.items():
        operator = node[source]
        layer = layer_of[target]
        # An edge from a forward operator to a backward one needs no transfer if the target's layer
        # has a forward operator, because that operator leaves the value on the device.
        needs_transfer = node[target].is_backward == node[layer].is_backward
        if operator.is_backward or needs_transfer:
            sent.append(_SentValue(operator, layer_of[source], layer, seconds))
    return sent


def _layer(operator: Operator, backward: Sequence[Operator]) -> LayerCost:
    """Returns the cost of a layer.

    Args:
        operator: the layer's forward operator, or its first backward one if it has no forward one.
        backward: the backward operators of the layer.
    """
    has_forward = not operator.is_backward
    return LayerCost(
        operator.name,
        forward_s=operator.seconds if has_forward else 0.0,
        backward_s=sum((x.seconds for x in backward), 0.0),
        options=(Option(0),),
        parameter_bytes=operator.bytes if has_forward else 0,
        gradient_bytes=sum(x.bytes for x in backward),
    )


def _order(sent: Sequence[_SentValue], node: Mapping[int, Operator]) -> list[tuple[int, int]]:
    """Lists pairs of layers of which the first must come before the second."""
    forward = [x for x in sent if not x.operator.is_backward]
    backward = [x for x in sent if x.operator.is_backward]
    pairs = [(x.source, x.target) for x in forward]
    for x in backward:
        # Only backward edges order a layer that has no forward operator.
        if node[x.source].is_backward or node[x.target].is_backward:
            pairs.append((x.target, x.source))
    return pairs


def _values(
    sent: Sequence[_SentValue],
    node: Mapping[int, Operator],
    place: Mapping[int, int],
    link: Link,
) -> tuple[Edge, ...]:
    """Makes the edges between layers.

    An operator's output becomes one edge to all layers that read it. If the transfer takes longer
    to some readers than to others, there is one edge for each duration.

    An edge has a cotangent (is differentiable) if the backward sends a value from the color of one
    of its readers to the color of its producer. The backward may also send a value between two
    colors where the forward sends none, for example past a sum of gradients. Such a value becomes
    an edge without a cotangent, from the earlier layer to the later one. The direction does not
    matter, because the link takes equally long both ways.

    Args:
        sent: the values that operators send.
        node: the operator of each id.
        place: the position of each layer.
        link: the link that joins the devices.
    """
    ways: list[tuple[_SentValue, int, int]] = []
    for x in sent:
        if x.source != x.target:
            a, b = sorted((x.source, x.target), key=place.__getitem__)
            ways.append((x, a, b))
    # Both sets hold pairs of colors, the color of the earlier layer first. The forward sends a
    # value between each pair in `came`, and the backward between each pair in `returned`.
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
        edge = Edge(
            producer,
            tuple(sorted(to)),
            bytes=round(seconds * link.bytes_per_s),
            name=f"node{number}",
            differentiable=any(to.values()),
        )
        edges.append(edge)
    return tuple(edges)
