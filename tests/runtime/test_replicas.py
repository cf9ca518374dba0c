"""Replicated stages at run time: what they hold and save, how they move, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.ir.kinds import Kind
from jvpipe.schedules import PipeDream, TwoBW
from jvpipe.simulate.simulator import simulate
from tests.session.tiny import BATCH, PARAMS, begun, loss_fn, pipeline

TWO_ONE, ONE_TWO = (jvpipe.Plan.from_cuts([2, 1], devices=d) for d in ([(0, 1), 2], [0, (1, 2)]))
DEVICES: dict[str, Any] = {"devices": jax.devices()[:4]}


STATEFUL = DEVICES | {"optimizer": optax.adam(0.1)}


def close(found: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


def test_pinned_replicas_are_dealt_out_stage_by_stage() -> None:
    pipe, state = begun(2, replicas=(2, 1), **DEVICES)
    assert [stage.devices for stage in pipe.plan.stages] == [(0, 1), (2,)]
    first, second = jax.devices()[:2]
    assert f"stage 0 on {first}, {second}: layers 0 to 1" in pipe.explain()
    plain, alone = begun(2)
    close(pipe.evaluate(state, BATCH)["loss"], plain.evaluate(alone, BATCH)["loss"])
    state, metrics = pipe.step(state, BATCH)
    alone, wanted = plain.step(alone, BATCH)
    close((pipe.params(state), metrics), (plain.params(alone), wanted))
    assert begun(2, replicas=(1, 1))[0].plan.replicas == (1, 1)


def test_replicas_have_the_same_parameters_after_a_step_and_share_the_optimizers_state_out() -> (
    None
):
    pipe, state = begun(jvpipe.Plan.from_cuts([2, 1], devices=[(0, 1), (2, 3)]), **STATEFUL)
    state, _ = pipe.step(state, BATCH)
    copies: dict[Any, list[np.ndarray]] = {}
    for buffer, array in zip(pipe.session.compiled.persistent, state.arrays, strict=True):
        assert array.devices() == {pipe.session.settings.devices[buffer.place]}
        copies.setdefault(buffer.value, []).append(np.asarray(array))
    assert {value.kind: len(found) for value, found in copies.items()} == {
        "parameter": 2,
        "optimizer": 1,
    }
    for first, *others in copies.values():
        for other in others:
            np.testing.assert_array_equal(first, other)
    state_bytes = [
        sum(
            b.bytes
            for b in pipe.session.compiled.persistent
            if b.value.kind == "optimizer" and b.place == d
        )
        for d in range(4)
    ]
    assert state_bytes == [36, 36, 36, 0], (
        "two moments of four numbers, and a count, for each of three layers"
    )


def test_the_ledger_the_lists_and_the_simulator_count_the_same_bytes() -> None:
    pipe, state = begun(TWO_ONE, **STATEFUL)
    pipe.step(state, BATCH)
    compiled = pipe.session.compiled
    assert list(pipe.ledger.peak) == [peak.bytes for peak in compiled.peaks]
    timeline = simulate(
        compiled.lowered, lambda row: 1.0, temporary_bytes=compiled.step.temporary_bytes
    )
    assert list(timeline.peak_bytes)[:3] == list(pipe.ledger.peak)[:3]


def test_no_program_holds_a_collective() -> None:
    pipe, _ = begun(TWO_ONE, **DEVICES)
    compiled = pipe.session.compiled
    programs: dict[Any, Any] = {one.row.kind: one.run for one in compiled.step.instructions}
    told = [run.as_text() for run in programs.values() if hasattr(run, "as_text")]
    assert len(told) >= 7
    assert not [
        text
        for text in told
        if "all-reduce" in text or "collective" in text or "all-gather" in text
    ]


def test_a_checkpoint_knows_no_replicas(tmp_path: Path) -> None:
    pipe, state = begun(TWO_ONE, **STATEFUL)
    state, _ = pipe.step(state, BATCH)
    pipe.save(tmp_path / "there", state)
    expected = pipe.params(pipe.step(state, BATCH)[0])
    for plan in (ONE_TWO, TWO_ONE, jvpipe.Plan.from_cuts([3])):
        other, _ = begun(plan, **STATEFUL)
        restored = other.restore(tmp_path / "there")
        close(other.params(other.step(restored, BATCH)[0]), expected)


def test_layers_move_between_stages_of_other_widths() -> None:
    plain, alone = begun(optimizer=optax.adam(0.1))
    pipe, state = begun(**STATEFUL)
    plans = [
        TWO_ONE,
        ONE_TWO,
        jvpipe.Plan.from_cuts([1, 2], devices=[(2, 3), (0, 1)]),
        jvpipe.Plan.from_cuts([3]),
    ]
    for plan in plans:
        state, metrics = pipe.step(state, BATCH)
        alone, wanted = plain.step(alone, BATCH)
        close(metrics, wanted)
        state = pipe.migrate(state, plan)
        assert pipe.plan.replicas == plan.replicas
        close(pipe.params(state), plain.params(alone))
        held = sum(x.nbytes for x in state.arrays)
        assert sum(pipe.ledger.live) == held, "what was left behind is gone"
    assert len(pipe.session.history) == 4
    with pytest.raises(ValueError, match=r"only between two steps, write at=\(5, 0\)"):
        pipe.migrate(state, TWO_ONE, at=(4, 1))


@pytest.mark.thorough
def test_a_loss_of_one_example_may_be_mapped_over_all() -> None:
    def one(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(w.T @ x[:, None])[:, 0]
        return jnp.mean(x**2)

    def mapped(params: Any, batch: Any, rng: Any) -> jax.Array:
        return jnp.mean(jax.vmap(lambda x: one(params, x))(batch["x"]))

    batch = {"x": np.linspace(0, 1, 24, dtype=np.float32).reshape(12, 2)}
    outs = []
    for plan in (
        jvpipe.Plan.from_cuts([1, 2], devices=[(0, 1), (2, 3, 4)]),
        jvpipe.Plan.from_cuts([3]),
    ):
        pipe = jvpipe.Pipeline(mapped, optax.sgd(0.5), plan, 2, devices=jax.devices()[:5])
        state, metrics = pipe.step(pipe.init(PARAMS, batch, None), batch)
        outs.append((pipe.params(state), metrics))
    close(*outs)


TURNS: dict[Any, Any] = {(2, 1): (PipeDream(update_every=2), 2), (2, 3): (TwoBW(), 6)}


@pytest.mark.parametrize("widths", TURNS)
def test_without_a_flush_whole_micro_batches_take_turns(widths: tuple[int, ...]) -> None:
    schedule, every = TURNS[widths]
    places = [tuple(range(widths[0])), tuple(range(widths[0], sum(widths)))]
    plan, batch = jvpipe.Plan.from_cuts([2, 1], devices=places), {"x": np.tile(BATCH["x"], (3, 1))}
    pipe = jvpipe.Pipeline(loss_fn, optax.adam(0.1), plan, 6, schedule, devices=jax.devices()[:5])
    state = pipe.init(PARAMS, batch, None)
    for found in pipe.run(state, [batch] * 4):
        state = found[0]
    compiled = pipe.session.compiled
    rows = [row for row in compiled.stream.steps[-1].lowered.rows if row.kind is Kind.B]
    assert {(row.stage, row.place - places[row.stage][0]) for row in rows} == {
        (s, q) for s, width in enumerate(widths) for q in range(width)
    }
    for row in rows:
        assert row.place == places[row.stage][row.microbatch % widths[row.stage]]
    versions = {
        use.microbatch: use.version
        for use in pipe.ledger.versions.uses()
        if (use.kind, use.layer) == (Kind.F, 0)
    }
    if schedule.rule == "newest":  # four are in flight there
        assert versions == {m: max(0, m + 1 - 4) // every for m in versions}
    else:
        assert versions == {m: max(0, m // every - 1) for m in versions}
    assert list(pipe.ledger.peak) == [peak.bytes for peak in compiled.peaks]
    again, _ = jvpipe.replay(pipe.ledger, pipe, PARAMS, [batch] * 4, None)
    np.testing.assert_array_equal(np.stack(jax.tree.leaves(pipe.params(state))), np.stack(again))
    plain = jvpipe.Pipeline(
        loss_fn, optax.adam(0.1), jvpipe.Plan.from_cuts([2, 1]), 6, devices=jax.devices()[:5]
    )
    close(
        pipe.evaluate(state, batch)["loss"],
        plain.evaluate(plain.init(pipe.params(state), batch, None), batch)["loss"],
    )
    state = pipe.migrate(state, jvpipe.Plan.from_cuts([1, 2], devices=[4, 0]))
    assert sum(pipe.ledger.live) == sum(x.nbytes for x in state.arrays)
    for found in pipe.run(state, [batch]):
        state = found[0]


def test_another_model_has_the_replicas_of_the_one_before() -> None:
    def longer(params: Any, batch: Any, rng: Any) -> jax.Array:
        return loss_fn([*params["before"], params["new"]], batch, rng)

    def short(params: Any, batch: Any, rng: Any) -> jax.Array:
        return loss_fn(params["before"], batch, rng)

    outs = []
    for stages in (TWO_ONE, jvpipe.Plan.from_cuts([2, 1])):
        pipe = jvpipe.Pipeline(short, optax.adam(0.1), stages, 2, planner="even", **DEVICES)
        state = pipe.init({"before": PARAMS}, BATCH, None)
        state, _ = pipe.step(state, BATCH)
        state = pipe.update_model(
            state, longer, {"before": PARAMS, "new": np.eye(2, dtype=np.float32)}
        )
        assert pipe.plan.replicas == stages.replicas
        state, metrics = pipe.step(state, BATCH)
        state = pipe.update_model(state, short, {"before": PARAMS})
        assert sum(pipe.ledger.live[:-1]) == sum(x.nbytes for x in state.arrays)
        outs.append((pipe.params(state), metrics, pipe.params(pipe.step(state, BATCH)[0])))
    close(*outs)


def normed(params: Any, state: Any, batch: Any, rng: Any) -> tuple[jax.Array, Any]:
    x = batch["x"] @ params[0]
    mean, variance = jnp.mean(x, 0), jnp.var(x, 0)
    out = jnp.tanh((x - mean[None]) * jax.lax.rsqrt(variance + 0.1)[None] @ params[1]) @ params[2]
    return jnp.mean(out**2), {
        "mean": 0.5 * state["mean"] + 0.5 * mean,
        "var": 0.5 * state["var"] + 0.5 * variance,
    }


STATISTICS = {"mean": np.zeros(2, np.float32), "var": np.ones(2, np.float32)}


def test_batch_norm_has_statistics_of_each_replica_and_their_means_are_kept() -> None:
    options: dict[str, Any] = {"has_state": True, "planner": "even", **DEVICES}
    plan = jvpipe.Plan.from_cuts([3], devices=[(0, 1)])
    pipe = jvpipe.Pipeline(normed, optax.sgd(0.0), plan, 1, **options)
    state = pipe.init(PARAMS, BATCH, None, STATISTICS)
    state, metrics = pipe.step(state, BATCH)
    x = BATCH["x"] @ PARAMS[0]
    parts = x[:2], x[2:]
    found = pipe.model_state(state)
    np.testing.assert_allclose(found["mean"], 0.5 * x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(
        found["var"], 0.5 + 0.5 * np.mean([part.var(0) for part in parts], 0), rtol=1e-5
    )
    outs = [
        np.tanh((part - part.mean(0)) / np.sqrt(part.var(0) + 0.1) @ PARAMS[1]) @ PARAMS[2]
        for part in parts
    ]
    np.testing.assert_allclose(metrics["loss"], np.mean(np.concatenate(outs) ** 2), rtol=1e-5)
    states = [
        np.asarray(a)
        for b, a in zip(pipe.session.compiled.persistent, state.arrays, strict=True)
        if b.value.kind == "state"
    ]
    assert len(states) == 4
    np.testing.assert_array_equal(states[0], states[1])
    np.testing.assert_array_equal(states[2], states[3])


def test_statistics_are_carried_from_micro_batch_to_micro_batch() -> None:
    plan, batch = (
        jvpipe.Plan.from_cuts([3], devices=[(0, 1)]),
        {"x": np.arange(16, dtype=np.float32).reshape(8, 2) / 8},
    )
    pipe = jvpipe.Pipeline(normed, optax.sgd(0.0), plan, 2, has_state=True, **DEVICES)
    state = pipe.init(PARAMS, batch, None, STATISTICS)
    expected = np.zeros(2, np.float32)
    for _ in range(2):
        state, _ = pipe.step(state, batch)
        for first in (0, 4):
            expected = 0.5 * expected + 0.5 * (batch["x"][first : first + 4] @ PARAMS[0]).mean(0)
        np.testing.assert_allclose(pipe.model_state(state)["mean"], expected, rtol=1e-5)


def test_what_replicas_cannot_do_is_refused_with_the_cure() -> None:
    def refused(match: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            begun(**{"stages": 2, **DEVICES, **options})

    refused("stage 0 has 3 replicas, and a micro-batch 2 examples", replicas=(3, 1))
    refused("is for 3 stages, there are 2", replicas=(2, 1, 1))
    refused("need 6 devices, there are 4", replicas=(3, 3))
    refused("must be the devices of each stage", replicas=3)
    refused("each of replicas must be a whole number", replicas=(2, 0))
    refused("is named twice", replicas=(2, 1), devices=[jax.devices()[i] for i in (0, 1, 0)])
    refused("whose stages have", stages=TWO_ONE, replicas=(1, 2))
    refused(
        "device 1 is named for stage 0 and for stage 1",
        stages=jvpipe.Plan.from_cuts([2, 1], devices=[(0, 1), 1]),
    )
    for schedule in ("pipemare", "auto"):
        refused("cannot run under", replicas=(2, 1), schedule=schedule, planner="jvpipe")
    refused(
        "an update every 1 micro-batches needs equally many of each replica",
        stages=TWO_ONE,
        schedule="pipedream",
    )
    refused(
        "2bw on stages of .2, 1. devices needs at least 4 micro-batches",
        stages=TWO_ONE,
        schedule="2bw",
    )
    coupled = lambda p, b, _: jnp.mean((b["x"] @ p[0] - jnp.mean(b["x"] @ p[0], 0)[None]) @ p[1])  # noqa: E731
    other = jvpipe.Pipeline(coupled, optax.sgd(0.1), TWO_ONE, 2, **DEVICES)
    with pytest.raises(
        ValueError, match=r"layer .* cannot be replicated: .* gives single examples"
    ):
        other.init(PARAMS, BATCH, None)


def test_a_limit_counts_every_replica() -> None:
    pipe, _ = begun(2, replicas=(2, 1), **DEVICES)
    most = max(peak.bytes for peak in pipe.session.compiled.peaks)
    begun(2, replicas=(2, 1), memory_limit=most, **DEVICES)
    with pytest.raises(jvpipe.MemoryLimitExceeded) as caught:
        pipeline(2, replicas=(2, 1), memory_limit=most - 1, **DEVICES).init(PARAMS, BATCH, None)
    begun(2, replicas=(2, 1), memory_limit=caught.value.smallest_limit_bytes, **DEVICES)


def test_the_last_micro_batch_may_keep_all() -> None:
    close(*[_params_after(replace(plan), checkpoint="except_last") for plan in (TWO_ONE, ONE_TWO)])


def _params_after(plan: jvpipe.Plan, **options: Any) -> Any:
    pipe, state = begun(plan, **DEVICES, **options)
    return pipe.params(pipe.step(state, BATCH)[0])


def test_deferred_batch_norm_remembers_the_mean_of_whole_batches() -> None:
    def loss(params: Any, state: Any, batch: Any, rng: Any) -> tuple[jax.Array, Any]:
        x, state = jvpipe.deferred_batch_norm(
            batch["x"] @ params[0], state, microbatches=2, momentum=0.5
        )
        return jnp.mean(jnp.tanh(x @ params[1]) ** 2), state

    batch = {"x": np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)}
    options: dict[str, Any] = {"replicas": (2, 1), "has_state": True, **DEVICES}
    pipe = jvpipe.Pipeline(
        loss, optax.sgd(0.1), 2, 2, model_state_reduce={"*items": "same"}, **options
    )
    state = pipe.init(PARAMS, batch, None, jvpipe.BatchStatistics.of(2))
    state, _ = pipe.step(state, batch)
    found = pipe.model_state(state)
    np.testing.assert_allclose(found.mean, 0.5 * (batch["x"] @ PARAMS[0]).mean(0), rtol=1e-4)
    assert (found.items, found.seen) == (0, 0)
    with pytest.raises(
        ValueError, match=r"model state 'items' .* model_state_reduce={'items': 'mean'}"
    ):
        jvpipe.Pipeline(loss, optax.sgd(0.1), 2, 2, **options).init(
            PARAMS, batch, None, jvpipe.BatchStatistics.of(2)
        )


def test_a_plan_counts_the_gradients_that_a_third_replica_adds_up() -> None:
    # The third replica updates the third layer, whose gradient is large. Beside its own it holds
    # those of the first and of the second replica, and their sum.
    shapes = [(128, 4), (4, 4), (4, 2048)]
    params = [jax.random.normal(jax.random.key(0), shape) for shape in shapes]
    batch = np.ones((12, 128), np.float32)

    def wide_loss(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
        for i, w in enumerate(params):
            with jax.named_scope(f"layer{i}"):
                batch = jnp.tanh(batch @ w)
        return jnp.mean(batch**2)

    plan = jvpipe.Plan.from_cuts([3], devices=[(0, 1, 2)])
    pipe = jvpipe.Pipeline(wide_loss, optax.sgd(0.1), plan, 1, devices=jax.devices()[:3])
    pipe.step(pipe.init(params, batch, jax.random.key(0)), batch)
    planned = jvpipe.plan_for(
        wide_loss,
        params,
        batch,
        1,
        optimizer=optax.sgd(0.1),
        replicas=(3,),
        microbatches=1,
        hardware="a100-80gb",
    )
    assert (
        5 * params[2].nbytes <= pipe.ledger.peak[2] <= planned.to_json()["stages"][0]["peak_bytes"]
    )
