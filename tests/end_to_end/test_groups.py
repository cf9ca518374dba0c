"""Layers in groups compute the bits of layers apart, whatever the cuts, the fates and the moves."""

import random
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from threading import Event, current_thread
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.ir.kinds import KINDS, Runs
from jvpipe.programs.store import ProgramStore
from jvpipe.session.session import Grouping
from tests import sharded
from tests.bits import MICRO, batches_of, digest
from tests.end_to_end import test_replicas as replicated
from tests.end_to_end.test_fates import drawn, trained
from tests.grid import grid
from tests.zoo import CASES, Case, in_bfloat16

NAMES = (
    "mlp",
    "pre-norm",
    "resnet",
    "unet",
    "three-readers",
    "chained-keys",
    "normalized-products",
)


def layer_programs(pipe: jvpipe.Pipeline) -> float:
    """The programs of layers that a micro-batch takes."""
    rows = pipe.session.compiled.lowered.rows
    return sum(KINDS[row.kind].runs is Runs.LAYER for row in rows) / MICRO


def random_cuts(layers: int, stages: int, seed: int) -> tuple[int, ...]:
    """Cuts of so many stages, or of as many as there are layers."""
    ends = sorted(random.Random(seed).sample(range(1, layers), min(stages, layers) - 1))
    return tuple(b - a for a, b in zip([0, *ends], [*ends, layers], strict=True))


@pytest.mark.usefixtures("copies_never_late")
@pytest.mark.parametrize(
    ("name", "stages", "schedule", "seed"),
    grid(
        [
            (name, stages, schedule, seed)
            for name in (*NAMES, "resnet in bfloat16", "pre-norm in bfloat16")
            for seed, (stages, schedule) in enumerate(
                [(1, "gpipe"), (2, "1f1b"), (2, "zb-h1"), (3, "1f1b"), (3, "zb-h1"), (2, "gpipe")]
                * 4
            )
        ],
        ("three-readers", 2, "zb-h1", 2),
    ),
)
def test_groups_keep_every_bit(name: str, stages: int, schedule: str, seed: int) -> None:
    """The ledger agrees with the buffer table, and nothing is left, which `trained` looks at."""
    case, _, bfloat16 = name.partition(" in ")
    m = in_bfloat16(CASES[case]()) if bfloat16 else CASES[case]()
    whole, losses, one = trained(m, 1, "gpipe", group=False)
    graph = one.session.graph
    plan = drawn(graph, random_cuts(len(graph.layers), stages, seed), seed)
    ours, ours_losses, pipe = trained(m, plan, schedule, group=True)
    assert pipe.session.compiled.grouped
    assert ours_losses == losses
    for a, b in zip(ours, whole, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_group_is_one_program_per_direction() -> None:
    m = CASES["mlp"]()
    _, _, apart = trained(m, 2, "1f1b", group=False)
    _, _, pipe = trained(m, 2, "1f1b", group=True)
    assert (layer_programs(pipe), layer_programs(apart)) == (4, 10)


def moved(
    m: Case, schedule: str, at: tuple[int, int], *, group: bool
) -> tuple[list[str], jvpipe.Pipeline]:
    """Digests of a run that moves layers, before and after it; groups are there by the last
    step.
    """
    pipe = jvpipe.Pipeline(
        m.loss_fn,
        optax.adamw(1e-2),
        2,
        MICRO,
        schedule,
        planner="even",
        devices=jax.devices()[:3],
        has_aux=m.has_aux,
        has_state=m.has_state,
        group=group,
    )
    batches = batches_of(m, 6)
    state, found = pipe.init(m.params, batches[0], m.rng, m.state), []
    for step, batch in enumerate(batches):
        if step == 1:
            layers = len(pipe.session.graph.layers)
            there = drawn(pipe.session.graph, random_cuts(layers, 3, 0), 0)
            state = pipe.migrate(state, there, at=at)
        if step > 2:  # a stream that has forgotten where it came from is compiled once more
            pipe.session.grouping.wait()
        stream = pipe.run(state, [batch])
        ((state, metrics),) = stream
        found.append(digest(metrics["loss"]))
    return [*found, digest(pipe.params(state))], pipe


@pytest.mark.parametrize("compile_s", [0.0, 1e6])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_groups_come_once_the_steps_have_taken_as_long_as_compiling_did(
    schedule: str, compile_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = CASES["mlp"]()
    monkeypatch.setattr(ProgramStore, "compile_s", lambda self, programs: compile_s)
    runs = []
    for group in (None, False):
        pipe = jvpipe.Pipeline(
            m.loss_fn, optax.adamw(1e-2), 2, MICRO, schedule, planner="even", group=group
        )
        batches = batches_of(m, 5)
        state, found, in_groups = pipe.init(m.params, batches[0], m.rng, m.state), [], []
        for state, metrics in pipe.run(state, batches):  # noqa: B007, B020 - as users write it
            found.append(digest(metrics["loss"]))
            in_groups.append(pipe.session.compiled.grouped)
            pipe.session.grouping.wait()
        runs.append([*found, digest(pipe.params(state))])
        expected = [step > 1 and group is None and not compile_s for step in range(5)]
        assert in_groups == expected
    assert runs[0] == runs[1]


def test_what_evaluates_in_groups_is_compiled_beside_the_training_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    m, threads, plain = CASES["mlp"](), set[str](), ProgramStore._compiled_for

    def compiled(self: ProgramStore, *args: Any, **options: Any) -> Any:
        threads.add(current_thread().name)
        return plain(self, *args, **options)

    monkeypatch.setattr(ProgramStore, "_compiled_for", compiled)
    monkeypatch.setattr(ProgramStore, "compile_s", lambda self, programs: 0.0)
    pipe = jvpipe.Pipeline(m.loss_fn, optax.adamw(1e-2), 2, MICRO, planner="even")
    batch = batches_of(m)[0]
    state = pipe.init(m.params, batch, m.rng)
    pipe.evaluate(state, batch)
    while not pipe.session.compiled.grouped:
        state, _ = pipe.step(state, batch)
        pipe.session.grouping.wait()
    threads.clear()
    pipe.evaluate(state, batch)
    assert not threads


def test_a_stream_that_is_restored_in_flight_has_its_layers_apart(tmp_path: Path) -> None:
    """Beside what the plan before has left in flight, groups would not keep the limit."""
    m, plans = CASES["mlp"](), [jvpipe.Plan.from_cuts(cuts) for cuts in ([1, 4], [4, 1])]
    batches, found = batches_of(m, 9), []

    def run(limits: Sequence[int] | None, *, takes_over: bool) -> list[list[int]]:
        pipe = jvpipe.Pipeline(
            m.loss_fn,
            optax.sgd(1e-2),
            plans[0],
            MICRO,
            "pipedream",
            memory_limit=limits,
            group=False,
            devices=jax.devices()[:2],
        )
        state, losses = pipe.init(m.params, batches[0], m.rng), []
        held = [pipe.session.compiled.peaks]
        state = pipe.migrate(state, plans[1], at=(2, 1))
        for step, batch in enumerate(batches):
            ((state, _),) = pipe.run(state, [batch])
            if step == 2:
                pipe.save(tmp_path, state)
                held.append(pipe.session.compiled.peaks)
        compiled_plans = pipe.session.compiled_plans
        assert compiled_plans.current.previous is None
        in_groups = compiled_plans.in_groups(compiled_plans.current)
        if takes_over:
            assert in_groups.grouped
            compiled_plans.adopt(in_groups)
        for state, metrics in pipe.run(pipe.restore(tmp_path), batches[3:]):  # noqa: B007 - as users write it
            losses.append(digest(metrics["loss"]))
        found.append([*losses, digest(pipe.params(pipe.drain(state)))])
        return [[peak.bytes for peak in peaks[:-1]] for peaks in (*held, in_groups.peaks)]

    limits = list(map(max, zip(*run(None, takes_over=False), strict=True)))
    run(limits, takes_over=True)
    assert found[0] == found[1]


def test_a_move_does_not_wait_for_groups_that_are_being_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.11 locks a `cached_property` for all objects of a class while it is made for one."""
    begun, plain = Event(), ProgramStore.compile

    def compiled(self: ProgramStore, programs: Any) -> Any:
        if current_thread().name.startswith("jvpipe-groups"):
            begun.set()
            moved.wait(20)
        return plain(self, programs)

    moved, m = Event(), CASES["mlp"]()
    monkeypatch.setattr(ProgramStore, "compile_s", lambda self, programs: 0.0)
    monkeypatch.setattr(ProgramStore, "compile", compiled)
    pipe = jvpipe.Pipeline(m.loss_fn, optax.adamw(1e-2), 2, MICRO, planner="even")
    batch = batches_of(m)[0]
    state = pipe.init(m.params, batch, m.rng)
    for _ in range(2):
        state, _ = pipe.step(state, batch)
    assert begun.wait(20)
    since = time.monotonic()
    state = pipe.migrate(state, jvpipe.Plan.from_cuts([1, 4]))
    pipe.step(state, batch)
    took_s = time.monotonic() - since
    moved.set()
    pipe.session.grouping.wait()
    assert took_s < 15


@pytest.mark.parametrize(
    ("name", "schedule", "at"),
    grid(
        [
            (name, schedule, at)
            for name in NAMES
            for schedule in ("1f1b", "pipedream")
            for at in ((2, 0), (2, 1))
        ][::3],
        ("mlp", "pipedream", (2, 1)),
    ),
    ids=str,
)
def test_layers_that_move_run_alone_until_their_groups_are_compiled(
    name: str, schedule: str, at: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    m, asked = CASES[name](), []
    plain = Grouping.pass_step

    def pass_step(self: Grouping, compiled_plans: Any) -> None:
        plain(self, compiled_plans)
        asked.append(compiled_plans.current.grouped)

    monkeypatch.setattr(Grouping, "pass_step", pass_step)
    ours, pipe = moved(m, schedule, at, group=True)
    assert (asked[0], False in asked, asked[-1]) == (True, True, True)
    assert len(pipe.session.history) == 1
    assert ours == moved(m, schedule, at, group=False)[0]


def test_layers_stay_apart_where_groups_would_not_keep_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    m = CASES["mlp"]()
    apart, pipe = (trained(m, 2, "1f1b", group=group)[2] for group in (False, True))
    held, more = (max(peak.bytes for peak in p.session.compiled.peaks[:-1]) for p in (apart, pipe))
    assert held < more, "what a group makes within itself lies beside what it takes"
    _, _, tight = trained(m, apart.plan, "1f1b", group=True, memory_limit=held)
    assert not tight.session.compiled.grouped
    assert "layers stay apart, for in groups" in caplog.text


def test_a_measured_group_is_told_layer_by_layer() -> None:
    m = CASES["mlp"]()
    _, _, pipe = trained(m, 2, "1f1b", group=True)
    state = pipe.init(m.params, batches_of(m)[0], m.rng, m.state)
    pipe.session.monitor()
    state, _ = pipe.step(state, batches_of(m)[0])
    spans = [s for s in pipe.session.measured().spans if s.name == "0F0"]
    assert [s.args["layer"] for s in spans] == [0, 1, 2]
    assert all(a.end_s == b.start_s for a, b in pairwise(spans))
    assert min(pipe.session.measured().layer_s(5)) > 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "widths", "schedule"),
    [
        (name, widths, schedule)
        for schedule in ("1f1b", "gpipe")
        for name in replicated.CASES
        for widths in replicated.WIDTHS
    ],
    ids=str,
)
def test_replicas_compute_the_same_in_groups(
    name: str, widths: tuple[int, ...], schedule: str
) -> None:
    plan = replicated.plan_of(replicated.names_of(name)[0], widths)
    apart, grouped = (
        replicated.trained(name, plan, schedule, group=group) for group in (False, True)
    )
    assert layer_programs(grouped[2]) < layer_programs(apart[2])
    assert digest(grouped[:2]) == digest(apart[:2])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2,), {}),
        ((2, 2), {"checkpoint": "except_last"}),
        ((2,), {"fates": {"*": "swap"}}),
        ((2,), {"replicas": (2, 1)}),
    ],
    ids=str,
)
def test_meshes_compute_the_same_in_groups(sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    """How arrays lie between the programs of layers, they lie at the edges of a group."""
    found = []
    for group in (False, True):
        pipe = jvpipe.Pipeline(
            sharded.loss_fn,
            optax.adamw(1e-2),
            2,
            sharded.MICRO,
            planner="even",
            devices=sharded.meshes(*sizes),
            sharding=sharded.FULLY if len(sizes) > 1 else sharded.TENSOR_PARALLEL,
            group=group,
            **options,
        )
        state = pipe.init(sharded.parameters(), sharded.ROWS, jax.random.key(3))
        for _ in range(2):
            state, _ = pipe.step(state, sharded.ROWS)
        assert pipe.session.compiled.grouped == group
        found.append((digest(pipe.params(state)), dict(pipe.ledger.live_bytes)))
    assert found[0] == found[1]
