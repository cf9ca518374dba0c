"""PipeDream's graph.txt: a profile of a model's layers, one line per node and per edge.

    node4 -- Conv2d(64, 64, kernel_size=(3, 3)) -- forward_compute_time=46.2, backward_compute_time=113.3,
        activation_size=1644167168.0, parameter_size=147712.0 -- stage_id=0         (one line; the stage is optional)
    <white space>node4 -- node5

Times are milliseconds per micro-batch, sizes are bytes; `activation_size` may be a list, `[a; b]`. The nodes come in
any order. An `Input` node carries the time of the data loader, which no device works: it counts as nothing.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
from jvpipe.ir.plan import Fate
from jvpipe.profiles.graph_parts import GraphFile, flaw, topological_order, wrong

_log = logging.getLogger("jvpipe")
_NODE = re.compile(r"node([0-9]+)")
_STAGE = re.compile(r" -- stage_id=\S*$")
_FIELD = re.compile(r"(\w+)=(\[[^\]]*\]|[^,]*)")
_INPUT = re.compile(r"Input[0-9]*")


@dataclass(frozen=True, slots=True)
class _Node:
    """A node's line."""

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
    r"""The costs in the text of a graph.txt; `file` is what errors call it.

    Each node is a layer, named by its description. What it leaves is its activation, to be kept, swapped or computed
    again. An edge from a node to itself is stale, and passed over with a warning; one that is there twice is one.

    >>> numbers = "forward_compute_time=1.0, backward_compute_time=2.0, activation_size=[8; 4], parameter_size=0"
    >>> lines = [f"node1 -- Embed(8, 4) -- {numbers}", f"node2 -- Add -- {numbers}", "  node1 -- node2"]
    >>> costs = read_graph_txt("\n".join(lines), "graph.txt").costs
    >>> costs.ids, costs.layers[0].name, costs.layers[0].forward_s
    ((1, 2), 'Embed(8, 4)', 0.001)
    >>> costs.edges
    (Edge(producer=0, readers=(1,), bytes=12, name='node1', differentiable=True),)
    """
    nodes: dict[int, _Node] = {}
    lines = list(enumerate(text.splitlines(), 1))
    for line, content in lines:
        if content.strip() and not content[0].isspace():
            node, cost = _read_node(content.rstrip(), file, line)
            if node in nodes:
                raise wrong(
                    file, line, f"node{node} was described on line {nodes[node].line} already"
                )
            nodes[node] = cost
    edges: dict[tuple[int, int], int] = {}
    for line, content in lines:
        if content.strip() and content[0].isspace():
            source, target = _read_edge(content.strip(), file, line)
            for end in (source, target):
                if end not in nodes:
                    raise wrong(
                        file, line, f"the edge dangles: node{end} is not described in this file"
                    )
            if source == target:
                _log.warning(
                    "%s, line %d: the edge from node%d to itself is passed over: remove it",
                    file,
                    line,
                    source,
                )
            else:
                edges.setdefault((source, target), line)
    return GraphFile(_costs(nodes, edges, topological_order(nodes, edges, file)))


def _read_node(content: str, file: str, line: int) -> tuple[int, _Node]:
    """A node's id and what its line says; the description may hold commas, parentheses and ` -- `."""
    name, _, rest = content.partition(" -- ")
    matched = _NODE.fullmatch(name.strip())
    if matched is None:
        raise wrong(
            file,
            line,
            f"a line starts with `node` and a number (or with white space: an edge), not {name!r}",
        )
    description, _, numbers = _STAGE.sub("", rest).rpartition(" -- ")
    fields = dict(_FIELD.findall(numbers))
    return int(matched[1]), _Node(
        line,
        description.strip(),
        _number(fields, "forward_compute_time", file, line) / 1e3,
        _number(fields, "backward_compute_time", file, line) / 1e3,
        round(_number(fields, "activation_size", file, line)),
        round(_number(fields, "parameter_size", file, line)),
    )


def _number(fields: Mapping[str, str], field: str, file: str, line: int) -> float:
    """A field's number, or for activations the sum of its list."""
    if field not in fields:
        raise wrong(file, line, f"the field {field} is missing")
    written = fields[field].strip()
    texts = (
        written[1:-1].split(";")
        if field == "activation_size" and written.startswith("[")
        else [written]
    )
    try:
        numbers = [_read_number(text) for text in texts]
    except ValueError:
        raise wrong(
            file, line, f"{field}={written} is not a number: write digits, such as 1000.5"
        ) from None
    for number in (*numbers, sum(numbers)):
        if reason := flaw(number):
            raise wrong(file, line, f"{field}={written} {reason}")
    return sum(numbers)


def _read_number(text: str) -> float:
    """A number as profilers write it; Python reads underscores and the digits of other scripts as well."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return float(text)


def _read_edge(content: str, file: str, line: int) -> tuple[int, int]:
    ends = [_NODE.fullmatch(end.strip()) for end in content.split(" -- ")]
    if len(ends) != 2 or ends[0] is None or ends[1] is None:
        raise wrong(file, line, f"an indented line is an edge, `nodeA -- nodeB`, not {content!r}")
    return int(ends[0][1]), int(ends[1][1])


def _costs(
    nodes: Mapping[int, _Node], edges: Mapping[tuple[int, int], int], order: list[int]
) -> Costs:
    place = {node: i for i, node in enumerate(order)}
    readers: dict[int, list[int]] = {node: [] for node in order}
    for source, target in edges:
        readers[source].append(place[target])
    return Costs(
        tuple(_layer(f"node{node}", nodes[node]) for node in order),
        tuple(
            Edge(
                place[node],
                tuple(sorted(readers[node])),
                nodes[node].activation_bytes,
                f"node{node}",
                differentiable=not nodes[node].is_input,
            )
            for node in order
            if readers[node]
        ),
        ids=tuple(order),
    )


def _layer(name: str, node: _Node) -> LayerCost:
    kept = node.activation_bytes
    forward_s, backward_s = (0.0, 0.0) if node.is_input else (node.forward_s, node.backward_s)
    options = [Option(kept)]
    if kept:
        options.append(Option(0, swapped_bytes=kept, fates={name: Fate.SWAP}))
        options.append(Option(0, extra_s=forward_s, extra_bytes=kept, fates={name: Fate.RECOMPUTE}))
    return LayerCost(
        node.description,
        forward_s,
        backward_s,
        tuple(options),
        parameter_bytes=node.parameter_bytes,
        gradient_bytes=node.parameter_bytes,
    )
