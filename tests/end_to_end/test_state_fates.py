"""The optimizer's state on the host between updates changes where it lies, never a value."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.cost import links, measure
from jvpipe.cost.hardware import Link
from jvpipe.cost.links import Links
from jvpipe.ir.buffers import HOST
from jvpipe.ir.plan import Fate, Plan
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.programs.store import Program
from jvpipe.runtime.engine.tensors import parked_bytes
from jvpipe.runtime.state import migrate
from tests.grid import grid

D, LAYERS, MICRO = 32, 6, 4
LAYER_BYTES = 4 * (D * D + D)
SWAP = {"*": "swap"}


def loss_fn(params: Any, batch: Mapping[str, Any], rng: Any) -> Any:
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"][None])
    return jnp.mean((x - batch["y"]) ** 2)


def params(layers: int = LAYERS) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    kernels = draw.normal(0, D**-0.5, (layers, D, D)).astype(np.float32)
    return [{"kernel": jnp.array(k), "bias": jnp.zeros(D)} for k in kernels]


BATCH = {
    "x": np.random.default_rng(1).normal(size=(2 * MICRO, D)).astype(np.float32),
    "y": np.zeros((2 * MICRO, D), np.float32),
}


def pipeline(stages: Any = 1, schedule: str = "1f1b", **options: Any) -> jvpipe.Pipeline:
    optimizer = options.pop("optimizer", optax.adamw(1e-2))
    return jvpipe.Pipeline(
        loss_fn, optimizer, stages, MICRO, schedule, options.pop("planner", "even"), **options
    )


def check_held(pipe: jvpipe.Pipeline, state: Any) -> None:
    """Every array lies in the memory that the table of buffers says, and the ledger counts what
    there is.
    """
    state = jax.block_until_ready(state)
    plain = state if not state.stream_steps else pipe.drain(state)
    held = [0, 0]
    for buffer, x in zip(pipe.session.compiled.persistent, plain.arrays, strict=True):
        assert buffer.copy.on_host == (x.sharding.memory_kind not in (None, "device")), buffer
        held[buffer.copy.on_host] += x.nbytes
    held[1] += parked_bytes(pipe.session.known_models.parked)
    assert [sum(pipe.ledger.live[:HOST]), pipe.ledger.live[HOST]] == held, "something leaked"


def trained(
    pipe: jvpipe.Pipeline, layers: int = LAYERS, steps: int = 2
) -> tuple[list[float], list[np.ndarray]]:
    state, losses = pipe.init(params(layers), BATCH, jax.random.key(0)), []
    for _ in range(steps):
        state, metrics = pipe.step(state, BATCH)
        losses.append(float(metrics["loss"]))
    leaves = [np.asarray(x) for x in jax.tree.leaves(pipe.params(state))]
    check_held(pipe, state)
    return losses, leaves


def assert_same(ours: tuple[list[float], list[Any]], theirs: tuple[list[float], list[Any]]) -> None:
    assert ours[0] == theirs[0]
    for a, b in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_array_equal(a, b)


CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


@pytest.mark.usefixtures("copies_never_late")
@pytest.mark.parametrize(
    ("schedule", "stages", "options"),
    grid(
        [
            ("1f1b", 1, {}),
            ("1f1b", 2, {"optimizer": CLIPPED}),
            ("1f1b", 2, {"fates": {"*": "swap"}}),
            ("1f1b", 2, {"replicas": (2, 1)}),
            ("gpipe", 2, {}),
            ("zb-h1", 2, {"optimizer": CLIPPED}),
            ("zb-v", 2, {}),
            ("interleaved", 2, {}),
            ("pipedream", 1, {}),
            ("pipedream", 2, {}),
            ("2bw", 2, {"replicas": (2, 1)}),
            ("2bw", 2, {}),
            ("pipemare", 2, {}),
            ("xpipe", 3, {}),
        ],
        ("1f1b", 2, {"replicas": (2, 1)}),
        ("pipedream", 2, {}),
    ),
)
def test_bits_are_those_of_state_on_the_device(
    schedule: str, stages: int, options: dict[str, Any]
) -> None:
    plain = trained(pipeline(stages, schedule, **options))
    pipe = pipeline(stages, schedule, state_fates=SWAP, **options)
    assert_same(trained(pipe), plain)
    assert pipe.ledger.peak[HOST] >= 2 * LAYERS * LAYER_BYTES
    assert "; swap optimizer state of" in pipe.explain()


@pytest.mark.usefixtures("copies_never_late")
@pytest.mark.parametrize("schedule", grid(["1f1b", "zb-h1", "pipedream"], "1f1b"))
def test_a_device_holds_the_state_of_two_layers(schedule: str) -> None:
    plain, layers = pipeline(1, schedule), 16
    theirs = trained(plain, layers)
    state_bytes = layers * (2 * LAYER_BYTES + 4)  # and each layer's count of steps
    limit = plain.ledger.peak[0] - state_bytes + 2 * (2 * LAYER_BYTES) + 64 * 1024
    assert limit < plain.ledger.peak[0]
    with pytest.raises(jvpipe.MemoryLimitExceeded):
        trained(pipeline(1, schedule, memory_limit=limit), layers)
    pipe = pipeline(1, schedule, memory_limit=limit, state_fates=SWAP, planner="jvpipe")
    assert_same(trained(pipe, layers), theirs)
    assert not any(stage.fates for stage in pipe.plan.stages), "planners count what there is"
    planned = pipe.session.compiled_plans.planned
    assert planned is not None
    counted = evaluate_decision(planned.problem, planned.decision).limit_bytes
    assert pipe.ledger.peak[0] <= counted <= 1.1 * pipe.ledger.peak[0]
    assert pipe.ledger.peak[0] == pipe.session.compiled.peaks[0].bytes
    assert pipe.ledger.peak[0] <= limit - 60 * 1024


def away(pipe: jvpipe.Pipeline) -> int:
    """How many parameters' state lies on the host."""
    return sum(fate == Fate.SWAP for x in pipe.plan.stages for fate in x.state_fates.values())


@pytest.mark.parametrize(
    ("schedule", "stages", "options"),
    grid(
        [
            ("1f1b", 1, {}),
            ("zb-h1", 2, {}),
            ("auto", 2, {}),
            ("pipedream", 1, {}),
            ("1f1b", None, {"devices": jax.devices()[:2]}),
        ],
        ("1f1b", None, {"devices": jax.devices()[:2]}),
    ),
)
def test_the_planner_sends_as_much_state_away_as_has_no_room(
    schedule: str, stages: int | None, options: dict[str, Any]
) -> None:
    options |= {"planner": "jvpipe"}
    plain = pipeline(stages, schedule, **options)
    theirs = trained(plain)
    with pytest.raises(jvpipe.MemoryLimitExceeded) as error:
        trained(pipeline(stages, schedule, memory_limit=1, **options))
    least = error.value.smallest_limit_bytes
    with pytest.raises(jvpipe.MemoryLimitExceeded):  # where all of it stays
        trained(
            pipeline(stages, schedule, memory_limit=least, state_fates={"*": "keep"}, **options)
        )
    counts = []
    for limit in (least, least + 2 * LAYER_BYTES, max(plain.ledger.peak[:HOST])):
        pipe = pipeline(stages, schedule, memory_limit=limit, **options)
        assert_same(trained(pipe), theirs)
        assert max(pipe.ledger.peak[:HOST]) <= limit
        counts.append(away(pipe))
    assert counts[0] >= counts[1] >= counts[2] == 0 < counts[0]


def test_state_leaves_where_its_way_takes_less_than_computing_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def products_s(_: Any, program: Program, *__: Any) -> list[float]:
        products = str(jax.make_jaxpr(program.fn)(*program.inputs)).count("dot_general")
        return [1e-3 * products, 1e-3 * products]

    monkeypatch.setattr(measure, "_seconds", products_s)
    monkeypatch.setattr(links, "known_links", dict)
    batch = {name: np.repeat(x, 8, axis=0) for name, x in BATCH.items()}
    plain = pipeline(1, planner="jvpipe")
    plain.init(params(), batch, jax.random.key(0))
    (peak,) = plain.session.compiled.peaks[:1]
    limit, counts = peak.bytes - 5 * 4 * D * len(batch["x"]) // MICRO, []  # what five layers leave
    for link in (Link(1e12, 5e-3), Link(1.0)):
        measured = Links(link, link, link, send_uses_host=False)
        monkeypatch.setattr(links, "measure_links", lambda *_, links=measured: links)
        pipe = pipeline(1, planner="jvpipe", memory_limit=limit, remeasure=True)
        pipe.init(params(), batch, jax.random.key(0))
        counts.append((away(pipe) > 0, any(stage.fates for stage in pipe.plan.stages)))
    assert counts == [(True, False), (False, True)]


def swapping(pipe: jvpipe.Pipeline, cuts: list[int], schedule: str, *, on: bool) -> Plan:
    graph, plan = pipe.session.graph, Plan.from_cuts(cuts, schedule=schedule)
    names = [
        [graph.parameters[p].array.name for i in s.layers for p in graph.owned(i)]
        for s in plan.stages
    ]
    fates = [dict.fromkeys(known, Fate.SWAP) if on else {} for known in names]
    both = zip(plan.stages, fates, strict=True)
    return replace(plan, stages=tuple(replace(s, state_fates=f) for s, f in both))


MOVES = [
    ((1, 0), [2, 4], True),
    ((2, 2), [4, 2], True),
    ((3, 0), [3, 3], False),
    ((4, 1), [3, 3], True),
]
"""When, to which cuts, and whether state then lies on the host: layers move with their state, or
that alone does.
"""


@pytest.mark.parametrize(
    ("schedule", "by_host"),
    grid([("1f1b", False), ("1f1b", True), ("pipedream", False)], ("1f1b", False)),
)
def test_state_on_the_host_follows_its_layer(
    schedule: str, by_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_host:  # the way of a move that has no room
        way = migrate._migration_in_way
        ways = {"between": "by host", "inside": "inside"}
        monkeypatch.setattr(migrate, "_migration_in_way", lambda how, *args: way(ways[how], *args))
    found = []
    for swaps in (False, True):
        pipe = pipeline(2, schedule)
        state, losses = pipe.init(params(), BATCH, jax.random.key(0)), []
        for step in range(5):
            for at, cuts, on in MOVES:
                if at[0] == step:
                    plan = swapping(pipe, cuts, schedule, on=on and swaps)
                    state = pipe.migrate(state, plan, at)
            state, metrics = pipe.step(state, BATCH)
            losses.append(float(metrics["loss"]))
        found.append((losses, [np.asarray(x) for x in jax.tree.leaves(pipe.params(state))]))
        check_held(pipe, state)
        assert len(pipe.session.history) == len(MOVES) if swaps else len(MOVES) - 1
    assert_same(*found)


@pytest.mark.parametrize("schedule", grid(["1f1b", "pipedream"], "1f1b"))
def test_a_checkpoint_knows_no_fates(schedule: str, tmp_path: Path) -> None:
    pipe = pipeline(2, schedule, state_fates=SWAP)
    state, _ = pipe.step(pipe.init(params(), BATCH, jax.random.key(0)), BATCH)
    state = pipe.drain(state) if state.stream_steps else state
    pipe.save(tmp_path / "saved", state)
    ends = []
    for stages, fates in ((2, SWAP), (2, None), (3, {"*/kernel": "swap", "0/*": "keep"})):
        other = pipeline(stages, schedule, state_fates=fates)
        restored = other.restore(tmp_path / "saved")
        check_held(other, restored)
        restored, metrics = other.step(restored, BATCH)
        ends.append(([float(metrics["loss"])], jax.tree.leaves(other.params(restored))))
        if stages == 3 and schedule != "1f1b":  # another number of versions is another run
            ends.pop()
    for end in ends[1:]:
        assert_same(end, ends[0])


def test_a_model_that_changes_keeps_its_state_where_it_lay() -> None:
    def shorter(params: Any, batch: Mapping[str, Any], rng: Any) -> Any:
        return loss_fn(params[:3], batch, rng)

    ends = []
    for fates in (None, SWAP):
        pipe = pipeline(2, state_fates=fates)
        state, _ = pipe.step(pipe.init(params(), BATCH, jax.random.key(0)), BATCH)
        losses = []
        for loss, layers in ((shorter, 3), (loss_fn, LAYERS)):
            state = pipe.update_model(state, loss, params(layers))
            check_held(pipe, state)
            state, metrics = pipe.step(state, BATCH)
            losses.append(float(metrics["loss"]))
        assert pipe.evaluate(state, BATCH)["loss"] < losses[0]
        ends.append((losses, [np.asarray(x) for x in jax.tree.leaves(pipe.params(state))]))
    assert_same(*ends)


def test_what_is_no_parameter_or_no_fate_is_named() -> None:
    for fates, told in (
        ({"*/kernal": "swap"}, r"unknown parameter '\*/kernal' in state_fates: .* 0/kernel"),
        ({"*": "recompute"}, r"unknown fates \['recompute'\] in state_fates: there are keep, swap"),
    ):
        with pytest.raises(ValueError, match=told):
            pipeline(2, state_fates=fates).init(params(), BATCH, jax.random.key(0))
    with pytest.raises(ValueError, match="state_fates must map names of parameters, such as"):
        pipeline(2, state_fates="swap")
