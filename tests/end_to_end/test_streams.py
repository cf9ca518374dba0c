"""Asynchronous runs: replayed to the bit, counted to the byte, stopped and resumed anywhere."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.ir.buffers import HOST
from jvpipe.ir.layers import LayerGraph
from jvpipe.runtime.engine.versions import Reads
from jvpipe.schedules import PipeDream, PipeMare, Schedule, TwoBW, XPipe
from jvpipe.trace.model import trace_model
from tests.end_to_end.test_exactness import batch_of, key_of
from tests.end_to_end.test_fates import drawn
from tests.grid import grid
from tests.zoo import CASES, Case, mean_square, quick_key

MICRO = 4
SCHEDULES: dict[str, Schedule] = {
    "pipedream": PipeDream(),
    "vertical": PipeDream(vertical_sync=True),
    "2bw": TwoBW(),
    "pipemare": PipeMare(decay=0.5, anneal_updates=10),
    "xpipe": XPipe(),
    "every two": PipeDream(update_every=2),
}
ADAMW = optax.adamw(1e-2)
MOMENTUM = optax.sgd(0.05, momentum=0.9)


def pipeline(
    m: Case, schedule: Schedule | str, stages: Any, optimizer: Any = ADAMW, **options: Any
) -> jvpipe.Pipeline:
    count = stages if isinstance(stages, int) else len(stages.stages)
    return jvpipe.Pipeline(
        m.loss_fn,
        optimizer,
        stages,
        options.pop("microbatches", MICRO),
        schedule,
        planner="even",
        devices=jax.devices()[:count],
        has_aux=m.has_aux,
        has_state=m.has_state,
        **options,
    )


def graph_of(m: Case) -> LayerGraph:
    found = trace_model(
        m.loss_fn, m.params, m.batch, m.rng, m.state, None, has_aux=m.has_aux, has_state=m.has_state
    )
    return found.traced.graph


def batches_of(m: Case, count: int, micro: int = MICRO) -> list[Any]:
    """Batches that differ: the examples of each in another order."""
    whole = batch_of(m, micro)
    return [jax.tree.map(lambda x, i=i: np.roll(x, i, axis=0), whole) for i in range(count)]


def ran(pipe: jvpipe.Pipeline, state: jvpipe.State, batches: list[Any]) -> jvpipe.State:
    """The state after these batches, in flight."""
    for found in pipe.run(state, batches):
        state = found[0]
    return state


def assert_same(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("copies_never_late")
@pytest.mark.parametrize(
    ("case", "name"),
    grid(
        product(("one-hot", "resnet"), SCHEDULES),
        *product(("one-hot",), ("vertical", "2bw", "xpipe")),
    ),
)
def test_the_replay_gives_the_same_bits_with_any_fates(case: str, name: str) -> None:
    m, schedule = CASES[case](), SCHEDULES[name]
    stages, optimizer = (3, ADAMW) if case == "one-hot" else (2, MOMENTUM)
    graph = trace_model(
        m.loss_fn, m.params, m.batch, m.rng, m.state, has_aux=m.has_aux, has_state=m.has_state
    ).traced.graph
    cuts = tuple(
        len(graph.layers) // stages + (s < len(graph.layers) % stages) for s in range(stages)
    )
    pipe = pipeline(m, schedule, drawn(graph, cuts, seed=stages), optimizer)
    batches = batches_of(m, 5)
    state = pipe.init(m.params, batches[0], key_of(m), m.state)
    state = pipe.drain(ran(pipe, state, batches[:3]))  # an event in the ledger
    state = ran(pipe, state, batches[3:])
    again, each = jvpipe.replay(pipe.ledger, pipe, m.params, batches, key_of(m), m.state)
    assert_same(pipe.params(state), again)  # what is in flight has not been applied in either
    assert len(each) == 5 * MICRO
    state = pipe.drain(state)
    assert_same(
        pipe.params(state),
        jvpipe.replay(pipe.ledger, pipe, m.params, batches, key_of(m), m.state)[0],
    )
    held = sum(x.nbytes for x in state.arrays)
    assert (sum(pipe.ledger.live[:HOST]), pipe.ledger.live[HOST]) == (held, 0), "something leaked"
    assert pipe.ledger.peak == [peak.bytes for peak in pipe.session.compiled.peaks]
    assert pipe.ledger.peak[HOST] > 0


def tied(base: Case) -> Case:
    """Its layers, all alike, and after them the first once more: few programs to compile."""

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        return base.loss_fn([*params, params[0]], batch, rng)

    return Case(loss_fn, base.params, base.batch)


OPTIMIZERS = {"adamw": ADAMW, "momentum": MOMENTUM}
SOME = [
    ("pipedream", 4, "adamw"),
    ("vertical", 2, "momentum"),
    ("pipemare", 4, "momentum"),
]


@pytest.mark.parametrize(
    ("name", "stages", "optimizer"),
    grid(
        (
            (name, *how)
            for name in ("pipedream", "vertical", "2bw", "pipemare", "xpipe")
            for how in ((1, "adamw"), (2, "momentum"), (3, "adamw"), (4, "adamw"), (4, "momentum"))
        ),
        *SOME,
        ("xpipe", 1, "adamw"),
    ),
)
def test_every_schedule_replays_at_every_number_of_stages(
    name: str, stages: int, optimizer: str
) -> None:
    m = tied(CASES["mlp"]())
    graph = graph_of(m)
    cuts = tuple(
        len(graph.layers) // stages + (s < len(graph.layers) % stages) for s in range(stages)
    )
    pipe = pipeline(m, SCHEDULES[name], drawn(graph, cuts, seed=3), OPTIMIZERS[optimizer])
    batches = batches_of(m, 2)
    state = ran(pipe, pipe.init(m.params, batches[0], None), batches)
    params, losses = jvpipe.replay(pipe.ledger, pipe, m.params, batches, None)
    assert_same(pipe.params(state), params)
    assert len(losses) == 2 * MICRO
    kinds = {row.kind for step in pipe.session.compiled.stream.steps for row in step.lowered.rows}
    shown = (
        {"R"} if stages == 1 else {"R", "OUT", "IN"}
    )  # a backward that follows at once leaves nothing to swap
    assert shown <= kinds, "the case shows nothing"


@pytest.mark.parametrize("name", grid(["pipedream", "xpipe"], "pipedream"))
def test_four_stages_with_dropout_replay(name: str) -> None:
    m = CASES["chained-keys"]()  # with dropout
    pipe = jvpipe.Pipeline(m.loss_fn, ADAMW, 4, MICRO, SCHEDULES[name], planner="even")
    batches = batches_of(m, 4)
    state = pipe.init(m.params, batches[0], key_of(m))
    state = ran(pipe, state, batches)
    assert_same(
        pipe.params(state), jvpipe.replay(pipe.ledger, pipe, m.params, batches, key_of(m))[0]
    )


@pytest.mark.parametrize("name", grid(["pipedream", "pipemare", "xpipe"], "pipemare"))
def test_one_stage_is_plain_training_with_an_update_per_micro_batch(name: str) -> None:
    m = CASES["pre-norm"]()
    pipe, batches = pipeline(m, SCHEDULES[name], 1), batches_of(m, 3)
    state = pipe.init(m.params, batches[0], key_of(m))
    state = ran(pipe, state, batches)
    params = jax.tree.leaves(plain_training(m, batches, delay=0, every=1))
    assert_same(jax.tree.leaves(pipe.params(state)), params)


def test_one_stage_of_2bw_is_training_with_updates_one_late() -> None:
    m = CASES["mlp"]()
    pipe, batches = pipeline(m, TwoBW(), 1, MOMENTUM), batches_of(m, 4)
    state = pipe.init(m.params, batches[0], key_of(m))
    state = ran(pipe, state, batches)
    plain = plain_training(m, batches, delay=1, every=MICRO, optimizer=MOMENTUM)
    for ours, theirs in zip(
        jax.tree.leaves(pipe.params(state)), jax.tree.leaves(plain), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def plain_training(
    m: Case, batches: list[Any], delay: int, every: int, optimizer: Any = ADAMW
) -> Any:
    """Without a pipeline's stream: synchronous steps of `every` micro-batches, or plain JAX if
    gradients are late.
    """
    if not delay:
        pipe = pipeline(m, "1f1b", 1, optimizer, microbatches=1)
        part = jax.tree.map(lambda x: x[: len(x) // MICRO], batches[0])
        state = pipe.init(m.params, part, key_of(m))
        for batch in batches:
            for i in range(MICRO):
                part = jax.tree.map(
                    lambda x, i=i: x[i * len(x) // MICRO : (i + 1) * len(x) // MICRO], batch
                )
                state, _ = pipe.step(state, part)
        return pipe.params(state)
    params, before, moments = m.params, m.params, optimizer.init(m.params)
    grad = jax.jit(jax.grad(m.loss_fn))
    for batch in batches:
        gradients = grad(before, batch, None)
        updates, moments = optimizer.update(gradients, moments, params)
        params, before = optax.apply_updates(params, updates), params
    return params


@pytest.mark.parametrize("name", grid(["pipedream", "2bw", "pipemare", "xpipe"], "pipedream"))
def test_a_run_saved_in_flight_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    m, schedule = CASES["resnet"](), SCHEDULES[name]
    graph = trace_model(
        m.loss_fn, m.params, m.batch, m.rng, m.state, has_aux=m.has_aux, has_state=m.has_state
    ).traced.graph
    plan = drawn(graph, (4, len(graph.layers) - 4), seed=2)
    batches = batches_of(m, 6)
    whole, pipe = pipeline(m, schedule, plan), pipeline(m, schedule, plan)
    state = whole.init(m.params, batches[0], key_of(m), m.state)
    state = ran(whole, state, batches)
    begun = pipe.init(m.params, batches[0], key_of(m), m.state)
    begun = ran(pipe, begun, batches[:3])
    pipe.save(tmp_path / "flight", begun)
    later = pipeline(m, schedule, plan)
    resumed = later.restore(tmp_path / "flight")
    assert resumed.stream_steps == 3
    resumed = ran(later, resumed, batches[3:])
    assert_same(later.params(resumed), whole.params(state))
    assert_same(later.model_state(resumed), whole.model_state(state))
    table, known = whole.ledger.versions.table(), later.ledger.versions.table()
    assert known == {at: reads for at, reads in table.items() if at in known}
    assert {
        at for at in table if at[1] >= 3 * MICRO
    } < known.keys()  # and those that were in flight
    assert later.ledger.versions.staleness(len(graph.layers)) == whole.ledger.versions.staleness(
        len(graph.layers)
    )
    assert later.ledger.live == whole.ledger.live


def key_in_state() -> Case:
    """A model that carries its own key from micro-batch to micro-batch."""
    base = CASES["mlp"]()

    def loss_fn(params: Any, state: Any, batch: Any, rng: Any) -> Any:
        key, noise = jax.random.split(state)
        x = batch["x"] + 0.1 * jax.random.normal(noise, batch["x"].shape)
        for p in params:
            x = jnp.tanh(x @ p["w"] + p["b"][None])
        return mean_square(x, batch["y"]), key

    return Case(loss_fn, base.params, base.batch, None, quick_key(3), has_state=True)


@pytest.mark.parametrize(
    ("make", "drained"),
    grid(
        product((CASES["chained-keys"], key_in_state), (False, True)),
        (CASES["chained-keys"], False),
    ),
)
def test_keys_are_saved_as_keys(make: Callable[[], Case], drained: bool, tmp_path: Path) -> None:
    m = make()
    graph = graph_of(m)
    plan = jvpipe.Plan.from_cuts(
        [len(graph.layers) - 1, 1]
    )  # the chain's keys are read within its first stage
    first = plan.stages[0]
    layers = [graph.layers[i] for i in first.layers]
    bits = {
        f"{graph.label(layer)}/{c.name}": "recompute" for layer in layers for c in layer.candidates
    }
    plan = replace(plan, stages=(replace(first, fates=bits), plan.stages[1]))
    pipe, later = (pipeline(m, PipeDream(), plan) for _ in range(2))
    batches = batches_of(m, 4)
    state = ran(pipe, pipe.init(m.params, batches[0], key_of(m), m.state), batches[:2])
    state = pipe.drain(state) if drained else state
    assert any("key" in str(x.dtype) for x in state.arrays) or drained
    pipe.save(tmp_path / "saved", state)
    later.init(m.params, batches[0], key_of(m), m.state)
    resumed = ran(later, later.restore(tmp_path / "saved"), batches[2:])
    assert_same(later.params(resumed), pipe.params(ran(pipe, state, batches[2:])))


def test_a_state_in_flight_belongs_to_its_schedule_and_cuts(tmp_path: Path) -> None:
    m = CASES["mlp"]()
    pipe, batches = pipeline(m, PipeDream(), 2), batches_of(m, 2)
    state = pipe.init(m.params, batches[0], None)
    state = ran(pipe, state, batches)
    pipe.save(tmp_path / "flight", state)
    for other in (pipeline(m, PipeMare(), 2), pipeline(m, PipeDream(), 3), pipeline(m, "1f1b", 2)):
        with pytest.raises(ValueError, match=r"was saved in flight under pipedream.*drain"):
            other.restore(tmp_path / "flight")
    drained = pipe.drain(state)
    pipe.save(tmp_path / "drained", drained)
    assert jvpipe.checkpoint_plan(tmp_path / "drained") is None
    other = pipeline(m, "1f1b", 3)
    assert_same(other.params(other.restore(tmp_path / "drained")), pipe.params(drained))


def test_an_optimizer_that_looks_at_all_layers_is_refused() -> None:
    m = CASES["mlp"]()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    with pytest.raises(
        ValueError, match=r"clip_by_global_norm needs a value of all layers.*Use a synchronous"
    ):
        pipeline(m, PipeDream(), 2, optimizer).init(m.params, batch_of(m, MICRO), None)


def test_a_loss_that_is_no_number_stops_the_run() -> None:
    m = CASES["mlp"]()
    pipe, batches = pipeline(m, PipeDream(), 2, MOMENTUM), batches_of(m, 5)
    batches[2] = jax.tree.map(np.copy, batches[2])
    batches[2]["x"][-1] = np.nan  # in the last of its micro-batches, number 11
    state = pipe.init(m.params, batches[0], None)
    with pytest.raises(
        ValueError, match=r"loss of micro-batch 11 \(step 2\) is nan at stage 1, read with versions"
    ):
        ran(pipe, state, batches)
    assert len(pipe.ledger.versions.table()) == 4 * MICRO * len(
        pipe.session.graph.layers
    )  # one step more was under way


def test_pipemare_begins_synchronously_if_asked_to() -> None:
    m = CASES["with-aux"]()  # its micro-batches have weights
    batches = batches_of(m, 5)
    mare, plain = pipeline(m, PipeMare(warmup_updates=2), 2), pipeline(m, "1f1b", 2)
    ours, theirs = (pipe.init(m.params, batches[0], None) for pipe in (mare, plain))
    ours = ran(mare, ours, batches[:2])
    theirs = ran(plain, theirs, batches[:2])
    assert_same(mare.params(ours), plain.params(theirs))
    assert_same(mare.params(ours), jvpipe.replay(mare.ledger, mare, m.params, batches, None)[0])
    ours = ran(mare, ours, batches[2:])
    assert ours.stream_steps == 3
    assert_same(mare.params(ours), jvpipe.replay(mare.ledger, mare, m.params, batches, None)[0])
    assert ours.updates == 2 + 3 * MICRO
    versions = mare.ledger.versions
    assert [versions[0, i] for i in (0, MICRO - 1, MICRO, 2 * MICRO)] == [
        Reads(forward, forward, forward + 1) for forward in (0, 0, 1, 2)
    ]
    assert versions.staleness(len(mare.session.graph.layers))[-1] == 0


def added(params: Any, batch: Any, rng: Any) -> jax.Array:
    """A loss whose gradients are all 1, so that SGD's updates show how they are scaled."""
    return jnp.mean(sum(params, batch))


def test_pipemare_slows_updates_by_tau_in_updates_and_again_after_a_drain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """T1 divides update t by tau ** (1 - t / K), where a drain sets t to 0."""

    def total(tau: int, runs: list[int], K: int = 4) -> float:
        return sum(tau ** -max(0.0, 1 - t / K) for count in runs for t in range(count))

    batch, params = np.ones(MICRO, np.float32), [np.zeros((), np.float32)] * 3
    # With an update per micro-batch, tau is 2 on stage 0. With one per four, it is ceil(2 / 4).
    for every, tau, runs in ((1, 2, [8]), (1, 2, [4, 4]), (4, 1, [2])):
        caplog.clear()
        schedule = PipeMare(anneal_updates=4, update_every=every)
        pipe = jvpipe.Pipeline(added, optax.sgd(1.0), 3, MICRO, schedule, planner="even")
        state = pipe.init(params, batch, None)
        for count in runs:
            state = pipe.drain(ran(pipe, state, [batch] * (count * every // MICRO)))
        first, _, last = (-float(w) for w in pipe.params(state))
        assert (first, last) == (pytest.approx(total(tau, runs), rel=1e-6), sum(runs))
        assert caplog.text.count("pipemare begins again") == len(runs) - 1


def counting_loss(
    params: Any, state: Any, batch: Any, rng: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A loss whose first layer reads a counter, which is another one in each micro-batch."""
    x = batch * (1 + 0.1 * state["count"])
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2), {"count": state["count"] + 1}


def test_a_layer_that_is_recomputed_in_a_replay_reads_the_state_that_its_forward_read() -> None:
    params = [0.5 * np.eye(4, dtype=np.float32) + 0.1 for _ in range(4)]
    batches = [np.full((8, 4), 0.1 * (1 + i), np.float32) for i in range(3)]
    pipe = jvpipe.Pipeline(
        counting_loss,
        ADAMW,
        jvpipe.Plan.from_cuts([3, 1]),
        MICRO,
        "pipedream",
        fates={"*": "recompute"},
        has_state=True,
    )
    count = {"count": np.zeros((), np.float32)}
    state = ran(pipe, pipe.init(params, batches[0], None, count), batches)
    again, _ = jvpipe.replay(pipe.ledger, pipe, params, batches, None, count)
    assert_same(pipe.params(state), again)


def test_a_run_that_goes_on_from_a_checkpoint_is_not_replayed_with_a_fresh_optimizer(
    tmp_path: Path,
) -> None:
    m = CASES["mlp"]()
    pipe = pipeline(m, SCHEDULES["pipedream"], jvpipe.Plan.from_cuts([3, 2]), ADAMW)
    batches = batches_of(m, 2)
    state = pipe.drain(ran(pipe, pipe.init(m.params, batches[0], None), batches))
    pipe.save(tmp_path / "one", state)
    state = pipe.restore(tmp_path / "one")
    before = pipe.params(state)
    ran(pipe, state, batches)
    with pytest.raises(ValueError, match="resumed from a checkpoint"):
        jvpipe.replay(pipe.ledger, pipe, before, batches, None)


def test_an_optimizer_whose_first_update_changes_a_type_is_replayed() -> None:
    def init(params: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        moments = jax.tree.map(lambda g, m: g + 0.5 * m.astype(jnp.float32), updates, state)
        return jax.tree.map(lambda m: -0.1 * m, moments), moments

    m = CASES["mlp"]()
    optimizer = optax.GradientTransformation(init, update)
    pipe = pipeline(m, SCHEDULES["pipedream"], jvpipe.Plan.from_cuts([3, 2]), optimizer)
    batches = batches_of(m, 2)
    state = ran(pipe, pipe.init(m.params, batches[0], None), batches)
    assert_same(pipe.params(state), jvpipe.replay(pipe.ledger, pipe, m.params, batches, None)[0])
