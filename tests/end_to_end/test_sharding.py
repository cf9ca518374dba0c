"""Places of several devices compute what one device does, and hold of each parameter a part."""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jvpipe
from jvpipe.util.devices import Device
from tests.grid import grid
from tests.sharded import (
    FULLY,
    HIDDEN,
    LAYERS,
    MICRO,
    ROWS,
    TENSOR_PARALLEL,
    WIDTH,
    coupled_loss,
    loss_fn,
    meshes,
    parameters,
)

Tree = Any
KEY, STEPS = jax.random.key(3), 2
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))


@cache
def expected() -> tuple[Tree, float]:
    """Parameters after two steps of plain JAX on one device, and the loss of the last."""
    params = jax.tree.map(jax.numpy.asarray, parameters())
    state, loss = OPTIMIZER.init(params), 0.0

    @jax.jit
    def stepped(params: Tree, state: Tree, step: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        keys = [jax.random.fold_in(jax.random.fold_in(KEY, step), m) for m in range(MICRO)]
        parts = np.split(ROWS, MICRO)
        total = lambda p: sum(loss_fn(p, x, k) for x, k in zip(parts, keys, strict=True)) / MICRO  # noqa: E731
        loss, grads = jax.value_and_grad(total)(params)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for step in range(STEPS):
        params, state, loss = stepped(params, state, jax.numpy.int32(step))
    return params, float(loss)


def begun(loss: Any = loss_fn, optimizer: Any = OPTIMIZER, **options: Any) -> jvpipe.Pipeline:
    return jvpipe.Pipeline(
        loss, optimizer, **{"stages": 2, "microbatches": MICRO, "planner": "even", **options}
    )


def same(a: Tree, b: Tree) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), a, b)


def held(state: Any) -> dict[Device, int]:
    """Bytes of a state on each device, by the shards that JAX has there."""
    bytes_on: dict[Device, int] = {}
    for array in state.arrays:
        for shard in array.addressable_shards:
            bytes_on[shard.device] = bytes_on.get(shard.device, 0) + shard.data.nbytes
    return bytes_on


@pytest.mark.parametrize(
    ("sizes", "rules", "options"),
    grid(
        [
            ((2,), TENSOR_PARALLEL, {}),
            fully := ((2, 2), FULLY, {"checkpoint": "except_last"}),
            ((2,), TENSOR_PARALLEL, {"fates": {"*": "swap"}}),
            ((2,), TENSOR_PARALLEL, {"replicas": (2, 1)}),
        ],
        fully,
    ),
    ids=["tensor parallel", "fully sharded, recomputed", "swapped", "replicated"],
)
def test_meshes_compute_what_one_device_does(
    sizes: tuple[int, ...], rules: Any, options: Any
) -> None:
    pipe = begun(devices=meshes(*sizes), sharding=rules, **options)
    state = pipe.init(parameters(), ROWS, KEY)
    *_, (state, metrics) = pipe.run(state, [ROWS] * STEPS)
    params, loss = expected()
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    same(pipe.params(state), params)
    used = {device: size for device, size in pipe.ledger.live_bytes.items() if size}
    assert used == held(state)


@pytest.mark.parametrize("planner", ["even", "jvpipe"])
def test_a_shard_map_runs_over_the_mesh_of_its_stage(planner: str) -> None:
    """Although it names the devices of one mesh, also inside a loop."""
    places = meshes(2)[:2]
    cut = PartitionSpec("model")

    def mapped(params: Any, batch: Any, rng: Any) -> jax.Array:
        product = jax.shard_map(
            lambda x, w: jax.lax.psum(jnp.tanh(x @ w), "model"),
            mesh=places[0],
            in_specs=(PartitionSpec(None, "model"), cut),
            out_specs=PartitionSpec(),
        )
        x, _ = jax.lax.scan(lambda x, _: (product(x, params[0]), None), batch, None, length=2)
        return jnp.mean(product(x, params[1]) ** 2)

    rng = np.random.default_rng(0)
    params = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(2)]
    options: Any = {"devices": places, "sharding": {".*": cut}, "planner": planner}
    pipe = jvpipe.Pipeline(mapped, optax.sgd(0.1), 2, MICRO, **options)
    if planner != "even":
        with pytest.raises(ValueError, match=r"'jvpipe' measures .* give planner='even'"):
            pipe.init(params, ROWS, None)
        return
    state, _ = pipe.step(pipe.init(params, ROWS, None), ROWS)
    gradients = jax.jit(jax.grad(lambda params: mapped(params, ROWS, None)))(params)
    same(pipe.params(state), [w - 0.1 * g for w, g in zip(params, gradients, strict=True)])


def test_a_place_holds_a_part_of_each_parameter_and_its_optimizer_state() -> None:
    """By hand: two blocks of 32 + 8 + 32 numbers, and as many of momentum, in quarters; a scalar of
    the loss.
    """
    pipe = begun(devices=meshes(2, 2), sharding=FULLY)
    state = pipe.init(parameters(), ROWS, KEY)
    live = [pipe.ledger.live_bytes[device] for device in jax.devices()]
    assert live == [4 * (2 * (32 + 8 + 32) // 4 + 1)] * 8
    assert {x.sharding.shard_shape(x.shape) for x in state.arrays} == {(2, 4), (2,), (4, 2), ()}
    hidden = [t.array for t in pipe.session.compiled.graph.tensors if t.array.shape == (4, HIDDEN)]
    assert {(array.spec, array.bytes) for array in hidden} == {
        ((None, "model"), 4 * 4 * HIDDEN // 2)
    }


def test_layers_move_between_meshes_inside_a_step() -> None:
    pipe = begun(devices=meshes(), sharding=TENSOR_PARALLEL, stages=3)
    state = pipe.init(parameters(), ROWS, KEY)
    layers = len(pipe.session.graph.layers)
    state = pipe.migrate(state, jvpipe.Plan.from_cuts([1, layers - 2, 1]), at=(1, 2))
    for _ in range(STEPS):
        state, _ = pipe.step(state, ROWS)
    assert [change.how for change in pipe.session.history] == ["inside"]
    same(pipe.params(state), expected()[0])
    assert {device: size for device, size in pipe.ledger.live_bytes.items() if size} == held(state)


def test_checkpoints_know_of_no_mesh(tmp_path: Path) -> None:
    pipe = begun(devices=meshes(), sharding=TENSOR_PARALLEL)
    state, _ = pipe.step(pipe.init(parameters(), ROWS, KEY), ROWS)
    pipe.save(tmp_path, state)
    others = begun(stages=3), begun(devices=meshes(2, 2), sharding=FULLY)
    states = [other.restore(tmp_path) for other in others]
    losses = [
        float(p.evaluate(s, ROWS)["loss"])
        for p, s in [(pipe, state), *zip(others, states, strict=True)]
    ]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)
    for other, at in [(pipe, state), *zip(others, states, strict=True)]:
        at, metrics = other.step(at, ROWS)
        assert float(metrics["loss"]) == pytest.approx(expected()[1], rel=1e-5)
        same(other.params(at), expected()[0])


def test_examples_cut_along_an_axis_are_coupled_as_on_one_device() -> None:
    """Replicas would have statistics of their own, and refuse the loss."""
    pipe = begun(
        optimizer=optax.sgd(0.3),
        loss=coupled_loss,
        devices=meshes(),
        batch_axis="model",
        has_state=True,
    )
    params, means = parameters(), [np.zeros(HIDDEN, np.float32)] * LAYERS
    state, metrics = pipe.step(pipe.init(params, ROWS, None, means), ROWS)
    total, grads, plain = 0.0, [], jax.jit(jax.value_and_grad(coupled_loss, has_aux=True))
    for x in np.split(ROWS, MICRO):
        (loss, means), grad = plain(params, means, x, None)
        total, grads = total + float(loss) / MICRO, [*grads, grad]
    wanted = jax.tree.map(lambda p, *gs: p - 0.3 * sum(gs) / MICRO, params, *grads)
    assert float(metrics["loss"]) == pytest.approx(total, rel=1e-5)
    same(pipe.params(state), wanted)
    same(pipe.model_state(state), means)
    first, *_ = pipe.session.graph.batch
    assert first.bytes == ROWS.nbytes // MICRO // 2
    with pytest.raises(ValueError, match="cannot be replicated"):
        begun(loss=coupled_loss, has_state=True, replicas=(2, 1)).init(params, ROWS, None, means)
