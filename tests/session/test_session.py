"""The session looks up what a step runs, and begins anew with each run."""

from pathlib import Path
from typing import Any

import pytest

import jvpipe
from jvpipe.schedules import PipeMare
from tests.session.tiny import BATCH, HERE, PARAMS, THERE, begun, loss_fn, pipeline


def test_a_state_of_another_pipeline_is_told_from_what_is_no_state() -> None:
    (pipe, _), (_, foreign) = begun(), begun()
    with pytest.raises(ValueError, match="this state belongs to another pipeline or model"):
        pipe.session.advance(foreign, BATCH)
    with pytest.raises(ValueError, match="not of type dict"):
        pipe.session.advance({}, BATCH)  # pyright: ignore[reportArgumentType] - that is the mistake


@pytest.mark.parametrize(
    "ask", [lambda s: s.compiled, lambda s: s.trees, lambda s: s.graph, lambda s: s.advance(0, 0)]
)
def test_without_a_model_there_is_nothing_to_see(ask: Any) -> None:
    with pytest.raises(ValueError, match="no model yet: call init or restore first"):
        ask(pipeline().session)


def test_nothing_is_measured_unless_it_is_switched_on() -> None:
    pipe, state = begun()
    with pytest.raises(ValueError, match=r"call pipe\.session\.monitor\(\) before the step"):
        pipe.session.measured()
    pipe.session.monitor()
    pipe.step(state, BATCH)
    assert {span.kind for span in pipe.session.measured().spans} >= {"F", "B", "U"}
    pipe.session.monitor(on=False)
    assert pipe.session.controller.monitor is None


def test_the_past_is_computed_with_the_plan_of_its_time() -> None:
    pipe, state = begun(schedule="pipedream")
    for plan in (HERE, THERE, jvpipe.Plan.from_cuts([3])):
        if plan is not HERE:
            state = pipe.migrate(state, plan)
        state, _ = pipe.step(state, BATCH)
    plans = [pipe.session.compiled_in_the_past(BATCH, m, m).plan for m in range(6)]
    assert [plan.cuts for plan in plans] == [HERE.cuts] * 2 + [THERE.cuts] * 2 + [(3,)] * 2


def test_a_warm_up_runs_synchronous_steps_first() -> None:
    schedule = PipeMare(warmup_updates=2)
    pipe, _ = begun(schedule=schedule)
    names = [pipe.session.compiled_at(BATCH, updates).schedule.name for updates in range(4)]
    assert names == ["1f1b", "1f1b", "pipemare", "pipemare"]


def test_histories_begin_anew_with_each_run(tmp_path: Path) -> None:
    pipe, state = begun()
    session = pipe.session
    pipe.save(tmp_path / "saved", state)
    state = pipe.migrate(state, THERE)
    before = session.history
    assert len(before) == 1
    state = pipe.restore(tmp_path / "saved")
    assert (session.history, pipe.plan.cuts) == ([], THERE.cuts), "under the plan that it has"
    assert len(before) == 1, "what the caller keeps stays"
    pipe.update_model(state, loss_fn, PARAMS[:2])
    assert len(session.model_history) == 1
    pipe.init(PARAMS, BATCH, None)
    assert session.model_history == []


def test_a_plan_that_was_not_planned_has_no_planners_reasons(tmp_path: Path) -> None:
    pipe, state = begun(2)
    pipe.save(tmp_path / "saved", state)
    assert "goes to stage 1 because" in pipe.explain()
    pipe.migrate(state, THERE)
    assert "because" not in pipe.explain()
    pipe.restore(tmp_path / "saved")
    assert "because" not in pipe.explain(), (
        "though the history begins anew, the plan is the one that was asked for"
    )
