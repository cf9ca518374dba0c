"""The plain state in a state in flight is the newest of everything; values replaced lie where the
old ones lay.
"""

import jax
import numpy as np
import pytest

import jvpipe
from jvpipe.ir.values import ValueKind
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.tensors import Ledger
from jvpipe.runtime.engine.transport import to_host
from jvpipe.runtime.state.checkpoints.flight import (
    names_of,
    plain_arrays,
    restore_in_flight,
    with_leaves,
)
from tests.session.tiny import BATCH, PARAMS, begun


def in_flight() -> tuple[jvpipe.Pipeline, CompiledPlan, jvpipe.State]:
    pipe, state = begun(schedule="pipedream")
    for now, _ in pipe.run(state, [BATCH] * 2):
        state = now
    return pipe, pipe.session.compiled, state


def test_a_plain_state_has_the_newest_version_of_every_parameter() -> None:
    pipe, compiled, state = in_flight()
    names = names_of(compiled, state.stream_steps)
    versions = {spot.value.version for spot in names if spot.value.kind is ValueKind.PARAMETER}
    assert len(versions) > 1, "some are stashed"
    plain = plain_arrays(compiled, state)
    assert len(plain) == len(compiled.persistent) < len(state.arrays)
    newest: dict[int, tuple[int, jax.Array]] = {}
    for spot, array in zip(names, state.arrays, strict=True):
        if spot.value.kind is ValueKind.PARAMETER:
            newest[spot.value.index] = max(
                newest.get(spot.value.index, (-99, array)), (spot.value.version, array)
            )
    for buffer, array in zip(compiled.persistent, plain, strict=True):
        assert array.devices() == {compiled.devices[buffer.place]}
        np.testing.assert_array_equal(array, newest[buffer.value.index][1])
    at_rest = pipe.session.drain(state)
    assert plain_arrays(compiled, at_rest) is at_rest.arrays


@pytest.mark.parametrize("consume", [False, True])
def test_leaves_replace_those_of_their_kind_where_they_lie(consume: bool) -> None:
    pipe, state = begun()
    compiled = pipe.session.compiled
    others = {i: w + 1 for i, w in enumerate(PARAMS)}
    before = state.arrays
    after = with_leaves(names_of(compiled, 0), before, ValueKind.PARAMETER, others, consume=consume)
    for buffer, old, new in zip(compiled.persistent, before, after, strict=True):
        np.testing.assert_array_equal(new, others[buffer.value.index])
        assert new.sharding == old.sharding
        assert old.is_deleted() == consume


def test_arrays_come_back_by_their_names_and_a_foreign_name_is_refused() -> None:
    _, compiled, state = in_flight()
    names = map(str, names_of(compiled, state.stream_steps))
    values = {name: to_host(x) for name, x in zip(names, state.arrays, strict=True)}
    ledger = Ledger(compiled.devices)
    shuffled = dict(sorted(values.items(), reverse=True))
    restored = restore_in_flight(compiled, state.stream_steps, shuffled, ledger)
    for ours, theirs in zip(restored, state.arrays, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.devices() == theirs.devices()
    assert sum(ledger.live) == sum(x.nbytes for x in state.arrays)
    (first, value), *others = values.items()
    with pytest.raises(ValueError, match=r"names its arrays otherwise .* another version wrote it"):
        restore_in_flight(
            compiled, state.stream_steps, {first + "?": value, **dict(others)}, ledger
        )
