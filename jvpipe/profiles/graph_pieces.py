"""Pieces of a graph: the smallest sets of nodes between which it may be cut if classes of nodes share a device.

    1 -> 2 -> 3 -> 4        1 and 3 share a device, and 2 lies between them:
    ^-- class --^           the pieces are (1, 2, 3) and (4)

If the nodes of a class are joined by edges both ways, pieces are the strongly connected components.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from jvpipe.profiles.graph_parts import topological_order


def pieces_of(
    nodes: Sequence[int],
    edges: Iterable[tuple[int, int]],
    classes: Iterable[Sequence[int]],
) -> list[tuple[int, ...]]:
    """Divides nodes into pieces such that classes stay whole and edges run within a piece or to a
    later one.

    No smaller pieces are possible. If several pieces could come next the one with the lowest node
    does, and within a piece nodes keep their order.

    Args:
        nodes: all nodes, in an order.
        edges: source and target; they may run in cycles.
        classes: nodes that share a device.

    >>> pieces_of([1, 2, 3, 4, 5], [(1, 2), (2, 4), (3, 5)], [(1, 3), (2, 5)])
    [(1, 3), (2, 5), (4,)]
    >>> pieces_of([1, 2, 3, 4], [(1, 2), (2, 3)], [(1, 3)])
    [(1, 2, 3), (4,)]
    """
    # Late: it takes long to import, and few need it.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    edges = list(edges)
    place = {node: i for i, node in enumerate(nodes)}
    both_ways: list[tuple[int, int]] = []
    for first, *rest in classes:
        for other in rest:
            # An edge in each direction puts both into one strongly connected component.
            both_ways += [(first, other), (other, first)]
    pairs = [(place[a], place[b]) for a, b in (*edges, *both_ways)]
    ends = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    shape = len(nodes), len(nodes)
    joined = csr_array((np.ones(len(ends)), ends.T), shape=shape)
    # Nodes that wait for each other, or may not be parted, are of one component.
    labels = connected_components(joined, directed=True, connection="strong")[1]
    members: dict[int, list[int]] = {}
    for node, label in zip(nodes, labels, strict=True):
        members.setdefault(int(label), []).append(node)
    piece_of: dict[int, int] = {}
    for node, label in zip(nodes, labels, strict=True):
        piece_of[node] = min(members[int(label)])
    ends_of = [(piece_of[a], piece_of[b]) for a, b in edges]
    between = {(a, b): 0 for a, b in ends_of if a != b}
    # A piece is named by its least node.
    named = {min(piece): tuple(piece) for piece in members.values()}
    return [named[piece] for piece in topological_order(named, between, "pieces")]
