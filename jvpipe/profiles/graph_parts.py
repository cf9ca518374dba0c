"""The code that both formats of graph files share: the result, the order of nodes, and errors."""

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
        costs: the costs of the model's layers; `costs.ids` are the layers' node ids in the file.
        memory_limit_bytes: the limit of each device; None if the file does not give one.
        devices: the number of devices; None if the file does not give it.
        link: the link that joins the devices.
    """

    costs: Costs
    memory_limit_bytes: int | None = None
    devices: int | None = None
    link: Link = INFINITE


def wrong(file: str, line: int, what: str) -> ValueError:
    """Makes the error for a wrong line of a file.

    Args:
        file: the name of the file.
        line: the number of the line, from 1.
        what: what is wrong in the line, and what would be right.

    >>> wrong("a.txt", 3, "activation_size is missing")
    ValueError('a.txt, line 3: activation_size is missing')
    """
    return ValueError(f"{file}, line {line}: {what}")


def flaw(number: int | float) -> str | None:
    """Returns why a number cannot be a time or a size; None if it can be one.

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
    """Orders nodes so that the source of every edge comes before its target.

    This is Kahn's algorithm. A node is ready once the sources of all edges to it have been
    ordered. The ready node with the lowest id is next.

    Args:
        nodes: the ids of the graph's nodes.
        edges: the pairs of source and target, each with its line in the file.
        file: the name of the file, for messages.

    Raises:
        ValueError: the edges run in a cycle, whose nodes the message names.

    >>> topological_order([3, 1, 2], {(3, 2): 8}, "a.txt")
    [1, 3, 2]
    """
    readers: dict[int, list[int]] = {node: [] for node in nodes}
    waits_for = dict.fromkeys(readers, 0)
    for source, target in edges:
        readers[source].append(target)
        waits_for[target] += 1
    # The heap yields the lowest id first, so the result does not depend on the order of the edges.
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
    """Finds a cycle among the nodes that never became ready.

    Each of these nodes is the target of an edge whose source is also one of these nodes. So a walk
    from target to source never ends, and reaches some node a second time. The nodes between the two
    visits, in reverse, are a cycle.
    """
    source_of: dict[int, int] = {}
    for source, target in edges:
        if source in left and target in left:
            source_of[target] = source
    path = [min(left)]
    while path.count(path[-1]) < 2:
        path.append(source_of[path[-1]])
    first_visit = path.index(path[-1])
    return path[first_visit:][::-1]
