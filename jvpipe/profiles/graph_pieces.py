"""Pieces of a graph: the least sets of nodes between which it may be cut where classes of nodes share a device."""

from collections.abc import Iterable, Sequence

import numpy as np

from jvpipe.profiles.graph_parts import topological_order


def pieces_of(
    nodes: Sequence[int], edges: Iterable[tuple[int, int]], classes: Iterable[Sequence[int]]
) -> list[tuple[int, ...]]:
    """The nodes in pieces such that classes stay whole and every edge runs within a piece or to a later one.

    No other pieces are smaller: a piece is a class, or classes between which edges run both ways. Among the pieces
    that are ready, the one that holds the lowest number comes first, and within a piece nodes keep their order.

    Args:
        nodes: all nodes, in an order.
        edges: source and target; they may run in cycles.
        classes: nodes that share a device.

    >>> pieces_of([1, 2, 3, 4, 5], [(1, 2), (2, 4), (3, 5)], [(1, 3), (2, 5)])
    [(1, 3), (2, 5), (4,)]
    >>> pieces_of([1, 2, 3, 4], [(1, 2), (2, 3)], [(1, 3)])
    [(1, 2, 3), (4,)]
    """
    from scipy.sparse import csr_array  # late: few need it
    from scipy.sparse.csgraph import connected_components

    edges, place = list(edges), {node: i for i, node in enumerate(nodes)}
    bound = [
        pair
        for first, *rest in classes
        for other in rest
        for pair in ((first, other), (other, first))
    ]
    ends = np.array([(place[a], place[b]) for a, b in (*edges, *bound)], dtype=np.int64).reshape(
        -1, 2
    )
    joined = csr_array((np.ones(len(ends)), ends.T), shape=(len(nodes), len(nodes)))
    labels = connected_components(joined, directed=True, connection="strong")[1]
    members: dict[int, list[int]] = {}
    for node, label in zip(nodes, labels, strict=True):
        members.setdefault(int(label), []).append(node)
    piece_of = {node: min(members[int(label)]) for node, label in zip(nodes, labels, strict=True)}
    between = {(piece_of[a], piece_of[b]): 0 for a, b in edges if piece_of[a] != piece_of[b]}
    named = {min(piece): tuple(piece) for piece in members.values()}
    return [named[piece] for piece in topological_order(named, between, "pieces")]
