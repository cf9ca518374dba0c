"""A pipeline whose devices become slow: what is measured is made up, all else is real."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.cost import measure
from jvpipe.ir.buffers import HOST
from jvpipe.ir.plan import Plan
from jvpipe.planners.replanning import Rule, Seen
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.monitor import Measured
from jvpipe.session import adapt
from jvpipe.session.trigger import Judge, Told
from tests.end_to_end.test_exactness import batch_of
from tests.grid import grid
from tests.runtime.test_migrate import MICRO, assert_same, pipeline, started
from tests.session.tiny import begun
from tests.zoo import CASES, Case

HOME = jvpipe.Plan.from_cuts([3, 2])
SLOW = {0: 1.0, 1: 2.5}


class Devices:
    """How slow each is; every layer takes a second on a device as it should be."""

    slowness = dict.fromkeys(range(4), 1.0)

    def seen(self, measured: Measured, compiled: CompiledPlan) -> Seen:
        layer_s = [
            self.slowness[stage.devices[0]] for stage in compiled.plan.stages for _ in stage.layers
        ]
        assert all(s > 0 for s in measured.layer_s(len(layer_s))), "every layer's tasks were seen"
        return Seen(layer_s, [0.0] * len(compiled.plan.stages))


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    found = Devices()
    monkeypatch.setattr(adapt, "seen", found.seen)
    return found


def trained(
    m: Case,
    pipe: jvpipe.Pipeline,
    state: jvpipe.State,
    devices: Devices,
    slow: Sequence[int] = (),
    steps: int = 16,
) -> tuple[list[float], list[Any]]:
    """Losses and final parameters; in the steps `slow` devices are so."""
    losses = []
    batches = (batch_of(m, MICRO) for _ in range(steps))
    for step, (after, metrics) in enumerate(pipe.run(state, batches)):
        state = after
        losses.append(float(metrics["loss"]))
        pipe.session.adapter.wait()  # so that what the thread finds does not depend on who is faster
        devices.slowness = SLOW if step + 1 in slow else dict.fromkeys(SLOW, 1.0)
    state = pipe.drain(state)
    return losses, jax.tree.leaves(pipe.params(state))


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_layers_leave_a_slow_device_and_come_back_and_no_bit_changes(
    schedule: str, devices: Devices
) -> None:
    m = CASES["mlp"]()
    expected = trained(m, *started(m, HOME, schedule), devices)
    pipe, state = started(m, HOME, schedule)
    pipe.adapt()
    found = trained(m, pipe, state, devices, range(5, 11))
    assert_same(found, expected)
    history = pipe.session.history
    assert [(c.step, c.old.cuts, c.new.cuts) for c in history] == [
        (7, (3, 2), (4, 1)),
        (13, (4, 1), (3, 2)),
    ]
    assert [c.why for c in pipe.session.history] == [
        "stage 1 takes 2.5 times what was planned",
        "every stage takes what was planned again",
    ]
    assert pipe.plan == HOME.with_schedule(schedule)
    assert all(c.moved_bytes > 0 for c in pipe.session.history)


@pytest.mark.thorough
def test_layers_leave_slow_replicas_and_no_bit_changes(devices: Devices) -> None:
    m, home = CASES["mlp"](), jvpipe.Plan.from_cuts([3, 2], devices=[(0, 2), (1, 3)])
    expected = trained(m, *started(m, home), devices, steps=10)
    pipe, state = started(m, home)
    pipe.adapt()
    assert_same(trained(m, pipe, state, devices, range(5, 11), steps=10), expected)
    assert [(c.step, c.new.cuts, c.new.replicas) for c in pipe.session.history] == [
        (7, (4, 1), (2, 2))
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_what_was_made_ready_is_used_as_it_is(
    schedule: str, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the stream has gone on by a step since it was asked for."""

    def prepared(*args: Any) -> Any:
        raise AssertionError("lowered again while the pipeline waits")

    monkeypatch.setattr("jvpipe.session.adapt.prepare_migration", prepared)
    m = CASES["mlp"]()
    pipe, state = started(m, HOME, schedule)
    pipe.adapt()
    offer = pipe.session.adapter.offer
    monkeypatch.setattr(
        pipe.session.adapter, "offer", lambda step: None if step % 2 else offer(step)
    )
    trained(m, pipe, state, devices, range(5, 11))
    assert [(c.step, c.new.cuts) for c in pipe.session.history] == [(8, (4, 1)), (14, (3, 2))]
    assert {c.how for c in pipe.session.history} == {"between" if schedule == "1f1b" else "inside"}


def test_what_does_not_fit_is_said_and_left(
    devices: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    m = CASES["mlp"]()
    pipe, state = started(m, HOME)
    smallest = max(peak.bytes for peak in pipe.session.compiled.peaks)
    pipe, state = started(m, HOME, memory_limit=smallest)
    pipe.adapt()
    trained(m, pipe, state, devices, range(5, 16))
    assert pipe.session.history == []
    said = [record.getMessage() for record in caplog.records if "cannot be" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(
        "stage 1 takes 2.5 times what was planned, but cuts [4, 1] cannot be used: "
    )
    assert f"the limit is {smallest:,}" in said[0]


@pytest.mark.parametrize("schedule", grid(["1f1b", "zb-h1", "2bw"], "1f1b"))
def test_the_planner_is_asked_for_fates_where_other_cuts_alone_do_not_fit(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_seconds", lambda *_: [1e-3, 1e-3])
    m, slowness = CASES["mlp"](), {0: 1.0, 1: 1.0}
    batch = {name: np.repeat(x, 16, axis=0) for name, x in batch_of(m, MICRO).items()}

    def seen(_: Measured, compiled: CompiledPlan) -> Seen:
        layer_s = pipes[-1].session.compiled_plans.layer_s
        assert layer_s is not None
        slow = [slowness[stage.devices[0]] for stage in compiled.plan.stages for _ in stage.layers]
        return Seen([s * f for s, f in zip(layer_s, slow, strict=True)], [0.0, 0.0])

    monkeypatch.setattr(adapt, "seen", seen)
    found, most, pipes = [], None, list[jvpipe.Pipeline]()
    for _ in range(2):  # without a limit, then under what the plan holds
        pipe = jvpipe.Pipeline(m.loss_fn, optax.sgd(1e-2), 2, MICRO, schedule, memory_limit=most)
        state, losses = pipe.init(m.params, batch, None), []
        pipes.append(pipe)
        if most is not None:
            pipe.adapt()
        most = max(peak.bytes for peak in pipe.session.compiled.peaks[:HOST])
        for step in range(12):
            slowness[1] = 3.0 if step > 2 else 1.0
            state, metrics = pipe.step(state, batch)
            losses.append(float(metrics["loss"]))
            pipe.session.adapter.wait()
        found.append((losses, jax.tree.leaves(pipe.params(state))))
    assert_same(*found)
    (_, pipe) = pipes
    assert max(pipe.ledger.peak[:HOST]) <= pipe.session.settings.limits[0]
    (change,) = pipe.session.history
    assert change.new.cuts[0] > change.old.cuts[0]
    assert change.new.stages[0].fates
    assert not change.old.stages[0].fates


def test_off_is_off_and_what_the_user_moves_stays(devices: Devices) -> None:
    m = CASES["mlp"]()
    pipe, state = started(m, HOME)
    pipe.adapt()
    pipe.adapt(on=False)
    trained(m, pipe, state, devices, range(5, 16))
    assert pipe.session.history == []
    pipe, state = started(m, HOME)
    pipe.adapt()
    user = jvpipe.Plan.from_cuts([2, 3])
    state = pipe.migrate(state, user, at=(2, 1))
    trained(m, pipe, state, devices, range(8, 12), steps=18)
    assert [c.new.cuts for c in pipe.session.history] == [(2, 3), (4, 1), (2, 3)]


def test_real_seconds_are_read_beside_a_run() -> None:
    """Nothing is made up here, so it is not known what moves; the run goes on and its values are
    right.
    """
    m = CASES["mlp"]()
    pipe = pipeline(m, HOME)
    state = pipe.init(m.params, batch_of(m, MICRO), None)
    pipe.adapt()
    plain, start = started(m, HOME)
    for _ in range(8):
        state, metrics = pipe.step(state, batch_of(m, MICRO))
        start, expected = plain.step(start, batch_of(m, MICRO))
        np.testing.assert_array_equal(metrics["loss"], expected["loss"])
    pipe.session.adapter.wait()


def test_a_step_that_cannot_be_judged_does_not_come_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe, _ = begun(2)
    session = pipe.session
    judge = Judge(Rule(), session.compiled_plans, session.limits)
    judge.plans |= dict.fromkeys((1, 2), pipe.plan)
    judged = []

    def fails(plan: Plan, seconds: Seen, compiled: CompiledPlan) -> None:
        judged.append(plan)
        raise RuntimeError("a plan could not be counted")

    monkeypatch.setattr(judge, "_judge", fails)
    for step in (1, 2):
        judge.decide([Told({step: Seen([1.0] * 3, [0.0] * 2)}, None, "", "")], session.compiled)
    assert len(judged) == 2
    assert not judge.plans
