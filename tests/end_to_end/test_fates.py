"""Fates change placement and timing, never a value: any mix gives the same bits, and the ledger is
empty at the end.
"""

import random
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.ir.buffers import HOST
from jvpipe.ir.layers import LayerGraph
from jvpipe.models.workload import load
from jvpipe.trace.model import trace_model
from tests.end_to_end.test_exactness import batch_of, key_of
from tests.grid import grid
from tests.zoo import CASES, Case, in_bfloat16, quick_key

MICRO = 4


def drawn(graph: LayerGraph, cuts: tuple[int, ...], seed: int) -> jvpipe.Plan:
    """A plan of these cuts with a random fate for every candidate and every edge that may have
    one.
    """
    draw = random.Random(seed)
    plan = jvpipe.Plan.from_cuts(list(cuts))
    stages = []
    for stage in plan.stages:
        inside = set(stage.layers)
        layers = [graph.layers[i] for i in stage.layers]
        names = [f"{graph.label(layer)}/{c.name}" for layer in layers for c in layer.candidates]
        fates = {name: draw.choice(["keep", "swap", "recompute"]) for name in names}
        for tensor in graph.tensors:
            if inside & {tensor.producer, *tensor.readers}:
                made_here = tensor.producer in inside
                fates[tensor.array.name] = draw.choice(
                    ["keep", "swap", "recompute"] if made_here else ["keep", "swap"]
                )
        stages.append(replace(stage, fates=fates))
    return replace(plan, stages=tuple(stages))


def trained(
    m: Case, plan: Any, schedule: str, **options: Any
) -> tuple[list[Any], list[float], jvpipe.Pipeline]:
    stages = plan if isinstance(plan, int) else len(plan.stages)
    pipe = jvpipe.Pipeline(
        m.loss_fn,
        optax.adamw(1e-2),
        stages=plan,
        microbatches=MICRO,
        schedule=schedule,
        planner="even",
        devices=jax.devices()[:stages],
        has_aux=m.has_aux,
        has_state=m.has_state,
        **options,
    )
    state = pipe.init(m.params, batch_of(m, MICRO), key_of(m), m.state)
    losses = []
    for _ in range(2):
        state, metrics = pipe.step(state, batch_of(m, MICRO))
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        held = sum(x.nbytes for x in jax.tree.leaves(state.arrays))
        assert (sum(pipe.ledger.live[:HOST]), pipe.ledger.live[HOST]) == (held, 0), (
            "something leaked"
        )
    assert pipe.ledger.peak == [peak.bytes for peak in pipe.session.compiled.peaks]
    return jax.tree.leaves(pipe.params(state)), losses, pipe


@pytest.mark.usefixtures("copies_never_late")
@pytest.mark.parametrize(
    "name",
    grid(
        [
            "pre-norm",
            "chained-keys",
            "resnet",
            "three-readers",
            "unet",
            "spectral",
            "resnet in bfloat16",
        ],
        "resnet",
        "three-readers",
    ),
)
def test_any_mix_of_fates_gives_the_same_bits(name: str) -> None:
    case, _, bfloat16 = name.partition(" in ")
    m = in_bfloat16(CASES[case]()) if bfloat16 else CASES[case]()
    params, losses, pipe = trained(m, 1, "gpipe")
    layers = len(pipe.session.graph.layers)
    for seed, (stages, schedule) in enumerate([(1, "1f1b"), (2, "gpipe"), (3, "1f1b")]):
        cuts = tuple(layers // stages + (s < layers % stages) for s in range(stages))
        ours = trained(m, drawn(pipe.session.graph, cuts, seed), schedule)
        assert ours[1] == losses
        for a, b in zip(ours[0], params, strict=True):
            np.testing.assert_array_equal(a, b)
        kinds = {row.kind for row in ours[2].session.compiled.lowered.rows}
        if stages > 1:
            assert kinds >= {"OUT", "FREE", "IN"}
            assert ours[2].ledger.peak[HOST] > 0


@pytest.mark.usefixtures("copies_never_late")
@pytest.mark.parametrize("name", ["three-readers", "resnet"])
def test_whole_layers_have_one_pair_of_programs_whatever_their_fates(name: str) -> None:
    m = CASES[name]()
    params, losses, kept = trained(m, 1, "gpipe")
    layers = len(kept.session.graph.layers)
    of_layer = [programs.key for programs in kept.session.compiled.programs[0]]
    for seed, (stages, schedule) in enumerate([(2, "gpipe"), (3, "1f1b"), (2, "zb-h1")]):
        cuts = tuple(layers // stages + (s < layers % stages) for s in range(stages))
        plan = drawn(kept.session.graph, cuts, seed)
        ours = trained(m, plan, schedule, whole_layers=True)
        compiled = ours[2].session.compiled
        assert [programs.key for programs in compiled.programs[0]] == of_layer
        assert "R" in {row.kind for row in compiled.lowered.rows}
        assert ours[1] == losses
        for a, b in zip(ours[0], params, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("copies_never_late")
def test_checkpoint_modes_and_patterns_give_the_same_bits_and_less_memory() -> None:
    m = CASES["pre-norm"]()
    params, losses, never = trained(m, 2, "gpipe", checkpoint="never")
    peaks = {}
    for name, options in {
        "always": {"checkpoint": "always"},
        "except_last": {"checkpoint": "except_last"},
        "swapped": {"fates": {"*": "swap"}},
    }.items():
        ours = trained(m, 2, "gpipe", **options)
        assert ours[1] == losses
        for a, b in zip(ours[0], params, strict=True):
            np.testing.assert_array_equal(a, b)
        peaks[name] = ours[2].ledger.peak[0]
    assert peaks["always"] < peaks["except_last"] < never.ledger.peak[0]
    assert peaks["swapped"] < never.ledger.peak[0]


@pytest.mark.usefixtures("copies_never_late")
def test_what_is_computed_again_has_the_bits_of_what_was_kept() -> None:
    """The last micro-batch keeps everything, the others nothing: their programs differ, what they
    compute does not.
    """
    m = CASES["normalized-products"]()
    params, losses, _ = trained(m, 1, "gpipe")
    ours = trained(m, 2, "1f1b", checkpoint="except_last")
    assert ours[1] == losses
    for a, b in zip(ours[0], params, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_was_swapped_and_run_again_is_reported() -> None:
    m = CASES["pre-norm"]()
    batch = batch_of(m, MICRO)
    graph = trace_model(m.loss_fn, m.params, m.batch, m.rng).traced.graph
    layers = len(graph.layers)
    plan = drawn(graph, (layers // 2, layers - layers // 2), seed=5)
    pipe = jvpipe.Pipeline(m.loss_fn, optax.sgd(0.1), plan, MICRO)
    state = pipe.init(m.params, batch, key_of(m))
    pipe.session.monitor()
    state, _ = pipe.step(state, batch)
    found, step = pipe.session.measured(), pipe.session.compiled.lowered
    out = [row for row in step.rows if row.kind == "OUT"]
    assert found.swapped_bytes == sum(step.buffers[row.writes[0]].bytes for row in out) > 0
    assert found.copy_s > 0
    assert found.hidden_s + found.exposed_s >= found.copy_s - 1e-9
    assert found.recomputed_s > 0
    shown = {"F", "R", "B", "U", "OUT", "IN"}
    assert sorted(s.kind for s in found.spans) == sorted(
        row.kind for row in step.rows if row.kind in shown
    )
    assert {s.device for s in found.spans if s.kind == "OUT"} <= {
        f"{d} host" for d in pipe.session.settings.devices
    }


@pytest.mark.thorough
def test_a_product_after_a_norm_has_the_same_bits_again() -> None:
    """At sizes at which compilers like to fuse: a product may be kept, what it is made of is always
    made again.
    """
    workload, draw = load("bert", "mini", blocks=1), np.random.default_rng(0)
    batch = {
        name: draw.integers(0, 60, leaf.shape).astype(leaf.dtype)
        for name, leaf in workload.abstract_batch(64).items()
    }
    params = jax.tree.map(
        lambda leaf: draw.normal(0, 0.1, leaf.shape).astype(leaf.dtype),
        jax.eval_shape(workload.init, quick_key(0)),
    )
    found = []
    choices: list[dict[str, str]] = [{}, {"*dot_general_0": "recompute"}]
    for fates in choices:
        pipe = jvpipe.Pipeline(
            workload.loss_fn,
            optax.sgd(1.0),
            1,
            1,
            "gpipe",
            planner="even",
            fates=fates,
            devices=jax.devices()[:1],
        )
        state = pipe.init(params, batch, quick_key(0))
        state, _ = pipe.step(state, batch)
        assert any(stage.fates for stage in pipe.plan.stages) == bool(fates)
        found.append(jax.tree.leaves(pipe.params(state)))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
