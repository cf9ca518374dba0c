"""An evaluation computes the loss, of the state's parameters or of others, and leaves everything as
it was.
"""

import jax
import numpy as np
import pytest

from jvpipe.runtime.engine.tensors import Limits, MemoryLimitExceeded
from jvpipe.session.evaluation import evaluate
from tests.session.tiny import BATCH, PARAMS, begun, loss_fn


def test_other_parameters_give_their_own_loss_and_the_state_keeps_its() -> None:
    pipe, state = begun()
    others = [-2 * w for w in PARAMS]
    live = list(pipe.session.ledger.live)
    for params, given in ((PARAMS, ()), (others, others), (PARAMS, ())):
        loss = evaluate(pipe.session, state, BATCH, given)["loss"]
        np.testing.assert_allclose(loss, loss_fn(params, BATCH, None), rtol=1e-6)
        assert pipe.session.ledger.live == live
    jax.tree.map(np.testing.assert_array_equal, pipe.params(state), PARAMS)


def test_parameters_beside_the_states_count_against_the_limit() -> None:
    pipe, state = begun()
    alone = max(peak.bytes for peak in pipe.session.compiled.evaluation_peaks)
    pipe.session.limits = Limits(alone)
    evaluate(pipe.session, state, BATCH)
    live = list(pipe.session.ledger.live)
    with pytest.raises(MemoryLimitExceeded, match="given parameters 32") as refused:
        evaluate(pipe.session, state, BATCH, PARAMS)
    assert pipe.session.ledger.live == live
    pipe.session.limits = Limits(refused.value.smallest_limit_bytes)
    evaluate(pipe.session, state, BATCH, PARAMS)


def test_what_was_measured_of_a_step_is_told_after_an_evaluation_too() -> None:
    pipe, state = begun()
    pipe.session.monitor()
    state, _ = pipe.step(state, BATCH)
    measured = pipe.session.measured()
    evaluate(pipe.session, state, BATCH)
    assert pipe.session.measured() == measured
    assert any(span.kind == "B" for span in measured.spans)
