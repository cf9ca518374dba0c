"""Replicated stages compute what one device does: for all widths and schedules, fates, masks,
weights and aux.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.schedules import PipeDream
from tests.grid import grid
from tests.zoo import Case, draws, dropout

MICRO, EXAMPLES, D, V, STEPS = 3, 6, 4, 5, 2
Tree = Any
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-2))


def tied() -> Case:
    """A tied table read at both ends, dropout in between, a weighted loss, and aux of every kind.

    The last third of each micro-batch weighs nothing.
    """
    draw = draws(5)
    params = {"table": draw(V, D), "layers": [draw(D, D) for _ in range(4)]}
    rng = np.random.default_rng(6)
    weights = np.tile(np.array([1, 2, 1, 1, 0, 0], np.float32), MICRO)
    tokens, targets = (rng.integers(0, V, MICRO * EXAMPLES, np.int32) for _ in range(2))
    batch = {"tokens": tokens, "targets": targets, "weights": weights}

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> tuple[jvpipe.Weighted, Tree]:
        x = params["table"][batch["tokens"]]
        for i, w in enumerate(params["layers"]):
            x = dropout(jnp.tanh(x @ w), jax.random.fold_in(rng, i))
        logits = jax.nn.log_softmax(x @ params["table"].T)
        each = -jnp.take_along_axis(logits, batch["targets"][:, None], -1)[:, 0]
        total, weight = jnp.sum(each * batch["weights"]), jnp.sum(batch["weights"])
        right = jnp.argmax(logits, -1) == batch["targets"]
        aux = {
            "each": each,
            "mean": jnp.mean(each),
            "right": jnp.sum(right),
            "seen": jvpipe.Weighted(total, weight),
        }
        return jvpipe.Weighted(total, weight), aux | {
            "features": jnp.mean(x, 0),
            "constant": jnp.arange(3),
        }

    return Case(loss_fn, params, batch, jax.random.key(1), has_aux=True)


def plain() -> Case:
    """A mean, with decay of a weight beside it, which is made where the weight is and goes to where
    the loss is.
    """
    draw = draws(7)
    params = [draw(D, D) for _ in range(6)]
    batch = {"x": 2 * draw(MICRO * EXAMPLES, D), "y": draw(MICRO * EXAMPLES, D)}

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2) + 0.01 * jnp.sum(params[0] ** 2)

    return Case(loss_fn, params, batch, jax.random.key(1))


CASES = {"tied": tied, "plain": plain}


@cache
def expected(name: str) -> tuple[Tree, list[Tree]]:
    """Parameters and metrics of plain JAX on one device."""
    case = CASES[name]()
    assert case.rng is not None
    rng = case.rng

    def total(params: Tree, step: jax.Array) -> Any:
        losses, weights, auxs = [], [], []
        for m in range(MICRO):
            batch = jax.tree.map(lambda x, m=m: x[m * EXAMPLES : (m + 1) * EXAMPLES], case.batch)
            key = jax.random.fold_in(jax.random.fold_in(rng, step), m)
            out = case.loss_fn(params, batch, key)
            loss, aux = out if case.has_aux else (out, ())
            parts = (loss.total, loss.weight) if case.has_aux else (loss, jnp.float32(1))
            losses.append(parts[0])
            weights.append(parts[1])
            auxs.append(aux)
        return sum(losses) / sum(weights), auxs

    @jax.jit
    def stepped(params: Tree, state: Tree, step: jax.Array) -> tuple[Tree, Tree, Any]:
        (loss, auxs), gradients = jax.value_and_grad(total, has_aux=True)(params, step)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, (loss, auxs, gradients)

    params, state, metrics = case.params, OPTIMIZER.init(case.params), []
    for step in range(STEPS):
        params, state, (loss, auxs, gradients) = stepped(params, state, jnp.int32(step))
        metrics.append({"loss": loss, "grad_norm": optax.tree.norm(gradients)})
        if case.has_aux:
            stacked = {
                k: jnp.stack([a[k] for a in auxs])
                for k in ("each", "right", "features", "constant")
            }
            seen = sum(a["seen"].total for a in auxs) / sum(a["seen"].weight for a in auxs)
            metrics[-1]["aux"] = stacked | {
                "mean": sum(a["mean"] for a in auxs) / MICRO,
                "seen": seen,
            }
    return params, metrics


def plan_of(layers: int, widths: Sequence[int], fates: dict[str, str] | None = None) -> jvpipe.Plan:
    stages, bounds = len(widths), [0, *accumulate(widths)]
    cuts = [layers // stages + (s < layers % stages) for s in range(stages)]
    plan = jvpipe.Plan.from_cuts(cuts, devices=[tuple(range(a, b)) for a, b in pairwise(bounds)])
    return replace(plan, stages=tuple(replace(stage, fates=fates or {}) for stage in plan.stages))


@cache
def names_of(name: str) -> tuple[int, tuple[tuple[str, ...], ...]]:
    """The number of layers of a case, and the names of what each leaves."""
    case = CASES[name]()
    pipe = jvpipe.Pipeline(case.loss_fn, OPTIMIZER, 1, MICRO, planner="even", has_aux=case.has_aux)
    pipe.init(case.params, case.batch, case.rng)
    graph = pipe.session.graph
    return len(graph.layers), tuple(
        tuple(f"{graph.label(x)}/{c.name}" for c in x.candidates) for x in graph.layers
    )


def trained(
    name: str, plan: Any, schedule: str = "1f1b", **options: Any
) -> tuple[Tree, list[Tree], jvpipe.Pipeline]:
    case = CASES[name]()
    pipe = jvpipe.Pipeline(
        case.loss_fn,
        OPTIMIZER,
        plan,
        MICRO,
        schedule,
        has_aux=case.has_aux,
        grad_norm=True,
        **options,
    )
    state, metrics = pipe.init(case.params, case.batch, case.rng), []
    for _ in range(STEPS):
        state, now = pipe.step(state, case.batch)
        metrics.append(now)
    assert list(pipe.ledger.peak) == [peak.bytes for peak in pipe.session.compiled.peaks]
    return pipe.params(state), metrics, pipe


def check_equal(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-4, atol=2e-6)


WIDTHS = [(2, 1), (1, 2), (3, 2), (2, 3, 1), (2, 2)]


@pytest.mark.parametrize(
    ("name", "widths", "schedule"),
    grid(
        (
            (name, widths, schedule)
            for schedule in ("1f1b", "gpipe")
            for name, widths in (
                *(("tied", w) for w in WIDTHS),
                ("plain", (2, 3)),
                ("plain", (3, 1)),
            )
        ),
        ("tied", WIDTHS[2], "1f1b"),
        ("plain", (3, 1), "gpipe"),
    ),
)
def test_equals_one_device(name: str, widths: tuple[int, ...], schedule: str) -> None:
    params, metrics = expected(name)
    found, told, _ = trained(name, plan_of(names_of(name)[0], widths), schedule)
    check_equal(found, params)
    check_equal(told, metrics)


def test_equals_one_device_where_how_many_there_are_is_decided() -> None:
    params, metrics = expected("plain")
    found, told, pipe = trained("plain", None, replicas="auto", devices=jax.devices()[:2])
    check_equal(found, params)
    check_equal(told, metrics)
    assert "on 2 devices" in pipe.explain()


def test_split_backwards_and_fates_change_no_bit() -> None:
    layers, names = names_of("tied")
    kept = trained("tied", plan_of(layers, (2, 3)))[:2]
    assert_same(trained("tied", plan_of(layers, (2, 3)), "zb-h1")[:2], kept)
    plan = plan_of(layers, (2, 3))
    fated = []
    for stage in plan.stages:
        own = [name for layer in stage.layers for name in names[layer]]
        fated.append(
            replace(stage, fates={name: ("swap", "recompute")[i % 2] for i, name in enumerate(own)})
        )
    found, told, pipe = trained("tied", replace(plan, stages=tuple(fated)), "gpipe")
    assert_same((found, told), kept)
    assert pipe.ledger.host_peak_bytes > 0
    assert_same(trained("tied", plan, checkpoint="except_last")[:2], kept)


@pytest.mark.parametrize(
    ("schedule", "speeds"),
    grid(
        [
            ("1f1b", None),
            ("zb-h1", None),
            chunks := ("interleaved", None),
            ("zb-v", None),
            unlike := ("1f1b", [1, 2, 1]),
        ],
        chunks,
        unlike,
    ),
)
def test_limits_that_need_swaps_change_no_bit(schedule: str, speeds: list[int] | None) -> None:
    """The smallest limit that any plan keeps: what is not on the device is swapped, the rest
    computed again.
    """
    case, devices = square(), jax.devices()[:3]
    options: dict[str, Any] = {"schedule": schedule, "microbatches": MICRO + 1, "devices": devices}

    def trained_within(stages: Any, limit: int | None, **more: Any) -> Any:
        pipe = jvpipe.Pipeline(
            case.loss_fn, OPTIMIZER, stages, memory_limit=limit, **options, **more
        )
        state, losses = pipe.init(case.params, case.batch, case.rng), []
        for _ in range(STEPS):
            state, metrics = pipe.step(state, case.batch)
            losses.append(metrics["loss"])
        return (pipe.params(state), losses), pipe

    given: dict[str, Any] = {"replicas": (2, 1), "speeds": speeds, "state_fates": {"*": "keep"}}
    with pytest.raises(jvpipe.MemoryLimitExceeded) as refused:
        trained_within(2, 1, **given)
    limit = refused.value.smallest_limit_bytes
    found, pipe = trained_within(2, limit, **given)
    fates = [fate for stage in pipe.plan.stages for fate in stage.fates.values()]
    assert "swap" in fates
    assert set(pipe.plan.replicas) == {1, 2}
    assert max(pipe.ledger.peak_bytes.values()) <= limit
    kept = replace(pipe.plan, stages=tuple(replace(stage, fates={}) for stage in pipe.plan.stages))
    wanted, whole = trained_within(kept, None)
    assert max(whole.ledger.peak_bytes.values()) > limit
    assert_same(found, wanted)


def square() -> Case:
    """Products alone, so that what is kept for backwards is most of what there is."""
    draw = draws(3)
    params = [draw(D, D) for _ in range(6)]

    def loss_fn(params: Tree, batch: Tree, rng: Any) -> jax.Array:
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return Case(loss_fn, params, draw((MICRO + 1) * 16 * EXAMPLES, D), jax.random.key(1))


def assert_same(found: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.thorough
def test_cuts_change_no_bit_where_all_stages_are_as_wide() -> None:
    layers, _ = names_of("tied")
    wanted = trained("tied", plan_of(layers, (2,)))[:2]
    assert_same(trained("tied", plan_of(layers, (2, 2)))[:2], wanted)
    assert_same(trained("tied", plan_of(layers, (2, 2, 2)), "gpipe")[:2], wanted)
    uneven = jvpipe.Plan.from_cuts([1, layers - 1], devices=[(5, 3), (0, 1)])
    assert_same(trained("tied", uneven)[:2], wanted)


@pytest.mark.usefixtures("copies_never_late")
def test_without_a_flush_micro_batches_take_turns(tmp_path: Path) -> None:
    """The replay gives the same bits, whatever becomes of residuals; so does a run that is resumed
    in flight.
    """
    case, (layers, names), micro = tied(), names_of("tied"), 6
    plan = plan_of(layers, (2, 1))
    own = [name for layer in plan.stages[0].layers for name in names[layer]]
    fates = {name: ("swap", "recompute")[i % 2] for i, name in enumerate(own)}
    plan = replace(plan, stages=(replace(plan.stages[0], fates=fates), plan.stages[1]))
    pipe = jvpipe.Pipeline(
        case.loss_fn, optax.adam(3e-2), plan, micro, PipeDream(update_every=2), has_aux=True
    )
    state = pipe.init(case.params, case.batch, case.rng)
    for found in pipe.run(state, [case.batch] * 3):
        state = found[0]
        if state.step == 1:
            pipe.save(tmp_path / "there", state)
    expected = pipe.params(state)
    assert list(pipe.ledger.peak) == [peak.bytes for peak in pipe.session.compiled.peaks]
    assert_same(
        jvpipe.replay(pipe.ledger, pipe, case.params, [case.batch] * 3, case.rng)[0], expected
    )
    state = pipe.restore(tmp_path / "there")
    for found in pipe.run(state, [case.batch] * 2):
        state = found[0]
    assert_same(pipe.params(state), expected)


@pytest.mark.thorough
@pytest.mark.usefixtures("copies_never_late")
@pytest.mark.parametrize("cut", grid([1, 2, 3], 2))
def test_turns_add_up_parameters_that_different_layers_read(cut: int) -> None:
    """One layer owns two arrays of unlike shapes, and each is read again by a layer of its own."""

    def loss_fn(params: Tree, batch: Tree, rng: jax.Array) -> jax.Array:
        x, y = batch
        both = jnp.concatenate([params["a"], params["b"], jnp.eye(D)], 1)
        x = jnp.tanh(jnp.tanh(x @ both) @ params["c"])
        x = jnp.tanh(x @ params["a"]) @ params["d"]
        x = jnp.tanh(x @ params["b"]) @ params["e"]
        return jnp.mean((x - y) ** 2)

    shapes = {"a": (D, 3), "b": (D, 5), "c": (D + 8, D), "d": (3, D), "e": (5, D)}
    keys = iter(jax.random.split(jax.random.key(0), 8))
    params = {name: jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    batch = tuple(jax.random.normal(next(keys), (8, D)) for _ in range(2))
    schedule = PipeDream(update_every=2)
    probe = jvpipe.Pipeline(loss_fn, optax.sgd(0.01), 1, 4, planner="even")
    probe.init(params, batch, jax.random.key(1))
    layers = len(probe.session.graph.layers)
    plan = jvpipe.Plan.from_cuts([cut, layers - cut], devices=[(0, 1), (2, 3)])
    pipe = jvpipe.Pipeline(loss_fn, optax.sgd(0.01), plan, 4, schedule)
    state = pipe.init(params, batch, jax.random.key(1))
    for _ in range(3):
        state, _ = pipe.step(state, batch)
    found = pipe.params(pipe.drain(state))
    replayed = jvpipe.replay(pipe.ledger, pipe, params, [batch] * 3, jax.random.key(1))[0]
    assert_same(found, replayed)
