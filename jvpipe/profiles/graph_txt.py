"""Reads PipeDream's graph.txt: a profile of a model's layers, with a line per node and per edge.

Below are a node and an edge. In a file, each is a single line, and the line of an edge begins
with white space:

    node4 -- Conv2d(64, 64, kernel_size=(3, 3)) -- forward_compute_time=46.2,
        backward_compute_time=113.3, activation_size=1644167168.0, parameter_size=147712.0
        -- stage_id=0
    <white space>node4 -- node5

Times are milliseconds per micro-batch, and sizes are bytes. `activation_size` may be a list,
`[a; b]`, which stands for its sum. `stage_id` is optional and ignored. The lines may come in any
order. The times of an `Input` node count as 0, because they are those of the data loader, which
does not run on a device of the pipeline.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.ir.plan import Fate
from jvpipe.profiles.graph_parts import GraphFile, flaw, topological_order, wrong
from jvpipe.util.brief import brief

_log = logging.getLogger("jvpipe")
_NODE = re.compile(r"node([0-9]{1,18})")
_STAGE = re.compile(r" -- stage_id=\S*$")  # at the end of a node's line
_FIELD = re.compile(r"(\w+)=(\[[^\]]*\]|[^,]*)")  # a value may be a list, [a; b]
_INPUT = re.compile(r"Input[0-9]*")


@dataclass(frozen=True, slots=True)
class _Node:
    """The content of the line that describes a node; `line` is the number of this line."""

    line: int
    description: str
    forward_s: float
    backward_s: float
    activation_bytes: int
    parameter_bytes: int

    @property
    def is_input(self) -> bool:
        return _INPUT.fullmatch(self.description) is not None


def read_graph_txt(text: str, file: str) -> GraphFile:
    r"""Reads costs from the text of a graph.txt.

    Each node becomes a layer, with the node's description as its name. A plan may keep, swap or
    recompute the activation of a layer. An edge from a node to itself is ignored, with a warning.
    An edge that appears twice counts once.

    Args:
        text: the text of the file.
        file: the name of the file, for messages.

    >>> times = "forward_compute_time=1.0, backward_compute_time=2.0"
    >>> numbers = f"{times}, activation_size=[8; 4], parameter_size=0"
    >>> nodes = [f"node1 -- Embed(8, 4) -- {numbers}", f"node2 -- Add -- {numbers}"]
    >>> lines = [*nodes, "  node1 -- node2"]
    >>> costs = read_graph_txt("\n".join(lines), "graph.txt").costs
    >>> costs.ids, costs.layers[0].name, costs.layers[0].forward_s
    ((1, 2), 'Embed(8, 4)', 0.001)
    >>> costs.edges
    (Edge(producer=0, readers=(1,), bytes=12, name='node1', differentiable=True),)
    """
    nodes: dict[int, _Node] = {}
    numbered = enumerate(text.splitlines(), 1)
    lines = [(line, content) for line, content in numbered if content.strip()]
    for line, content in lines:
        if not content[0].isspace():
            # A line without white space at its beginning describes a node.
            node, cost = _read_node(content.rstrip(), file, line)
            if node in nodes:
                earlier = nodes[node].line
                raise wrong(file, line, f"node{node} was described on line {earlier} already")
            nodes[node] = cost
    # An edge may come before its nodes in the file, so edges are read once all nodes are known.
    edges: dict[tuple[int, int], int] = {}
    for line, content in lines:
        if content[0].isspace():
            ends = _read_edge(content.strip(), file, line)
            source, target = ends
            for end in ends:
                if end not in nodes:
                    message = f"the edge dangles: node{end} is not described in this file"
                    raise wrong(file, line, message)
            if source == target:
                warning = "%s, line %d: the edge from node%d to itself is ignored: remove it"
                _log.warning(warning, file, line, source)
            else:
                edges.setdefault(ends, line)
    order = topological_order(nodes, edges, file)
    return GraphFile(_costs(nodes, edges, order))


def _read_node(
    content: str,
    file: str,
    line: int,
) -> tuple[int, _Node]:
    """Reads the line of a node; returns the node's number and content.

    The description may contain commas, parentheses and ` -- `.
    """
    name, _, rest = content.partition(" -- ")
    matched = _NODE.fullmatch(name.strip())
    if matched is None:
        starts = "a line starts with `node` and a number (or with white space, if it is an edge)"
        raise wrong(file, line, f"{starts}, not {brief(name)}")
    description, _, numbers = _STAGE.sub("", rest).rpartition(" -- ")
    fields = dict(_FIELD.findall(numbers))
    node = _Node(
        line,
        description.strip(),
        forward_s=_number(fields, "forward_compute_time", file, line) / 1e3,
        backward_s=_number(fields, "backward_compute_time", file, line) / 1e3,
        activation_bytes=round(_number(fields, "activation_size", file, line)),
        parameter_bytes=round(_number(fields, "parameter_size", file, line)),
    )
    return int(matched[1]), node


def _number(
    fields: Mapping[str, str],
    field: str,
    file: str,
    line: int,
) -> float:
    """Returns the number in a field of a node; if `activation_size` is a list, its sum."""
    if field not in fields:
        raise wrong(file, line, f"the field {field} is missing")
    written = fields[field].strip()
    is_list = field == "activation_size" and written.startswith("[")
    texts = written[1:-1].split(";") if is_list else [written]
    try:
        numbers = [_read_number(text) for text in texts]
    except ValueError:
        digits = f"{field}={brief(written)} is not a number: write digits, such as 1000.5"
        raise wrong(file, line, digits) from None
    # The sum is checked, too, because the sum of finite numbers may be infinite.
    for number in (*numbers, sum(numbers)):
        if reason := flaw(number):
            raise wrong(file, line, f"{field}={brief(written)} {reason}")
    return sum(numbers)


def _read_number(text: str) -> float:
    """Returns the number that a text of ASCII digits stands for.

    Underscores and the digits of other scripts are refused, although Python's `float` accepts them,
    because no profiler writes them.
    """
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return float(text)


def _read_edge(content: str, file: str, line: int) -> tuple[int, int]:
    """Reads the line of an edge, and returns the numbers of its source and its target."""
    ends = [_NODE.fullmatch(end.strip()) for end in content.split(" -- ")]
    if len(ends) != 2 or ends[0] is None or ends[1] is None:
        message = f"an indented line is an edge, `nodeA -- nodeB`, not {brief(content)}"
        raise wrong(file, line, message)
    return int(ends[0][1]), int(ends[1][1])


def _costs(
    nodes: Mapping[int, _Node],
    edges: Mapping[tuple[int, int], int],
    order: list[int],
) -> Costs:
    """Returns the costs of a model whose layers are nodes.

    Args:
        nodes: the content of each node.
        edges: the pairs of source and target.
        order: the order of the nodes.
    """
    place = {node: i for i, node in enumerate(order)}
    readers: dict[int, list[int]] = {node: [] for node in order}
    for source, target in edges:
        readers[source].append(place[target])
    layers = []
    values = []
    for node in order:
        name = f"node{node}"
        profile = nodes[node]
        layers.append(_layer(name, profile))
        if readers[node]:
            edge = Edge(
                place[node],
                tuple(sorted(readers[node])),
                bytes=profile.activation_bytes,
                name=name,
                differentiable=not profile.is_input,
            )
            values.append(edge)
    return Costs(tuple(layers), tuple(values), ids=tuple(order))


def _layer(name: str, node: _Node) -> LayerCost:
    """Returns the cost of a node, with an option for each fate of its activation, named `name`."""
    kept = node.activation_bytes
    # The times of an input node are those of the data loader, which does not run on a device.
    forward_s = 0.0 if node.is_input else node.forward_s
    backward_s = 0.0 if node.is_input else node.backward_s
    keeps = Option(kept)
    swaps = Option(0, swapped_bytes=kept, fates={name: Fate.SWAP})
    recomputes = Option(
        0,
        extra_s=forward_s,
        extra_bytes=kept,
        fates={name: Fate.RECOMPUTE},
    )
    return LayerCost(
        node.description,
        forward_s,
        backward_s,
        (keeps, swaps, recomputes) if kept else (keeps,),
        parameter_bytes=node.parameter_bytes,
        gradient_bytes=node.parameter_bytes,
    )
