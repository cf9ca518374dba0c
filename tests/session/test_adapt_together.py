"""Processes adapt together: here one of one, which tells itself; `tests/hosts` has several."""

from typing import Any

import pytest

import jvpipe
from jvpipe.cost.hardware import INFINITE
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.session.adapt import ADAPTING, Adapter
from tests.runtime.test_hosts import Store
from tests.runtime.test_migrate import assert_same, started
from tests.session.test_adapt import HOME, Devices, devices, trained  # noqa: F401 - a fixture
from tests.zoo import CASES


def adapting(**options: Any) -> tuple[jvpipe.Pipeline, jvpipe.State]:
    pipe, state = started(CASES["mlp"](), HOME, **options)
    session = pipe.session
    hosts = Hosts(0, 1, Store(), link=INFINITE)
    session.adapter = Adapter(
        session.compiled_plans, session.migrations.queue, session.limits, hosts
    )
    pipe.adapt()
    return pipe, state


def test_what_was_seen_is_told_then_proposed_then_made_in_three_rounds(devices: Devices) -> None:  # noqa: F811
    m = CASES["mlp"]()
    expected = trained(m, *started(m, HOME), devices, steps=24)
    pipe, state = adapting()
    assert_same(trained(m, pipe, state, devices, range(5, 11), steps=24), expected)
    history = pipe.session.history
    assert [(c.step, c.old.cuts, c.new.cuts) for c in history] == [(16, (3, 2), (4, 1))]
    assert history[0].step % ADAPTING.round_steps == 0
    assert history[0].why == "stage 1 takes 2.5 times what was planned"


def test_what_does_not_fit_is_said_once_and_left(
    devices: Devices,  # noqa: F811 - the fixture's
    caplog: pytest.LogCaptureFixture,
) -> None:
    m = CASES["mlp"]()
    pipe, _ = started(m, HOME)
    pipe, state = adapting(memory_limit=max(peak.bytes for peak in pipe.session.compiled.peaks))
    trained(m, pipe, state, devices, range(5, 30), steps=30)
    assert pipe.session.history == []
    said = [record.getMessage() for record in caplog.records if "cannot be" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(
        "stage 1 takes 2.5 times what was planned, but cuts [4, 1] cannot be used: "
    )


def test_a_proposal_for_a_plan_that_another_has_replaced_meanwhile_is_dropped(
    devices: Devices,  # noqa: F811 - the fixture's
) -> None:
    m = CASES["mlp"]()
    pipe, state = adapting()
    state = pipe.migrate(state, jvpipe.Plan.from_cuts([2, 3]), at=(10, 1))
    trained(m, pipe, state, devices, range(5, 10), steps=18)
    assert [(c.step, c.new.cuts) for c in pipe.session.history] == [(10, (2, 3))]
