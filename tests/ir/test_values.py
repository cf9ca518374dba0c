"""Values are named by what they are; a later round of a stream shifts what counts from its
beginning, and no more.
"""

import pytest

from jvpipe.ir.buffers import Copy, Spot
from jvpipe.ir.values import NEVER, VALUES, Owner, Value, ValueKind


@pytest.mark.parametrize("kind", ValueKind)
def test_a_shift_there_and_back_changes_nothing(kind: ValueKind) -> None:
    for value in (
        Value(kind),
        Value(kind, 1, 2, 3),
        Value(kind, 1, version=-2),
        Value(kind, 0, 0, -1, 5),
    ):
        assert value.shifted(4, 2).shifted(-4, -2) == value
        assert value.shifted(4, 2)[:3] == value[:3]


def test_what_is_of_no_micro_batch_stays_so() -> None:
    assert Value(ValueKind.CONSTANT, 3).shifted(4, 4) == Value(ValueKind.CONSTANT, 3)
    assert Value(ValueKind.RESIDUAL, 0, 1, 6).shifted(-4, -1) == Value(ValueKind.RESIDUAL, 0, 1, 2)
    assert Value(ValueKind.PARAMETER, 0, version=6).shifted(-4, -1) == Value(
        ValueKind.PARAMETER, 0, version=5
    )
    assert Value(ValueKind.TENSOR, 0).microbatch == NEVER


def test_names_tell_all_values_and_copies_apart() -> None:
    numbers = [
        (0, -1, NEVER, NEVER),
        (1, -1, NEVER, NEVER),
        (0, 1, NEVER, NEVER),
        (0, -1, 1, NEVER),
        (0, -1, NEVER, 1),
    ]
    spots = [
        Spot(Value(k, *n), place, copy)
        for k in ValueKind
        for n in numbers
        for place in (0, 1)
        for copy in Copy
    ]
    assert len({str(spot) for spot in spots}) == len(set(spots)) == len(spots)


def test_only_layers_own_what_follows_them_and_only_updates_gather() -> None:
    follows = {kind for kind, info in VALUES.items() if info.follows}
    gathered = {kind for kind, info in VALUES.items() if info.gathered}
    assert {kind for kind, info in VALUES.items() if info.lasts or info.remembered} <= follows
    assert gathered == {ValueKind.GRADIENT, ValueKind.WEIGHT, ValueKind.EXCHANGE}
    assert not gathered & follows
    assert {VALUES[kind].owner for kind in follows} == {
        Owner.PARAMETER,
        Owner.VERSION,
        Owner.OPTIMIZER,
        Owner.STATE,
        Owner.CONSTANT,
    }


def test_programs_read_what_is_there_and_swaps_make_the_others() -> None:
    assert [copy for copy in Copy if copy.is_read] == [Copy.OWN, Copy.RECOMPUTED, Copy.AWAY]
    assert [copy for copy in Copy if copy.is_swap] == [Copy.HOST, Copy.FETCHED]
    assert [copy for copy in Copy if copy.on_host] == [Copy.HOST, Copy.AWAY]
