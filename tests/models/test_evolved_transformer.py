from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvpipe.models import load
from jvpipe.models.architecture import Architecture, Block, Supernet
from jvpipe.models.evolution import RegularizedEvolution
from jvpipe.models.evolved_transformer import LEFT, RIGHT, block_kind
from jvpipe.models.workload import Batch, Workload
from jvpipe.trace.model import trace_model
from jvpipe.trace.structure import structure
from tests.grid import grid
from tests.zoo import quick_key

KEY = quick_key(7)


def tiny(**options: Any) -> tuple[Workload, Supernet]:
    workload = load("evolved-transformer", "tiny", **options)
    assert workload.supernet is not None
    return workload, workload.supernet


def fake_batch(workload: Workload, size: int = 4) -> Batch:
    rng, config = np.random.default_rng(0), workload.config
    tokens = rng.integers(5, config.vocabulary, (size, config.tokens + 1)).astype(np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones((size, config.tokens), np.float32),
    }


def jaxpr_of(workload: Workload, params: Any, block: Block) -> str:
    x = jax.ShapeDtypeStruct((2, workload.config.tokens, workload.config.width), np.float32)
    kind = block_kind(workload.config, block)
    return str(jax.make_jaxpr(lambda p, x: kind.module(p)(x, None))(params, x))


def test_a_mutation_leaves_other_blocks_their_names_parameters_and_jaxprs() -> None:
    workload, supernet = tiny(blocks=6)
    rng, changes = np.random.default_rng(0), 0
    parent = supernet.space.random(rng)
    before = supernet.params_of(parent, KEY)
    for _ in range(3):
        child = supernet.space.mutate(parent, rng)
        after = supernet.params_of(child, KEY)
        stayed = before.keys() & after.keys()
        assert {"embeddings", "last", "head"} <= stayed
        assert len(stayed) >= len(before) - 1
        assert after.keys() == {"embeddings", "last", "head", *child.names()}
        changes += len(after.keys() - before.keys())
        for name in stayed:
            jax.tree.map(np.testing.assert_array_equal, before[name], after[name])
        blocks = {name: block for _, name, block in child.blocks() if name in stayed}
        for name, block in blocks.items():
            assert jaxpr_of(workload, before[name], block) == jaxpr_of(workload, after[name], block)
        parent, before = child, after
    assert changes > 0


def test_a_choice_traces_alike_in_every_slot() -> None:
    workload, supernet = tiny(dropout=0.1)
    same = Architecture((Block("conv3_relu", "glu"),) * 4)
    params = jax.eval_shape(lambda: supernet.params_of(same, jax.random.key(0)))
    traced = trace_model(supernet.loss_of(same), params, workload.abstract_batch(2), KEY).traced
    kinds: dict[str, list[Any]] = {}
    for layer, body in zip(traced.graph.layers, traced.bodies, strict=True):
        kinds.setdefault(layer.name.split("/")[0], []).append(
            structure(body.eqns, body.inputs, body.outputs)
        )
    names = same.names()
    assert kinds[names[0]] == kinds[names[1]] == kinds[names[2]] == kinds[names[3]]


@pytest.mark.parametrize("seed", grid(range(2), 0))
def test_the_layers_of_other_blocks_keep_their_programs(seed: int) -> None:
    workload, supernet = tiny(blocks=6)
    rng = np.random.default_rng(seed)
    parent = supernet.space.random(rng)

    def layers(architecture: Architecture) -> dict[str, list[Any]]:
        params = jax.eval_shape(lambda: supernet.params_of(architecture, jax.random.key(0)))
        traced = trace_model(
            supernet.loss_of(architecture), params, workload.abstract_batch(2), KEY
        ).traced
        found: dict[str, list[Any]] = {}
        for layer, body in zip(traced.graph.layers, traced.bodies, strict=True):
            name = layer.name.split("/")[0]
            found.setdefault(name, []).append(structure(body.eqns, body.inputs, body.outputs))
        return found

    before = layers(parent)
    for _ in range(4):
        parent = supernet.space.mutate(parent, rng)
        after = layers(parent)
        assert {
            name for name in before.keys() & after.keys() if before[name] != after[name]
        } == set()
        before = after


@pytest.mark.parametrize("name", sorted({*LEFT, *RIGHT} - {"none"}))
def test_every_operation_tells_and_nobody_looks_ahead(name: str) -> None:
    workload, _ = tiny()
    kind = block_kind(workload.config, Block(name, "none"))
    params = kind.init(KEY)
    x = np.random.default_rng(0).normal(size=(1, 16, 16)).astype(np.float32)
    run = jax.jit(lambda x: kind.module(params)(x, None))
    moved = x.copy()
    moved[0, 8] += np.arange(16, dtype=np.float32)
    changed = np.abs(np.asarray(run(jnp.asarray(moved)) - run(jnp.asarray(x))))[0].max(1) > 1e-6
    assert not changed[:8].any()
    assert changed[8]
    assert (np.abs(np.asarray(run(jnp.asarray(x))) - x) > 1e-6).any()
    assert changed[9:].any() == name.startswith(("attention", "conv"))


def test_a_separable_convolution_is_that_of_a_plain_reference() -> None:
    workload, _ = tiny()
    kind = block_kind(workload.config, Block("conv3_relu", "none"))
    params: Any = jax.tree.map(np.asarray, kind.init(KEY))
    x = np.random.default_rng(0).normal(size=(1, 16, 16)).astype(np.float32)
    centered = x[0] - x[0].mean(1, keepdims=True)
    y = centered / np.sqrt((centered**2).mean(1, keepdims=True) + 1e-6)
    p, mixed = params["left"], np.zeros_like(y)
    for t in range(16):
        for k in range(3):
            if t + k - 2 >= 0:
                mixed[t] += p["channels"]["kernel"][k, 0] * y[t + k - 2]
    hidden = np.maximum(mixed + p["channels"]["bias"], 0)
    expected = x[0] + hidden @ p["output"]["kernel"] + p["output"]["bias"]
    np.testing.assert_allclose(
        kind.module(params)(jnp.asarray(x), None)[0], expected, rtol=1e-4, atol=1e-5
    )


def test_both_branches_add_up() -> None:
    workload, _ = tiny()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 16, 16)).astype(np.float32))
    both = block_kind(workload.config, Block("glu", "ffn1_relu"))
    params = both.init(KEY)
    found = []
    for side, block in (("left", Block("glu", "none")), ("right", Block("ffn1_relu", "none"))):
        one = {"norm": params["norm"], "left": params[side]}
        found.append(block_kind(workload.config, block).module(one)(x, None) - x)
    np.testing.assert_allclose(
        both.module(params)(x, None), x + found[0] + found[1], rtol=1e-5, atol=1e-6
    )


@pytest.mark.thorough
def test_a_few_steps_of_a_stream_of_architectures_learn() -> None:
    workload, supernet = tiny()
    batch, optimizer, losses = fake_batch(workload), optax.adam(1e-2), []
    search = RegularizedEvolution(supernet.space, 0, population=2)
    for architecture in (supernet.default, next(search)):
        loss_fn, params = supernet.loss_of(architecture), supernet.params_of(architecture, KEY)

        @jax.jit
        def step(params: Any, state: Any, loss_fn: Any = loss_fn) -> Any:
            def mean(p: Any) -> jax.Array:
                loss = loss_fn(p, batch, KEY)
                return loss.total / loss.weight

            loss, gradient = jax.value_and_grad(mean)(params)
            updates, state = optimizer.update(gradient, state)
            return optax.apply_updates(params, updates), state, loss

        state, seen = jax.jit(optimizer.init)(params), []
        for _ in range(8):
            params, state, loss = step(params, state)
            seen.append(float(loss))
        assert abs(seen[0] - np.log(300)) < 0.5
        assert seen[-1] < 0.9 * seen[0]
        losses.append(seen)
    assert losses[0] != losses[1]


def test_the_default_is_what_the_workload_trains() -> None:
    workload, supernet = tiny()
    batch = fake_batch(workload)
    params, same = workload.init(KEY), supernet.params_of(supernet.default, KEY)
    jax.tree.map(np.testing.assert_array_equal, params, same)
    one, other = (
        jax.jit(f)(params, batch, KEY).total
        for f in (workload.loss_fn, supernet.loss_of(supernet.default))
    )
    np.testing.assert_array_equal(one, other)


def test_attention_of_heads_that_do_not_fit_is_left_out() -> None:
    assert "attention8" in tiny()[1].space.left
    assert "attention8" not in tiny(width=12)[1].space.left
    with pytest.raises(ValueError, match="unknown operation 'pool': there are attention4"):
        block_kind(tiny()[0].config, Block("pool", "none")).init(KEY)
