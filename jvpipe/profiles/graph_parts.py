"""The common parts of all formats of graph files: the result of reading one,
the order of its nodes, its errors.
"""

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jvpipe.cost.costs import Costs
from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.util.sizes import MOST_BYTES


@dataclass(frozen=True, slots=True)
class GraphFile:
    """The content of a graph file.

    Attributes:
        costs: of the model; `costs.ids` are the file's node ids.
        memory_limit_bytes: of each device that the file was made for; None if it does not say.
        devices: their number; None if it does not say.
        link: that joins them.
    """

    costs: Costs
    memory_limit_bytes: int | None = None
    devices: int | None = None
    link: Link = INFINITE


def wrong(file: str, line: int, what: str) -> ValueError:
    """Makes the error that says where a file is wrong.

    Args:
        file: its name.
        line: the number of the line, from 1.
        what: the flaw, and what would be right.

    >>> wrong("a.txt", 3, "activation_size is missing")
    ValueError('a.txt, line 3: activation_size is missing')
    """
    return ValueError(f"{file}, line {line}: {what}")


def flaw(number: int | float) -> str | None:
    """Says why a number cannot be a time or a size; None if it can be.

    >>> flaw(2.5), flaw(-1.0), flaw(float("nan"))
    (None, 'must be finite and not negative', 'must be finite and not negative')
    >>> flaw(1e308)
    'must be at most 4503599627370496'
    """
    if not 0 <= number < math.inf:
        return "must be finite and not negative"
    return None if number <= MOST_BYTES else f"must be at most {MOST_BYTES}"


def topological_order(
    nodes: Iterable[int],
    edges: Mapping[tuple[int, int], int],
    file: str,
) -> list[int]:
    """Orders nodes such that every edge runs forward.

    If several nodes wait for nothing, the one with the lowest id comes next.

    Args:
        nodes: of the graph.
        edges: from a node to another, with the line of each.
        file: its name, for messages.

    Raises:
        ValueError: there is a cycle, which the message names.

    >>> topological_order([3, 1, 2], {(3, 2): 8}, "a.txt")
    [1, 3, 2]
    """
    readers: dict[int, list[int]] = {node: [] for node in nodes}
    waits_for = dict.fromkeys(readers, 0)
    for source, target in edges:
        readers[source].append(target)
        waits_for[target] += 1
    # A heap, so that the lowest id comes out first whatever the order of the edges.
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
        left = {node for node, count in waits_for.items() if count}
        cycle = _cycle(left, edges)
        text = " -> ".join(map(str, cycle))
        line = edges[cycle[0], cycle[1]]
        raise wrong(file, line, f"the edges of nodes {text} run in a cycle: remove one of them")
    return order


def _cycle(left: set[int], edges: Iterable[tuple[int, int]]) -> list[int]:
    """Finds a cycle among the nodes that always waited.

    Each of them has a source that always waited, too. So a walk from source to source never ends,
    and comes to a node for the second time; from the first time on it is a cycle.
    """
    inside = [(source, target) for source, target in edges if source in left and target in left]
    source_of = {target: source for source, target in inside}
    path = [min(left)]
    while path.count(path[-1]) < 2:
        path.append(source_of[path[-1]])
    return path[path.index(path[-1]) :][::-1]
