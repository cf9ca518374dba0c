"""Another model takes over: what both have stays, and a refusal changes nothing."""

import jax
import numpy as np
import pytest

from jvpipe.session.session import switch_model
from tests.session.tiny import BATCH, PARAMS, begun, loss_fn


def test_the_present_model_stays_if_the_other_cannot_be() -> None:
    pipe, state = begun()
    present = pipe.session.compiled_plans
    with pytest.raises(ValueError, match="give it another path"):
        switch_model(
            pipe.session,
            state,
            loss_fn,
            [np.eye(2, 3, dtype=np.float32), np.ones((3, 2), np.float32)],
            None,
        )
    assert pipe.session.compiled_plans is present
    assert isinstance(pipe.step(state, BATCH)[1]["loss"], jax.Array)


def test_states_migrations_and_versions_are_of_the_new_model_from_then_on() -> None:
    pipe, state = begun(schedule="pipedream")
    for now, _ in pipe.run(state, [BATCH]):
        state = now
    assert state.stream_steps
    after = switch_model(pipe.session, state, loss_fn, PARAMS[:2], None)
    assert after.stream_steps == 0, "drained first"
    assert list(pipe.ledger.versions.uses()) == []
    with pytest.raises(ValueError, match="another pipeline or model"):
        pipe.session.check_state(state)
    assert len(pipe.params(after)) == 2
    (change,) = pipe.session.model_history
    assert (change.kept, change.parked) == (("0", "1"), ("2",))
