"""A session writes what another one of the same model, or of none yet, goes on from."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jvpipe.session import checkpoints
from tests.session.tiny import BATCH, PARAMS, THERE, begun, pipeline


def test_a_session_without_a_model_takes_that_of_the_checkpoint(tmp_path: Path) -> None:
    pipe, state = begun()
    state, _ = pipe.step(state, BATCH)
    checkpoints.snapshot(pipe.session, state, {}).write(tmp_path)
    other = pipeline(THERE)
    restored = checkpoints.restore(other.session, tmp_path)
    assert (restored.step, restored.updates, restored.stream_steps) == (1, 1, 0)
    jax.tree.map(np.testing.assert_array_equal, other.params(restored), pipe.params(state))


def test_a_stream_goes_on_from_where_it_was_with_its_ledger(tmp_path: Path) -> None:
    pipe, state = begun(schedule="pipedream")
    for now, _ in pipe.run(state, [BATCH] * 2):
        state = now
    checkpoints.snapshot(pipe.session, state, {}).write(tmp_path)
    other = pipeline(schedule="pipedream")
    restored = checkpoints.restore(other.session, tmp_path)
    assert restored.stream_steps == state.stream_steps == 2
    assert other.ledger.versions.table().items() <= pipe.ledger.versions.table().items(), (
        "the end of it"
    )
    assert other.ledger.versions.staleness(3) == pipe.ledger.versions.staleness(3)
    jax.tree.map(np.testing.assert_array_equal, restored.arrays, state.arrays)
    with pytest.raises(ValueError, match=r"saved in flight under pipedream with cuts \[2, 1\]"):
        checkpoints.restore(pipeline(THERE, schedule="pipedream").session, tmp_path)
    swapped = pipe.plan.on([(1,), (0,)])
    with pytest.raises(ValueError, match=r"with cuts \[2, 1\] on devices \[\(0,\), \(1,\)\] and"):
        checkpoints.restore(pipeline(swapped, schedule="pipedream").session, tmp_path)
    larger = jax.tree.map(lambda x: np.concatenate([x, x]), BATCH)
    other.init(PARAMS, larger, None)
    with pytest.raises(
        ValueError, match=r"was saved in flight with batches of .*, those of this pipeline are of"
    ):
        checkpoints.restore(other.session, tmp_path)


def test_a_migration_that_was_under_way_in_a_stream_is_forgotten_by_a_state_at_rest(
    tmp_path: Path,
) -> None:
    pipe, state = begun(schedule="pipedream")
    checkpoints.snapshot(pipe.session, state, {}).write(tmp_path)
    for now, _ in pipe.run(state, [BATCH]):
        state = now
    state = pipe.migrate(state, THERE, at=(1, 1))
    for _ in pipe.run(state, [BATCH]):
        pass
    assert pipe.session.compiled.previous is not None
    checkpoints.restore(pipe.session, tmp_path)
    assert (pipe.session.compiled.previous, pipe.plan.cuts) == (None, THERE.cuts)


def test_a_snapshot_is_written_later_as_it_was(tmp_path: Path) -> None:
    pipe, state = begun()
    state, _ = pipe.step(state, BATCH)
    copied, params = checkpoints.snapshot(pipe.session, state, {"a": 1}), pipe.params(state)
    for _ in range(2):
        state, _ = pipe.step(state, BATCH)
    copied.write(tmp_path)
    other = pipeline(THERE)
    restored = checkpoints.restore(other.session, tmp_path)
    assert restored.step == 1
    jax.tree.map(np.testing.assert_array_equal, other.params(restored), params)
