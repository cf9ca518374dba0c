"""Divides a graph into pieces, the smallest sets of nodes between which a stage may end.

A class is a set of nodes that must share a device. A piece consists of whole classes, and of all
nodes on paths between the nodes of these classes:

    1 -> 2 -> 3 -> 4        1 and 3 are a class and 2 lies between them, so the pieces are
    ^- class -^             (1, 2, 3) and (4)

To find the pieces, edges in both directions are added between the nodes of each class. The
pieces are then the strongly connected components of the graph. The reason is that an edge means
"the source's stage is not later than the target's", and a class means this in both directions.
Two nodes must share a stage if and only if neither may be in a later stage than the other.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from jvpipe.profiles.graph_parts import topological_order


def pieces_of(
    nodes: Sequence[int],
    edges: Iterable[tuple[int, int]],
    classes: Iterable[Sequence[int]],
) -> list[tuple[int, ...]]:
    """Divides nodes into pieces, and orders the pieces so that no edge runs backward.

    Every class is within one piece, and the pieces are as small as possible. If several pieces
    could come next, the piece that has the lowest node comes next.

    Args:
        nodes: all nodes; each piece has its nodes in the same order.
        edges: the pairs of source and target; edges may run in cycles.
        classes: lists of nodes that must share a device.

    >>> pieces_of([1, 2, 3, 4, 5], [(1, 2), (2, 4), (3, 5)], [(1, 3), (2, 5)])
    [(1, 3), (2, 5), (4,)]
    >>> pieces_of([1, 2, 3, 4], [(1, 2), (2, 3)], [(1, 3)])
    [(1, 2, 3), (4,)]
    """
    edges = list(edges)
    joining = list(edges)
    for first, *rest in classes:
        for other in rest:
            joining.append((first, other))
            joining.append((other, first))
    # Each piece is named by its lowest node.
    named = {min(piece): piece for piece in _components(nodes, joining)}
    name_of: dict[int, int] = {}
    for name, piece in named.items():
        name_of |= dict.fromkeys(piece, name)
    between: dict[tuple[int, int], int] = {}
    for source, target in edges:
        ends = name_of[source], name_of[target]
        if ends[0] != ends[1]:
            between[ends] = 0  # an edge between pieces has no line in a file
    order = topological_order(named, between, "pieces")
    return [named[piece] for piece in order]


def _components(
    nodes: Sequence[int],
    edges: Sequence[tuple[int, int]],
) -> list[tuple[int, ...]]:
    """Returns the strongly connected components of a graph, each in the order of `nodes`."""
    # SciPy is imported late because the import takes long and few callers need it.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    place = {node: i for i, node in enumerate(nodes)}
    pairs = [(place[a], place[b]) for a, b in edges]
    ends = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    ones = np.ones(len(ends))
    shape = len(nodes), len(nodes)
    matrix = csr_array((ones, ends.T), shape=shape)
    # `labels` has the number of each node's component.
    _, labels = connected_components(
        matrix,
        directed=True,
        connection="strong",
    )
    members: dict[int, list[int]] = {}
    for node, label in zip(nodes, labels, strict=True):
        members.setdefault(int(label), []).append(node)
    return [tuple(component) for component in members.values()]
