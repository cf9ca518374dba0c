"""A given plan is taken as it is, and refused where it does not fit."""

import pytest

import jvpipe
from jvpipe.session.model_planner import compile_plan
from tests.session.tiny import BATCH, HERE, PARAMS, THERE, begun, pipeline


def test_a_given_plan_is_compiled_with_the_users_fates_and_nothing_is_planned() -> None:
    pipe, _ = begun(HERE, fates={"*": "recompute"})
    assert pipe.session.planned is None
    assert pipe.plan.cuts == HERE.cuts
    assert {fate for stage in pipe.plan.stages for fate in stage.fates.values()} == {"recompute"}


def test_a_planned_plan_comes_with_what_it_was_decided_on() -> None:
    pipe, _ = begun(2)
    assert pipe.session.planned is not None
    assert pipe.session.planned.plan.cuts == pipe.plan.cuts
    assert pipe.session.planned.layer_s is None, "an even cut asks for no seconds"


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="4 stages need as many layers, the model has 3: use at most 3 stages"):
        pipeline(4, devices=None).init(PARAMS, BATCH, None)


def test_a_plan_for_other_layers_is_refused() -> None:
    session = begun()[0].session
    compiled = session.compiled
    wrong = jvpipe.Plan.from_cuts([2, 1], splits=[1])
    for plan, told in (
        (wrong, "splits layers before equations"),
        (jvpipe.Plan.from_cuts([2, 2]), "they must be 0 to 2"),
    ):
        with pytest.raises(ValueError, match=told):
            compile_plan(session.settings, session.store, compiled.traced, plan, compiled.optimizer)
    plan = THERE.with_schedule("1f1b")
    assert compile_plan(session.settings, session.store, compiled.traced, plan, compiled.optimizer).plan == plan
