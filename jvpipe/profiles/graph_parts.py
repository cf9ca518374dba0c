"""The common parts of all formats of graph files: what is read from one, the order of its nodes, its errors."""

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jvpipe.cost.costs import Costs
from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.util.sizes import MOST_BYTES


@dataclass(frozen=True, slots=True)
class GraphFile:
    """The content of a graph file: costs always, the machine it was made for where the format tells.

    `devices` accelerators of `memory_limit_bytes` each are joined by `link`; `costs.ids` are the file's node ids.
    """

    costs: Costs
    memory_limit_bytes: int | None = None
    devices: int | None = None
    link: Link = INFINITE


def wrong(file: str, line: int, what: str) -> ValueError:
    """The error that says where a file is wrong.

    Args:
        file: its name.
        line: its number, from 1.
        what: is wrong there.

    >>> wrong("a.txt", 3, "activation_size is missing")
    ValueError('a.txt, line 3: activation_size is missing')
    """
    return ValueError(f"{file}, line {line}: {what}")


def flaw(number: int | float) -> str | None:
    """Why a number can be no time and no size; None if it can.

    >>> flaw(2.5), flaw(-1.0), flaw(float("nan"))
    (None, 'must be finite and not negative', 'must be finite and not negative')
    >>> flaw(1e308)
    'must be at most 4503599627370496'
    """
    if not 0 <= number < math.inf:
        return "must be finite and not negative"
    return None if number <= MOST_BYTES else f"must be at most {MOST_BYTES}"


def topological_order(
    nodes: Iterable[int], edges: Mapping[tuple[int, int], int], file: str
) -> list[int]:
    """Nodes such that every edge runs forward; of those that are ready, the one of the lowest id comes first.

    `edges` maps each to the line where it stands. A cycle is a ValueError that names it.

    Args:
        nodes: of the graph.
        edges: from a node to another, with the line of each.
        file: for the error.

    >>> topological_order([3, 1, 2], {(3, 2): 8}, "a.txt")
    [1, 3, 2]
    """
    readers: dict[int, list[int]] = {node: [] for node in nodes}
    waits_for = dict.fromkeys(readers, 0)
    for source, target in edges:
        readers[source].append(target)
        waits_for[target] += 1
    ready = [node for node, count in waits_for.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for reader in readers[node]:
            waits_for[reader] -= 1
            if not waits_for[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(readers):
        cycle = _cycle({node for node, count in waits_for.items() if count}, edges)
        text = " -> ".join(map(str, cycle))
        raise wrong(
            file,
            edges[cycle[0], cycle[1]],
            f"the edges of nodes {text} run in a cycle: remove one of them",
        )
    return order


def _cycle(left: set[int], edges: Iterable[tuple[int, int]]) -> list[int]:
    """A cycle among the nodes that never got ready: each of them has a source that did not either."""
    source_of = {target: source for source, target in edges if source in left and target in left}
    path = [min(left)]
    while path.count(path[-1]) < 2:
        path.append(source_of[path[-1]])
    return path[path.index(path[-1]) :][::-1]
