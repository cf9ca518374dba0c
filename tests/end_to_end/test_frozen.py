"""Frozen parameters cost nothing, and change no bit of what is trained.

Legend: D width, R rank. The base is frozen, small products of matrices beside it are trained
(LoRA).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.ir.values import ValueKind
from jvpipe.schedules import PipeDream
from tests.grid import grid

LAYERS, D, R, MICRO, STEPS = 5, 16, 2, 4, 3
VERSIONS = ("parameter", "predicted", "corrected", "delta", "applied")
MASK = {"base": True, "lora": False, "head": False}
MASKED = optax.chain(optax.adamw(1e-2), optax.masked(optax.set_to_zero(), MASK))
LABELS = {"base": "frozen", "lora": "trained", "head": "trained"}


def params(dtype: Any = np.float32) -> dict[str, Any]:
    draw = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float32)

    base = [{"w": drawn(D, D) / 4, "b": drawn(D) / 9} for _ in range(LAYERS)]
    if dtype != np.float32:
        base = [{"w": jnp.asarray(np.round(7 * x["w"]).clip(-7, 7), dtype)} for x in base]
    lora = [{"a": drawn(D, R), "b": drawn(R, D) / 9} for _ in range(LAYERS)]
    return {"base": base, "lora": lora, "head": drawn(D)}


def batch() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(2 * MICRO, D)).astype(np.float32)


def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
    """The first two layers are of the base alone: nothing is trained before the third."""
    x, ranks = batch, np.arange(D, dtype=np.float32)
    for i, (base, lora) in enumerate(zip(params["base"], params["lora"], strict=True)):
        w = base["w"].astype(np.float32)
        shift = jnp.broadcast_to(base["b"], x.shape) if "b" in base else jnp.zeros_like(x)
        beside = x @ lora["a"] @ lora["b"] if i >= 2 else jnp.zeros_like(x)
        x = x + jnp.tanh(x @ w + shift + beside)
    x = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    scale = jnp.broadcast_to(params["head"] * ranks, x.shape)
    return jnp.mean(x**2 * scale)


def tuned(trained: Any = None, **options: Any) -> optax.GradientTransformation:
    rules: dict[Any, Any] = {"frozen": optax.set_to_zero(), "trained": trained or optax.adamw(1e-2)}
    return optax.multi_transform(rules, options.get("labels", LABELS))


@contextmanager
def nothing_frozen() -> Iterator[None]:
    """Inside it frozen parameters are trained as all others are: gradients, sums, and updates of
    zeros.
    """
    patched = "jvpipe.programs.stacked_trace.without_frozen"
    with mock.patch(patched, lambda traced, *_: traced):
        yield


def pipeline(optimizer: Any, loss: Any = loss_fn, **options: Any) -> jvpipe.Pipeline:
    options = {"stages": 2, "microbatches": MICRO, "planner": "even"} | options
    return jvpipe.Pipeline(loss, optimizer, **options)


def trained(pipe: jvpipe.Pipeline, given: Any = None) -> tuple[list[float], Any]:
    """The losses of some steps, and the parameters after them."""
    given, losses = params() if given is None else given, []
    state = pipe.init(given, batch(), None)
    return losses, pipe.params(pipe.drain(followed(pipe, state, losses, STEPS)))


def followed(pipe: jvpipe.Pipeline, state: Any, losses: list[float], steps: int) -> Any:
    """The state after some steps, whose losses are noted."""
    for after, metrics in pipe.run(state, [batch()] * steps):
        losses.append(float(metrics["loss"]))
        state = after
    return state


def assert_same(found: tuple[list[float], Any], expected: tuple[list[float], Any]) -> None:
    assert found[0] == expected[0]
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])


def frozen_names(pipe: jvpipe.Pipeline) -> list[str]:
    return [p.array.name for p in pipe.session.graph.parameters if p.frozen]


def plain(given: Any, optimizer: Any, labels: Any) -> tuple[list[float], Any]:
    """The losses and parameters of plain JAX and optax, which see the trained parameters alone."""
    kept = {name: given[name] for name, label in labels.items() if label == "frozen"}
    own = {name: jax.tree.map(jnp.asarray, given[name]) for name in given if name not in kept}
    parts, state, losses = batch().reshape(MICRO, -1, D), optimizer.init(own), []

    def whole(own: Any) -> jax.Array:
        each = [loss_fn(kept | own, jnp.asarray(part), None) for part in parts]
        return jnp.mean(jnp.stack(each))

    for _ in range(STEPS):
        loss, gradient = jax.value_and_grad(whole)(own)
        updates, state = optimizer.update(gradient, state, own)
        own = optax.apply_updates(own, updates)
        losses.append(float(loss))
    return losses, own


SCHEDULES = {
    "one stage": {"stages": 1},
    "1f1b": {},
    "gpipe": {"schedule": "gpipe", "stages": 3},
    "zb-h1": {"schedule": "zb-h1", "stages": 3},
    "interleaved": {"schedule": "interleaved"},
    "zb-v": {"schedule": "zb-v"},
    "pipedream": {"schedule": "pipedream", "stages": 3},
    "2bw": {"schedule": "2bw"},
    "pipemare": {"schedule": "pipemare"},
    "xpipe": {"schedule": "xpipe"},
    "replicas": {"replicas": (2, 1)},
    "replicas of halves": {"schedule": "zb-h1", "replicas": (1, 2)},
    "turns": {"schedule": PipeDream(update_every=2), "replicas": (2, 1)},
    "recomputed": {"fates": {"*": "recompute"}},
    "swapped": {"fates": {"*": "swap"}},
}
KINDS = ("pipedream", "replicas of halves", "recomputed")
"""One of each kind: versions, replicas with backwards in two parts, fates."""


@pytest.mark.parametrize("name", grid(SCHEDULES, *KINDS))
def test_what_is_trained_has_the_bits_that_it_had(name: str) -> None:
    with nothing_frozen():
        whole = pipeline(tuned(), **SCHEDULES[name])
        expected = trained(whole)
    pipe = pipeline(tuned(), **SCHEDULES[name])
    assert_same(trained(pipe), expected)
    assert frozen_names(whole) == []
    assert len(frozen_names(pipe)) == 2 * LAYERS
    peaks = zip(pipe.ledger.peak_bytes.values(), whole.ledger.peak_bytes.values(), strict=True)
    assert all(own < other for own, other in peaks)


@pytest.mark.parametrize("dtype", grid([np.float32, np.int8, jnp.int4], jnp.int4))
def test_the_rest_trains_as_in_plain_jax(dtype: Any) -> None:
    given, optimizer = params(dtype), optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    losses, expected = plain(given, optimizer, LABELS)
    pipe = pipeline(optimizer, stages=3, frozen=["base/*"])
    found, after = trained(pipe, given)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for name in expected:
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), after[name], expected[name]
        )
    jax.tree.map(np.testing.assert_array_equal, after["base"], given["base"])
    assert after["base"][0]["w"].dtype == dtype


def test_a_pattern_freezes_as_an_optimizer_does() -> None:
    expected = trained(pipeline(tuned()))
    assert_same(trained(pipeline(optax.adamw(1e-2), frozen=["base/*"])), expected)


def test_a_frozen_base_takes_hardly_more_than_one_that_the_loss_captures() -> None:
    given = params()
    rest = {name: given[name] for name in ("lora", "head")}
    pipe, captured = (
        pipeline(tuned()),
        pipeline(optax.adamw(1e-2), lambda p, b, r: loss_fn({"base": given["base"], **p}, b, r)),
    )
    trained(pipe)
    trained(captured, rest)
    frozen, beside = (sum(p.ledger.peak_bytes.values()) for p in (pipe, captured))
    assert frozen <= 1.03 * beside


def test_nothing_is_computed_or_held_for_frozen_parameters() -> None:
    pipe = pipeline(tuned(), stages=jvpipe.Plan.from_cuts([2, 9]))
    trained(pipe)
    compiled = pipe.session.compiled
    frozen = {i for i, p in enumerate(pipe.session.graph.parameters) if p.frozen}
    values = [buffer.value for buffer in compiled.lowered.buffers]
    assert frozen.isdisjoint(v.index for v in values if v.kind == "gradient")
    assert {leaf.parameter for leaf in compiled.optimizer.state}.isdisjoint(frozen)
    assert not any(
        slot.index in frozen
        for piece in compiled.optimizer.update
        for slot in piece.writes
        if slot.kind == "parameter"
    )
    kinds = {row.kind for row in compiled.lowered.rows if row.layer in (0, 1)}
    assert "F" in kinds
    assert kinds.isdisjoint({"B", "ZERO", "U"})  # nothing is trained before the third layer


def test_layers_of_frozen_parameters_pass_cotangents_on_and_have_no_other_half() -> None:
    pipe = pipeline(tuned(), schedule="zb-h1")
    trained(pipe)
    graph, rows = pipe.session.graph, pipe.session.compiled.lowered.rows
    reads = {layer.id: layer.reading(ValueKind.PARAMETER) for layer in graph.layers}
    idle = {i for i, parameters in reads.items() if not graph.trained(parameters)}
    passing = {row.layer for row in rows if row.kind == "B"} & idle
    assert passing, "the case shows nothing"
    assert {row.layer for row in rows if row.kind == "W"} & idle == set()
    assert {row.layer for row in rows if row.kind == "W"}
    assert {row.layer for row in rows if row.kind == "ZERO"} & idle == set()


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(0.1), tuned()),
        optax.chain(
            optax.masked(optax.set_to_zero(), MASK),
            optax.adamw(1e-2),
        ),
        optax.apply_if_finite(tuned(), 3),
    ],
    ids=["norm", "decay", "finite"],
)
def test_what_is_read_or_changed_is_not_frozen(optimizer: Any) -> None:
    """A norm of all gradients, or whether all are finite; AdamW's decay moves what has no
    gradient.
    """
    pipe = pipeline(optimizer)
    found = trained(pipe)
    assert frozen_names(pipe) == []
    with nothing_frozen():
        assert_same(found, trained(pipeline(optimizer)))


def test_a_norm_that_is_asked_for_is_of_all_gradients_but_those_of_named_parameters() -> None:
    def norm(**options: Any) -> float:
        pipe = pipeline(tuned(), grad_norm=True, **options)
        _, metrics = pipe.step(pipe.init(params(), batch(), None), batch())
        return float(metrics["grad_norm"])

    gradient = jax.grad(lambda p: loss_fn(p, jnp.asarray(batch()), None))(
        jax.tree.map(jnp.asarray, params())
    )
    np.testing.assert_allclose(norm(), optax.tree.norm(gradient), rtol=1e-4)
    rest = {name: gradient[name] for name in ("lora", "head")}
    np.testing.assert_allclose(norm(frozen=["base/*"]), optax.tree.norm(rest), rtol=1e-4)


def test_state_that_only_the_gradient_of_a_frozen_parameter_makes_is_not_kept() -> None:
    pipe = pipeline(MASKED)
    state = pipe.init(params(), batch(), None)
    assert len(frozen_names(pipe)) == 2 * LAYERS
    adam = pipe.optimizer_state(state)[0][0]
    assert adam.mu["base"][0]["w"] == optax.MaskedNode()
    assert adam.nu["lora"][0]["a"].shape == (D, R)
    state = pipe.with_optimizer_state(state, pipe.optimizer_state(state))
    pipe.step(state, batch())


def test_a_mean_of_frozen_parameters_is_kept() -> None:
    optimizer = optax.chain(tuned(), averaging())
    pipe = pipeline(optimizer)
    state = pipe.init(params(), batch(), None)
    state, _ = pipe.step(state, batch())
    assert len(frozen_names(pipe)) == 2 * LAYERS
    mean = pipe.optimizer_state(state)[1]
    np.testing.assert_allclose(mean["base"][0]["w"], params()["base"][0]["w"] / 2, rtol=1e-6)


def averaging() -> optax.GradientTransformation:
    """Keeps a mean of the parameters, which no update reads."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, jax.tree.map(lambda mean, p: (mean + p) / 2, state, params)

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


@pytest.mark.thorough
def test_layers_that_a_scan_stacks_are_frozen_as_one() -> None:
    draw = np.random.default_rng(0)
    given = {
        "base": draw.normal(size=(LAYERS, D, D)).astype(np.float32) / 4,
        "lora": draw.normal(size=(LAYERS, D, R, 2)).astype(np.float32),
    }

    def loss(params: Any, batch: Any, rng: Any) -> jax.Array:
        def layer(x: Any, own: Any) -> Any:
            beside = x @ own["lora"][..., 0] @ own["lora"][..., 1].T
            return x + jnp.tanh(x @ own["base"] + beside), None

        return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)

    optimizer = tuned(labels={"base": "frozen", "lora": "trained"})
    with nothing_frozen():
        expected = trained(pipeline(optimizer, loss), given)
    for options in ({}, {"stacked": "per_layer"}):
        pipe = pipeline(optimizer, loss, **options)
        assert_same(trained(pipe, given), expected)
        assert len(frozen_names(pipe)) == LAYERS
    named = pipeline(optax.adamw(1e-2), loss, frozen=["base"])
    assert_same(trained(named, given), expected)


# Moves, versions, checkpoints


@pytest.mark.parametrize("schedule", grid(["1f1b", "pipedream", "pipemare"], "1f1b"))
def test_frozen_parameters_move_with_their_layers(schedule: str) -> None:
    def run(*, moving: bool) -> tuple[list[float], Any]:
        plan = jvpipe.Plan.from_cuts([6, 5])
        pipe = pipeline(tuned(), stages=plan, schedule=schedule, devices=jax.devices()[:2])
        state, losses = pipe.init(params(), batch(), None), []
        if moving:
            state = pipe.migrate(state, jvpipe.Plan.from_cuts([3, 8]), at=(1, 2))
        state = pipe.drain(followed(pipe, state, losses, 4))
        assert len(pipe.session.history) == moving
        return losses, pipe.params(state)

    moved = run(moving=True)
    if schedule == "1f1b":
        assert_same(moved, run(moving=False))
    jax.tree.map(np.testing.assert_array_equal, moved[1]["base"], params()["base"])


@pytest.mark.parametrize(
    ("schedule", "options"),
    grid(
        [
            ("pipedream", {}),
            masked := ("pipedream", {"masked": True}),
            ("2bw", {"frozen": ["base/*"]}),
            integers := ("pipemare", {"given": np.int8, "frozen": ["base/*"]}),
            ("xpipe", {}),
        ],
        masked,
        integers,
    ),
)
def test_a_frozen_parameter_has_one_version_and_a_replay_the_same_bits(
    schedule: str, options: dict[str, Any]
) -> None:
    given, named = params(options.get("given", np.float32)), options.get("frozen")
    optimizer = optax.adamw(1e-2) if named else MASKED if "masked" in options else tuned()
    pipe = pipeline(optimizer, stages=3, schedule=schedule, frozen=named)
    state, losses = pipe.init(given, batch(), None), []
    state = followed(pipe, state, losses, 4)
    step, _ = pipe.session.compiled.stream_step(state.stream_steps)
    parameters = pipe.session.graph.parameters
    held = Counter(b.value.index for b in step.lowered.buffers if b.value.kind in VERSIONS)
    frozen = {i for i, p in enumerate(parameters) if p.frozen}
    assert all(held[i] == 1 for i in frozen)
    assert max(held[i] for i in range(len(parameters)) if i not in frozen) > 1
    own = pipe.params(pipe.drain(state))
    again, parts = jvpipe.replay(pipe.ledger, pipe, given, [batch()] * 4, None)
    jax.tree.map(np.testing.assert_array_equal, own, again)
    np.testing.assert_allclose(np.mean(np.reshape(parts, (4, -1)), 1), losses, rtol=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_checkpoint_holds_them_as_all_others(schedule: str, tmp_path: Path) -> None:
    given = params(np.int8)

    def begun(stages: int) -> jvpipe.Pipeline:
        return pipeline(optax.adamw(1e-2), stages=stages, schedule=schedule, frozen=["base/*"])

    pipe = begun(2)
    losses: list[float] = []
    state = followed(pipe, pipe.init(given, batch(), None), losses, 2)
    pipe.save(tmp_path, state)
    after = pipe.params(pipe.drain(followed(pipe, state, losses, 2)))
    other = begun(3 if schedule == "1f1b" else 2)
    state, found = other.restore(tmp_path), []
    state = followed(other, state, found, 2)
    assert_same((found, other.params(other.drain(state))), (losses[2:], after))
    assert after["base"][0]["w"].dtype == np.int8


def test_an_evaluation_reads_them() -> None:
    pipe = pipeline(optax.adamw(1e-2), frozen=["base/*"])
    state = pipe.init(params(np.int8), batch(), None)
    evaluated = float(pipe.evaluate(state, batch())["loss"])
    assert evaluated == float(pipe.evaluate(state, batch(), params(np.int8))["loss"])
    _, metrics = pipe.step(state, batch())
    assert evaluated == float(metrics["loss"])


def test_another_model_freezes_what_the_patterns_match() -> None:
    pipe = pipeline(optax.adamw(1e-2), frozen=["base/*"])
    state = pipe.init(params(), batch(), None)
    state, _ = pipe.step(state, batch())
    wider = params() | {"more": np.ones(D, np.float32)}
    state = pipe.update_model(
        state, lambda p, b, r: loss_fn(p, b * jnp.broadcast_to(p["more"], b.shape), r), wider
    )
    state, _ = pipe.step(state, batch())
    assert len(frozen_names(pipe)) == 2 * LAYERS
    jax.tree.map(np.testing.assert_array_equal, pipe.params(state)["base"], params()["base"])


# Plans


def test_planners_count_no_gradient_and_no_state_of_them() -> None:
    shapes = jax.eval_shape(params)
    wide = jax.ShapeDtypeStruct((64, D), np.float32)
    options: dict[str, Any] = {"stages": 2, "microbatches": MICRO, "hardware": "h100"}
    frozen = jvpipe.plan_for(loss_fn, shapes, wide, optimizer=tuned(), **options)
    named = jvpipe.plan_for(
        loss_fn, shapes, wide, optimizer=optax.adamw(1e-2), frozen=["base/*"], **options
    )
    with nothing_frozen():
        whole = jvpipe.plan_for(loss_fn, shapes, wide, optimizer=tuned(), **options)
    assert isinstance(frozen, jvpipe.Forecast)
    assert isinstance(whole, jvpipe.Forecast)
    frozen_costs, whole_costs = frozen.problem.costs.layers, whole.problem.costs.layers
    base = 4 * LAYERS * D * (D + 1)
    by_name = {
        name: [sum(getattr(x, name) for x in costs) for costs in (whole_costs, frozen_costs)]
        for name in ("gradient_bytes", "parameter_bytes", "optimizer_bytes")
    }
    assert all(by_name[name][0] - by_name[name][1] == base for name in list(by_name)[:2])
    steps = 4 * 4  # no copy of the count of steps for the four layers that only the base is in
    assert by_name["optimizer_bytes"][1] - by_name["optimizer_bytes"][0] == base - steps
    first = frozen_costs[0]
    assert (first.gradient_bytes, first.backward_s, first.input_bytes) == (0, 0.0, 0)
    assert all(a.backward_s <= b.backward_s for a, b in zip(frozen_costs, whole_costs, strict=True))
    assert named.problem.costs == frozen.problem.costs


def test_layers_without_a_backward_are_not_timed() -> None:
    pipe = pipeline(tuned(), planner="jvpipe")
    pipe.init(params(), batch(), None)
    planned = pipe.session.compiled_plans.planned
    assert planned is not None
    costs = planned.problem.costs.layers
    assert [layer.backward_s == 0.0 for layer in costs[:3]] == [True, True, False]


# What is refused


def refused(message: str, optimizer: Any = None, given: Any = None, **options: Any) -> None:
    with pytest.raises(ValueError, match=message) as found:
        pipeline(optimizer or optax.adamw(1e-2), **options).init(given or params(), batch(), None)
    assert "\n" not in str(found.value)


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    refused(
        r"frozen pattern 'bse/\*' matches no parameter: did you mean 'base/0/b' or",
        frozen=["bse/*"],
    )


def test_patterns_that_are_none_are_refused() -> None:
    for frozen in ("base/*", 3, [3]):
        refused("frozen must be patterns of the paths of parameters", frozen=frozen)


@pytest.mark.parametrize("optimizer", [optax.adamw(1e-2), optax.sgd(1e-2), optax.lion(1e-2)])
def test_integers_that_would_be_trained_are_refused(optimizer: Any) -> None:
    refused(
        r"'base/0/w' is of type int8, which has no gradient: name it in frozen=, such as frozen=\['base/0/w'\]",
        optimizer,
        params(np.int8),
    )


def test_integers_whose_gradient_is_read_are_refused() -> None:
    refused(
        "'base/0/w' is of type int8",
        optax.chain(optax.clip_by_global_norm(1.0), tuned()),
        params(np.int8),
    )
    trained(pipeline(tuned()), params(np.int8))


@pytest.mark.parametrize(
    ("optimizer", "options"), [(optax.set_to_zero(), {}), (optax.adamw(1e-2), {"frozen": ["*"]})]
)
def test_a_model_of_which_all_is_frozen_is_refused(optimizer: Any, options: Any) -> None:
    refused(r"depends on no trained parameter \(21 frozen\)", optimizer, **options)
