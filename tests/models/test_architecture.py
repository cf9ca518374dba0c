import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvpipe.models.architecture import Architecture, Block, SearchSpace

SPACE = SearchSpace(("a", "b", "c"), ("x", "y"), slots=5, fewest=2)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_a_mutation_changes_one_thing_in_one_slot(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parent = SPACE.random(rng)
    for _ in range(10):
        child = SPACE.mutate(parent, rng)
        ((before, after),) = [
            (a, b) for a, b in zip(parent.slots, child.slots, strict=True) if a != b
        ]
        if before is not None and after is not None:
            assert (before.left == after.left) != (before.right == after.right)
        assert len(child.names()) >= 2
        assert len(set(parent.names()) - set(child.names())) == (before is not None)
        assert {b.left for _, _, b in child.blocks()} <= set(SPACE.left)
        assert {b.right for _, _, b in child.blocks()} <= set(SPACE.right)
        parent = child


def test_all_of_a_small_space_is_reached() -> None:
    space, rng = SearchSpace(("a", "b"), ("x",), slots=2, fewest=1), np.random.default_rng(0)
    seen, architecture = set(), space.random(rng)
    for _ in range(200):
        architecture = space.mutate(architecture, rng)
        seen.add(architecture)
    assert len(seen) == 3 * 3 - 1


def test_covering_holds_every_pair_in_full_architectures() -> None:
    found = SPACE.covering()
    assert {block for a in found for _, _, block in a.blocks()} == {
        Block(a, b) for a in "abc" for b in "xy"
    }
    assert all(len(a.names()) == 5 for a in found)
    assert len(found) == 2
    assert len(SearchSpace(("a", "b"), ("x",), slots=5, fewest=1).covering()[0].names()) == 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: SearchSpace(("a", "b"), ("x",), slots=2, fewest=3),
            "fewest=3 must lie in 1 to slots=2",
        ),
        (lambda: SearchSpace(("a",), ("x",), slots=2, fewest=1), "nothing to choose"),
        (
            lambda: SPACE.mutate(Architecture((None,)), np.random.default_rng(0)),
            "of 1 slots does not belong to a space of 5",
        ),
    ],
)
def test_spaces_that_leave_no_choice_and_strange_architectures_are_refused(
    call: object, message: str
) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
