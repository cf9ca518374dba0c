"""Migrations wait for their moment, one per step, and are forgotten with their run."""

import jax
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.schedules import PipeDream
from tests.grid import grid
from tests.session.tiny import BATCH, HERE, MICRO, PARAMS, THERE, begun, loss_fn


def test_a_moment_that_is_over_or_none_is_refused_with_those_to_come() -> None:
    pipe, state = begun()
    state, _ = pipe.step(state, BATCH)
    for at in ((0, 0), (1, MICRO), (1, -1)):
        with pytest.raises(
            ValueError,
            match="is not a moment of a future step: the next step is 1, and micro-batches are 0 to 1",
        ):
            pipe.session.migrations.request(state, THERE, at, "")
    assert not pipe.session.migrations.queue


def test_one_waits_for_the_step_after_that_of_the_one_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipe, state = begun()
    migrations = pipe.session.migrations
    migrations.request(state, THERE, (2, 1), "first")
    migrations.request(state, HERE, (1, 1), "second")
    assert [(it.change.step, it.change.microbatch, it.change.how) for it in migrations.queue] == [
        (2, 1, "inside"),
        (3, 0, "between"),
    ]
    assert "the next one waits for step 3" in caplog.text
    assert [it.old.plan.cuts for it in migrations.queue] == [HERE.cuts, THERE.cuts], (
        "each starts from the one before"
    )
    assert migrations.run_due(state, pipe.drain) is state, "neither is due"


def test_one_inside_a_step_leaves_the_queue_for_that_step_alone() -> None:
    pipe, state = begun()
    migrations = pipe.session.migrations
    migrations.request(state, THERE, (2, 1), "")
    assert migrations.pop_due_inside(1) is None
    migration = migrations.pop_due_inside(2)
    assert migration is not None
    assert migration.change.how == "inside"
    assert not migrations.queue


def test_one_that_is_due_between_steps_is_made_and_told() -> None:
    pipe, state = begun()
    after = pipe.session.migrations
    after.request(state, THERE, None, "for a test")
    state = after.run_due(state, pipe.drain)
    (change,) = after.history
    assert (change.how, change.why, change.layers) == ("between", "for a test", ((1, 0, 1),))
    assert str(change) == (
        f"step 0, micro-batch 0: for a test; cuts [2, 1] to [1, 2], {change.moved_bytes:,} bytes "
        "moved between; layers 1 from 0 to 1"
    )
    assert pipe.plan.cuts == THERE.cuts
    assert isinstance(pipe.step(state, BATCH)[0], jvpipe.State)


def test_a_run_forgets_what_was_to_come_and_what_has_been(caplog: pytest.LogCaptureFixture) -> None:
    pipe, state = begun()
    migrations = pipe.session.migrations
    state = pipe.migrate(state, THERE)
    pipe.migrate(state, HERE, at=(4, 0))
    migrations.begin_run()
    assert (list(migrations.queue), migrations.history) == ([], [])
    assert "they belonged to the run before" in caplog.text


def test_a_loss_that_the_last_stage_before_a_move_makes_last_is_told_from_where_it_is() -> None:
    """All forwards of gpipe come first: those through the stages before end after those that the
    new one has alone.
    """
    losses = []
    for moves in (False, True):
        pipe, state = begun(schedule="gpipe", devices=jax.devices()[:3])
        if moves:
            state = pipe.migrate(state, jvpipe.Plan.from_cuts([3], devices=[2]), at=(0, 1))
        losses.append(float(pipe.step(state, BATCH)[1]["loss"]))
    assert losses[0] == losses[1]


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", grid(["pipedream", "2bw"], "pipedream"))
def test_two_moves_soon_after_each_other_in_a_stream_that_has_not_begun(schedule: str) -> None:
    """Versions lie for a while where their layer was between the two; asked for before anything is
    in flight.
    """
    places = [(2, 3), (4, 5)]
    results = []
    for moves in ([], [(0, 1), (1, 0)], [(0, 3), (1, 2)]):
        pipe = jvpipe.Pipeline(loss_fn, optax.sgd(0.5), HERE, 4, schedule)
        state = pipe.init(PARAMS, BATCH, None)
        for at, devices in zip(moves, places[: len(moves)], strict=True):
            state = pipe.migrate(state, jvpipe.Plan.from_cuts([2, 1], devices=devices), at=at)
        told = []
        for after, metrics in pipe.run(state, [BATCH] * 4):
            state = after
            told.append(float(metrics["loss"]))
        assert [change.how for change in pipe.session.history] == ["inside"] * len(moves)
        results.append((told, jax.tree.map(np.asarray, pipe.params(pipe.drain(state)))))
    for told, params in results[1:]:
        assert told == results[0][0]
        jax.tree.map(np.testing.assert_array_equal, params, results[0][1])


def test_a_second_move_may_be_asked_for_before_a_stream_begins() -> None:
    pipe = jvpipe.Pipeline(
        loss_fn, optax.sgd(0.5), jvpipe.Plan.from_cuts([3]), 4, PipeDream(update_every=2)
    )
    state = pipe.init(PARAMS, BATCH, None)
    for at, devices in (((0, 3), (0, 1)), ((1, 2), (3, 1))):
        state = pipe.migrate(state, jvpipe.Plan.from_cuts([1, 2], devices=devices), at=at)
    assert [migration.change.microbatch for migration in pipe.session.migrations.queue] == [3, 2]
