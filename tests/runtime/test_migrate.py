"""Layers move while training runs: no value changes, every byte is counted, what fails leaves the
state whole.
"""

import base64
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.ir.buffers import HOST
from jvpipe.runtime.engine.binding import Bound, Instruction
from jvpipe.runtime.engine.failures import StageError
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.runtime.engine.tensors import Limits, MemoryLimitExceeded
from jvpipe.runtime.state.migrate import Migration, moved_between_steps, prepare_migration
from tests.end_to_end.test_exactness import batch_of, key_of
from tests.end_to_end.test_fates import drawn
from tests.end_to_end.test_ledger import held
from tests.grid import grid
from tests.runtime.test_hosts import Store
from tests.zoo import CASES, Case

MICRO, STEPS = 4, 4
MOVING = ("MOVE", "B", "OUT", "FREE", "DROP", "IN", "U")
Moment = tuple[tuple[int, int], jvpipe.Plan]


def pipeline(m: Case, stages: Any, schedule: str = "1f1b", **options: Any) -> jvpipe.Pipeline:
    return jvpipe.Pipeline(
        m.loss_fn,
        optax.adamw(1e-2),
        stages,
        MICRO,
        schedule,
        planner="even",
        devices=jax.devices()[:4],
        has_aux=m.has_aux,
        has_state=m.has_state,
        **options,
    )


def started(
    m: Case, stages: Any, schedule: str = "1f1b", **options: Any
) -> tuple[jvpipe.Pipeline, jvpipe.State]:
    pipe = pipeline(m, stages, schedule, **options)
    return pipe, pipe.init(m.params, batch_of(m, MICRO), key_of(m), m.state)


def trained(
    m: Case,
    pipe: jvpipe.Pipeline,
    state: jvpipe.State,
    moves: Sequence[Moment] = (),
    steps: int = STEPS,
) -> tuple[list[float], list[Any]]:
    """Losses and final parameters; the moves are asked for at the start."""
    for at, plan in moves:
        state = pipe.migrate(state, plan, at=at)
    losses = []
    for _ in range(steps):
        state, metrics = pipe.step(state, batch_of(m, MICRO))
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        owned = sum(x.nbytes for x in state.arrays)
        assert sum(pipe.ledger.live) == owned, "something leaked"
        assert pipe.ledger.live[HOST] == 0
    return losses, jax.tree.leaves((pipe.params(state), pipe.model_state(state)))


def assert_same(ours: tuple[list[float], list[Any]], theirs: tuple[list[float], list[Any]]) -> None:
    assert ours[0] == theirs[0]
    for a, b in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_array_equal(a, b)


def random_plan(pipe: jvpipe.Pipeline, draw: random.Random) -> jvpipe.Plan:
    """1 to 4 stages, any cuts, any devices, any fates."""
    layers = len(pipe.session.graph.layers)
    stages = draw.randint(1, min(4, layers))
    bounds = [0, *sorted(draw.sample(range(1, layers), stages - 1)), layers]
    plan = drawn(pipe.session.graph, tuple(b - a for a, b in pairwise(bounds)), draw.randrange(100))
    devices = draw.sample(range(4), stages)
    placed = (replace(stage, devices=(d,)) for stage, d in zip(plan.stages, devices, strict=True))
    return replace(plan, stages=tuple(placed))


@pytest.mark.parametrize(
    ("name", "schedule"),
    grid(
        [
            *(
                (name, "1f1b")
                for name in ("one-hot", "resnet", "with-aux", "three-readers", "chained-keys")
            ),
            *((name, "gpipe") for name in ("resnet", "three-readers")),
        ],
        ("one-hot", "1f1b"),
    ),
)
def test_moves_at_any_moment_change_no_bit(name: str, schedule: str) -> None:
    m, draw = CASES[name](), random.Random(f"{name} {schedule}")
    pipe, state = started(m, 1)
    expected = trained(m, pipe, state)
    pipe, state = started(m, random_plan(pipe, draw), schedule)
    moves = [((step, draw.randrange(MICRO)), random_plan(pipe, draw)) for step in range(STEPS)]
    assert_same(trained(m, pipe, state, moves), expected)
    assert [(c.step, c.new.cuts) for c in pipe.session.history] == [
        (at[0], plan.cuts) for at, plan in moves
    ]
    assert any(c.how == "inside" for c in pipe.session.history)


@pytest.mark.usefixtures("copies_never_late")
def test_the_last_loss_may_be_that_of_a_micro_batch_of_the_plan_before() -> None:
    """All forwards of one stage come before the last forward of three, where the loss is
    elsewhere.
    """
    m = CASES["with-aux"]()
    pipe, state = started(m, 1)
    layers = len(pipe.session.graph.layers)
    expected = trained(m, pipe, state, steps=2)
    pipe, state = started(m, jvpipe.Plan.from_cuts([1, layers - 2, 1]), "gpipe")
    there = jvpipe.Plan.from_cuts([layers], devices=[3])
    assert_same(trained(m, pipe, state, [((0, 2), there)], steps=2), expected)
    assert pipe.session.history[0].how == "inside"


def test_a_move_is_counted_to_the_byte() -> None:
    """At every task of a step with a move inside, what the ledger counts is what JAX holds."""
    m = CASES["resnet"]()
    start, state = started(m, jvpipe.Plan.from_cuts([2, 5]))
    del state
    key = key_of(m)
    there = jax.live_arrays()  # held, so that no later array has the id of one of them
    baseline = {id(array) for array in there}
    pipe = pipeline(m, jvpipe.Plan.from_cuts([2, 5]))
    state = pipe.init(m.params, batch_of(m, MICRO), key, m.state)
    state = pipe.migrate(state, drawn(start.session.graph, (4, 3), seed=3), at=(0, 2))
    (migration,) = pipe.session.migrations.queue
    live, found = pipe.ledger.live, []

    def watching(it: Instruction) -> Instruction:
        def run(*args: Any) -> Any:
            expected = list(live)
            expected[it.target] -= it.born_bytes
            found.append((it.row, expected, held(baseline, pipe.session.compiled.devices)))
            return it.run(*args)

        return it if it.feed else it._replace(run=run)

    bound = migration.bound
    watched = Bound(bound.lowered, tuple(map(watching, bound.instructions)))
    pipe.session.migrations.queue[0] = replace(migration, bound=watched)
    state, metrics = pipe.step(state, batch_of(m, MICRO))
    del metrics
    assert {"MOVE", "FREE", "OUT", "IN"} <= {row.kind for row, *_ in found}
    for row, counted, real in found:
        assert counted == real, f"before {row}"
    assert pipe.session.history[0].moved_bytes == sum(
        bound.lowered.buffers[b].bytes
        for row in bound.lowered.rows
        if row.kind == "MOVE"
        for b in row.writes
    )
    idle = [compiled.placing.peaks({}) for compiled in (migration.old, pipe.session.compiled)]
    most = zip(pipe.session.compiled.peaks_of(bound), *idle, strict=True)
    assert pipe.ledger.peak == [max(peak.bytes for peak in place) for place in most]


def test_layers_that_are_known_are_not_compiled_again() -> None:
    m = CASES["mlp"]()
    a, b = jvpipe.Plan.from_cuts([1, 4]), jvpipe.Plan.from_cuts([3, 2])
    pipe, state = started(m, a)
    trained(m, pipe, state, [((0, 2), b), ((1, 1), a), ((2, 0), b), ((3, 0), a)])
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    pipe, state = started(m, a)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        trained(m, pipe, state, [((0, 3), b), ((1, 2), a), ((2, 0), b), ((3, 0), a)])
        assert compiled == []
        jax.jit(lambda x: x + 12345).lower(1.0).compile()
        assert compiled, "the listener hears nothing"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_where_both_copies_do_not_fit_a_move_takes_another_way_or_is_refused() -> None:
    m = CASES["unused"]()
    plan, other = jvpipe.Plan.from_cuts([2, 2]), jvpipe.Plan.from_cuts([2, 2], devices=[1, 0])
    pipe, state = started(m, plan)
    expected = trained(m, pipe, state)
    smallest = max(peak.bytes for peak in pipe.session.compiled.peaks)
    ways = {}
    for limit in range(smallest, 2 * smallest, smallest // 10):
        pipe, state = started(m, plan, memory_limit=limit)
        assert_same(trained(m, pipe, state, [((1, 2), other)]), expected)
        assert max(pipe.ledger.peak[:HOST]) <= limit
        ways.setdefault(pipe.session.history[0].how, limit)
    assert list(ways) == ["by host", "between", "inside"]
    pipe, state = started(m, plan, memory_limit=smallest)
    with pytest.raises(MemoryLimitExceeded, match="the limit is"):
        pipe.migrate(state, jvpipe.Plan.from_cuts([1, 3]))
    pipe, state = started(m, plan, memory_limit=smallest, host_memory_limit=100)
    with pytest.raises(MemoryLimitExceeded, match="the host would hold"):
        pipe.migrate(state, other)
    assert_same(trained(m, pipe, state), expected)  # nothing has happened


def broken(migration: Migration, at: int) -> Migration:
    """A migration of which one row fails."""

    def fails(*args: Any) -> Any:
        raise RuntimeError("no link")

    rows = list(migration.bound.instructions)
    rows[at] = rows[at]._replace(run=fails)
    return replace(migration, bound=Bound(migration.bound.lowered, tuple(rows)))


def moments(migration: Migration) -> list[int]:
    """The rows at which a migration may fail: the first and the last of each kind that it has to do
    with.
    """
    rows = [it.row for it in migration.bound.instructions]
    found = {kind: [i for i, row in enumerate(rows) if row.kind == kind] for kind in MOVING}
    return sorted({i for kind in found.values() for i in (*kind[:1], *kind[-1:])})


@pytest.mark.usefixtures("copies_never_late")
@pytest.mark.parametrize("how", ["inside", "between", "by host"])
def test_wherever_a_move_fails_the_run_goes_on(how: str, tmp_path: Any) -> None:
    """From the state as it was; that of the error, if values had left; from the checkpoint, if the
    update had begun.
    """
    m, here = CASES["unused"](), jvpipe.Plan.from_cuts([2, 2])
    there = jvpipe.Plan.from_cuts([2, 2], devices=[1, 0])
    pipe, state = started(m, here)
    pipe.save(tmp_path / "state", state)
    expected = trained(m, pipe, state, steps=1)

    def asked(pipe: jvpipe.Pipeline, state: jvpipe.State) -> Migration:
        if how == "inside":
            pipe.migrate(state, there, at=(0, 2))
            return pipe.session.migrations.queue.pop()
        old, new = pipe.session.compiled, pipe.session.compiled_plans.with_plan(there)
        limit = None if how == "between" else max(peak.bytes for peak in (*old.peaks, *new.peaks))
        return prepare_migration(old, new, (0, 0), how, Limits(limit))

    ways = set()
    for at in moments(asked(pipe, pipe.restore(tmp_path / "state"))):
        state = pipe.restore(tmp_path / "state")
        migration = broken(asked(pipe, state), at)
        assert migration.change.how == how
        pipe.session.migrations.queue.append(migration)
        with pytest.raises(StageError, match="no link") as error:
            pipe.step(state, batch_of(m, MICRO))
        assert (pipe.plan.cuts, pipe.session.history, len(pipe.session.migrations.queue)) == (
            (2, 2),
            [],
            0,
        )
        assert pipe.plan.stages[0].devices == (0,)
        if any(x.is_deleted() for x in state.arrays):
            with pytest.raises(
                ValueError, match="if that step failed, go on from the last checkpoint"
            ):
                pipe.step(state, batch_of(m, MICRO))
            way = "checkpoint" if error.value.state is None else "error"
            state = error.value.state or pipe.restore(tmp_path / "state")
        else:
            way = "state"
            assert error.value.state in (None, state)
        assert_same(trained(m, pipe, state, steps=1), expected)
        ways.add(way)
    assert (
        ways
        == {
            "inside": {"state", "checkpoint"},
            "between": {"state", "error"},
            "by host": {"state", "error"},
        }[how]
    )


class Answering(Store):
    """Another process, which says what this one says, but that it fails at the copies as long as it
    `fails`.
    """

    fails = True

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        told = super().blocking_key_value_get(f"{key[:-1]}0", timeout_ms)
        count, name, _ = told.split("\t")
        if self.fails and name == "copies of layers that move":
            failure = base64.b85encode(b"0\tRuntimeError: no link").decode()
            return f"{count}\tfailure\t{failure}"
        return told


def test_a_copy_that_fails_in_another_process_leaves_this_one_whole_too() -> None:
    m, there = CASES["unused"](), jvpipe.Plan.from_cuts([2, 2], devices=[1, 0])
    pipe, state = started(m, jvpipe.Plan.from_cuts([2, 2]))
    session, store = pipe.session, Answering()
    new = replace(session.compiled_plans.with_plan(there), hosts=Hosts(0, 2, store))
    migration = prepare_migration(session.compiled, new, (0, 0), "", Limits())
    live = list(pipe.ledger.live)
    with pytest.raises(StageError, match="process 1 says: RuntimeError: no link"):
        moved_between_steps(migration, state, session.controller)
    assert not any(x.is_deleted() for x in state.arrays)
    assert pipe.ledger.live == live
    store.fails = False
    arrays = moved_between_steps(migration, state, session.controller)
    assert all(x.is_deleted() for x in state.arrays)
    assert sum(pipe.ledger.live) == sum(x.nbytes for x in arrays)
    assert [x.devices() for x in arrays] == [
        {new.devices[buffer.place]} for buffer in new.persistent
    ]


def test_a_plan_or_moment_that_cannot_be_is_refused() -> None:
    m = CASES["mlp"]()
    pipe, state = started(m, jvpipe.Plan.from_cuts([2, 3]))
    with pytest.raises(ValueError, match=r"the plan lacks layers \[4\]"):
        pipe.migrate(state, jvpipe.Plan.from_cuts([2, 2]))
    with pytest.raises(
        ValueError, match=r"is on device 7, but the devices here are 0 to 3: .* name more in"
    ):
        pipe.migrate(state, jvpipe.Plan.from_cuts([2, 3], devices=[0, 7]))
    with pytest.raises(ValueError, match="not a moment of a future step"):
        pipe.migrate(state, jvpipe.Plan.from_cuts([3, 2]), at=(0, MICRO))
    state, _ = pipe.step(state, batch_of(m, MICRO))
    with pytest.raises(ValueError, match="the next step is 1"):
        pipe.migrate(state, jvpipe.Plan.from_cuts([3, 2]), at=(0, 1))


def test_a_move_that_comes_while_another_waits_is_queued_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    m = CASES["mlp"]()
    pipe, state = started(m, jvpipe.Plan.from_cuts([2, 3]))
    state = pipe.migrate(state, jvpipe.Plan.from_cuts([3, 2]), at=(1, 2))
    state = pipe.migrate(state, jvpipe.Plan.from_cuts([4, 1]))
    assert "the next one waits for step 2" in caplog.text
    trained(m, pipe, state)
    assert [(c.step, c.microbatch, c.new.cuts) for c in pipe.session.history] == [
        (1, 2, (3, 2)),
        (2, 0, (4, 1)),
    ]


def test_another_run_finds_no_move_that_waits(caplog: pytest.LogCaptureFixture) -> None:
    m = CASES["mlp"]()
    pipe, state = started(m, jvpipe.Plan.from_cuts([2, 3]))
    expected = trained(m, pipe, pipe.migrate(state, jvpipe.Plan.from_cuts([3, 2]), at=(STEPS, 0)))
    state = pipe.init(m.params, batch_of(m, MICRO), key_of(m), m.state)
    assert "they belonged to the run before" in caplog.text
    assert_same(trained(m, pipe, state, steps=STEPS), expected)
    pipe.step(pipe.init(m.params, batch_of(m, MICRO), key_of(m), m.state), batch_of(m, MICRO))
    assert (pipe.session.history, pipe.plan.cuts) == ([], (2, 3))


def test_any_cut_restores_what_another_saved_and_moves_on(tmp_path: Any) -> None:
    m = CASES["resnet"]()
    pipe, state = started(m, jvpipe.Plan.from_cuts([2, 5]))
    expected = trained(m, *started(m, jvpipe.Plan.from_cuts([2, 5])))
    state = pipe.migrate(state, jvpipe.Plan.from_cuts([1, 3, 3]), at=(0, 3))
    for _ in range(2):
        state, _ = pipe.step(state, batch_of(m, MICRO))
    pipe.save(tmp_path / "state", state)
    other = pipeline(m, jvpipe.Plan.from_cuts([4, 3]))
    losses, params = trained(
        m, other, other.restore(tmp_path / "state"), [((2, 1), pipe.plan)], steps=2
    )
    assert losses == expected[0][2:]
    assert_same(([], params), ([], expected[1]))
