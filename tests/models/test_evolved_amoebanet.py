from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvpipe.models import load
from jvpipe.models.architecture import Architecture, Block, Supernet
from jvpipe.models.evolved_amoebanet import LEFT, RIGHT, block_chains, init, run_block
from jvpipe.models.workload import Batch, Workload
from jvpipe.trace.model import trace_model
from jvpipe.trace.structure import structure
from tests.zoo import quick_key

KEY = quick_key(7)


def tiny(**options: Any) -> tuple[Workload, Supernet]:
    workload = load("evolved-amoebanet", "tiny", **options)
    assert workload.supernet is not None
    return workload, workload.supernet


def fake_batch(size: int = 8) -> Batch:
    images = np.random.default_rng(0).normal(size=(size, 8, 8, 3)).astype(np.float32)
    return {
        "images": images,
        "targets": np.arange(size, dtype=np.int32) % 4,
        "weights": np.ones(size, np.float32),
    }


@pytest.mark.parametrize("left", LEFT)
def test_shapes_stay_whatever_the_operations(left: str) -> None:
    x = jax.ShapeDtypeStruct((2, 8, 8, 8), np.float32)
    for right in RIGHT:
        block = Block(left, right)
        params = {side: init(chain, KEY) for side, chain in block_chains(block, 8).items()}
        found = jax.eval_shape(lambda p, x, block=block: run_block(block, p, x), params, x)
        assert (found.shape, found.dtype) == (x.shape, x.dtype)


def test_a_mutation_leaves_other_blocks_their_names_and_parameters() -> None:
    _, supernet = tiny()
    rng = np.random.default_rng(0)
    parent = supernet.space.random(rng)
    before = supernet.params_of(parent, KEY)
    for _ in range(3):
        child = supernet.space.mutate(parent, rng)
        after = supernet.params_of(child, KEY)
        stayed = before.keys() & after.keys()
        assert after.keys() == {"entry_0", "entry_1", "last", "head", *child.names()}
        assert len(stayed) >= len(before) - 1
        for name in stayed:
            jax.tree.map(np.testing.assert_array_equal, before[name], after[name])
        parent, before = child, after


def layers(
    workload: Workload, supernet: Supernet, architecture: Architecture
) -> dict[str, list[Any]]:
    params = jax.eval_shape(lambda: supernet.params_of(architecture, jax.random.key(0)))
    traced = trace_model(
        supernet.loss_of(architecture), params, workload.abstract_batch(2), KEY
    ).traced
    found: dict[str, list[Any]] = {}
    for layer, body in zip(traced.graph.layers, traced.bodies, strict=True):
        name = layer.name.split("/")[0]
        found.setdefault(name, []).append(structure(body.eqns, body.inputs, body.outputs))
    return found


def test_a_choice_is_cut_and_traced_alike_in_every_slot_of_a_group() -> None:
    workload, supernet = tiny(slots=10)
    same = Architecture((Block("conv_3x3", "max_pool_3x3"),) * 10)
    found, names = layers(workload, supernet, same), same.names()
    assert found[names[0]] == found[names[1]] == found[names[4]]
    assert found[names[5]] == found[names[9]] != found[names[1]]


def test_the_layers_of_other_blocks_keep_their_programs() -> None:
    workload, supernet = tiny()
    rng = np.random.default_rng(0)
    parent = supernet.space.random(rng)
    before = layers(workload, supernet, parent)
    for _ in range(3):
        parent = supernet.space.mutate(parent, rng)
        after = layers(workload, supernet, parent)
        assert {
            name for name in before.keys() & after.keys() if before[name] != after[name]
        } == set()
        before = after


def test_bfloat16_is_computed_with_and_parameters_are_float32() -> None:
    workload, _ = tiny(dtype="bfloat16")
    params = jax.eval_shape(workload.init, KEY)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    jaxpr = jax.make_jaxpr(workload.loss_fn)(params, workload.abstract_batch(2), KEY)
    assert {
        v.aval.dtype
        for e in jaxpr.eqns
        if e.primitive.name == "conv_general_dilated"
        for v in e.outvars
    } == {jnp.dtype("bfloat16")}
    assert {aval.dtype for aval in jaxpr.out_avals} == {np.dtype("float32")}


def test_a_block_is_that_of_a_plain_reference() -> None:
    block = Block("conv_1x1", "conv_1x1")
    params: Any = {side: init(chain, KEY) for side, chain in block_chains(block, 8).items()}
    x = np.random.default_rng(0).normal(size=(2, 4, 4, 8)).astype(np.float32)

    def unit(p: Any, x: np.ndarray) -> np.ndarray:
        y = np.maximum(x, 0) @ np.asarray(p["0"]["kernel"])[0, 0]
        return (y - y.mean((0, 1, 2))) / np.sqrt(y.var((0, 1, 2)) + 1e-5)

    wide = x.astype(np.float64)
    expected = (
        wide + unit(params["left"], wide) + unit(params["right"], unit(params["project"], wide))
    )
    np.testing.assert_allclose(
        run_block(block, params, jnp.asarray(x)), expected, rtol=1e-3, atol=1e-4
    )


@pytest.mark.thorough
def test_a_few_steps_learn() -> None:
    workload, _ = tiny(slots=2)
    params, batch, optimizer = jax.jit(workload.init)(KEY), fake_batch(), optax.adam(1e-2)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        def mean(p: Any) -> jax.Array:
            loss = workload.loss_fn(p, batch, KEY)
            return loss.total / loss.weight

        loss, gradient = jax.value_and_grad(mean)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, loss

    state, losses = jax.jit(optimizer.init)(params), []
    for _ in range(8):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 3}, "slots=3 must be a multiple of groups=2"),
        ({"filters": 6}, "filters=6 must be a multiple of 4"),
        ({"dtype": "float16"}, "unknown dtype"),
        ({"classes": 1}, "too small"),
    ],
)
def test_what_load_refuses(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("evolved-amoebanet", "tiny", **options)
