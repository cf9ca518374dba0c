"""Pieces of a graph, beside all cuts that there are."""

from itertools import accumulate, product

from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.profiles.graph_pieces import pieces_of


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]], list[list[int]]]:
    """Nodes, edges to later ones, and the classes of those that have one."""
    nodes = draw(st.lists(st.integers(0, 99), min_size=1, max_size=7, unique=True))
    pairs = [(a, b) for i, a in enumerate(nodes) for b in nodes[i + 1 :]]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=9)) if pairs else []
    colors = draw(st.lists(st.integers(0, 3), min_size=len(nodes), max_size=len(nodes)))
    classes = [
        [n for n, color in zip(nodes, colors, strict=True) if color == wanted]
        for wanted in (1, 2, 3)
    ]
    return nodes, edges, [members for members in classes if members]


@settings(max_examples=200, deadline=None)
@given(graphs())
def test_what_a_cut_can_part_is_in_two_pieces_and_every_cut_between_pieces_is_lawful(
    graph: tuple[list[int], list[tuple[int, int]], list[list[int]]],
) -> None:
    nodes, edges, classes = graph
    found = pieces_of(nodes, edges, classes)
    assert sorted(n for piece in found for n in piece) == sorted(nodes)
    lawful = []
    for chosen in product((False, True), repeat=len(nodes)):
        before = {n for n, there in zip(nodes, chosen, strict=True) if there}
        closed = all(a in before or b not in before for a, b in edges)
        if closed and all(
            before.isdisjoint(members) or before.issuperset(members) for members in classes
        ):
            lawful.append(before)
    for prefix in accumulate(map(set, found), set.union):
        assert prefix in lawful
    piece_of = {n: i for i, piece in enumerate(found) for n in piece}
    for a, b in product(nodes, nodes):
        parted = any((a in before) != (b in before) for before in lawful)
        assert parted == (piece_of[a] != piece_of[b])


def test_a_long_chain_of_far_members_is_in_pieces() -> None:
    count = 5000
    early, late = range(count), range(count, 2 * count)
    edges = [*zip(early, late, strict=True), *((n, n + 1) for n in late[:-1])]
    assert len(pieces_of([*early, *late], edges, list(zip(early, late, strict=True)))) == count
