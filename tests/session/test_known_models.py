"""A model that was met is known again by its loss, that very object, and its shapes."""

from typing import Any

import numpy as np
import pytest

import jvpipe
from jvpipe.session import compiled_plans
from tests.session.tiny import PARAMS, begun, loss_fn


@pytest.fixture(scope="module")
def pipe() -> jvpipe.Pipeline:
    return begun(2)[0]


def test_the_same_loss_and_shapes_are_the_same_model(pipe: jvpipe.Pipeline) -> None:
    session = pipe.session
    known, present = session.known_models, session.compiled_plans
    assert known.compiled_for(present, loss_fn, PARAMS, None) is present
    shorter = known.compiled_for(present, loss_fn, PARAMS[:2], None)
    assert len(shorter.current.traced.graph.layers) < len(session.graph.layers)
    assert known.compiled_for(present, loss_fn, [2 * w for w in PARAMS[:2]], None) is shorter, (
        "values do not matter"
    )
    assert (
        known.compiled_for(present, lambda *args: loss_fn(*args), PARAMS[:2], None) is not shorter
    )


def test_those_that_were_asked_for_longest_ago_are_forgotten(
    pipe: jvpipe.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_plans, "REMEMBERED", 1)
    session = pipe.session
    known, present = compiled_plans.KnownModels(session.store), session.compiled_plans
    shorter = known.compiled_for(present, loss_fn, PARAMS[:2], None)
    assert known.compiled_for(present, loss_fn, PARAMS[:2], None) is shorter
    known.compiled_for(present, loss_fn, [*PARAMS, PARAMS[0]], None)
    assert known.compiled_for(present, loss_fn, PARAMS[:2], None) is not shorter


def test_a_parameter_that_is_looked_for_in_vain_is_named_by_its_path(pipe: jvpipe.Pipeline) -> None:
    def reads(params: Any, batch: Any, rng: Any) -> Any:
        return (batch["x"] @ params["block"]["kernel"] @ params["block"]["bias"]).mean()

    session = pipe.session
    given = {"block": {"kernel": np.eye(2, dtype=np.float32)}}
    with pytest.raises(ValueError, match="reads parameter 'block/bias', which params lack"):
        session.known_models.compiled_for(session.compiled_plans, reads, given, None)
