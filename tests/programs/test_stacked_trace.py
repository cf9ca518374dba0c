"""An optimizer does to stacked layers what plain optax does to their arrays."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jvpipe
from jvpipe.programs.optimizer_pieces import OptimizerCut, cut_optimizer
from jvpipe.trace.stacks import Stacks
from tests.grid import grid
from tests.programs.test_optimizer_pieces import Interpreter

D, LAYERS, MICRO, STEPS = 6, 3, 2, 3
NUMBERS = np.random.default_rng(0)
PARAMS = {
    "blocks": {
        "b": NUMBERS.normal(size=(LAYERS, D)).astype(np.float32) / 10,
        "w": NUMBERS.normal(size=(LAYERS, D, D)).astype(np.float32) / 3,
    },
    "head": NUMBERS.normal(size=(D, 2)).astype(np.float32),
}
STACKS = Stacks(jax.tree.structure(PARAMS), (LAYERS, LAYERS, None))
OWNERS = [*range(LAYERS), *range(LAYERS), LAYERS]


def by_rank(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim == 3, params)


def matrices(params: Any) -> Any:
    """What muon is to make orthogonal: the last two axes, each layer by itself."""
    last = lambda x: contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)  # noqa: E731
    return jax.tree.map(lambda x: last(x) if D in x.shape[:-1] else None, params)


def then_sgd(optimizer: Any, rate: float = 0.1) -> Any:
    return optax.chain(optimizer, optax.sgd(rate))


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "nesterov": optax.sgd(0.1, 0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2),
    "lion": optax.lion(1e-2),
    "rmsprop": optax.rmsprop(1e-2),
    "clip_by_global_norm": then_sgd(optax.clip_by_global_norm(0.1)),
    "masked": optax.adamw(1e-2, weight_decay=0.5, mask=by_rank),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(0.1),
    "adaptive_grad_clip": then_sgd(optax.adaptive_grad_clip(0.01)),
    "clip_by_block_rms": then_sgd(optax.clip_by_block_rms(1e-3), 10.0),
    "centralize": then_sgd(optax.centralize()),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=3),
    "muon": contrib.muon(1e-2),
    "muon of each layer": contrib.muon(1e-2, muon_weight_dimension_numbers=matrices),
    "sm3": optax.sm3(0.1),
    "novograd": optax.novograd(1e-2),
    "fromage": optax.fromage(1e-2),
    "MultiSteps": optax.MultiSteps(optax.lamb(1e-2), 2).gradient_transformation(),
}


def cut(optimizer: Any, params: Any = PARAMS, stacks: Stacks = STACKS) -> OptimizerCut:
    slices = stacks.split(params)
    return cut_optimizer(
        optimizer, slices, OWNERS, [1] * len(OWNERS), microbatches=MICRO, stacks=stacks
    )


def close(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (np.shape(a), a.dtype) == (np.shape(b), b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * max(np.abs(b).max(), 1e-3))


def updated(optimizer: Any, grads: Any, params: Any, state: Any) -> tuple[Any, Any]:
    """What plain optax makes of whole arrays."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state


ELEMENTWISE = ("sgd", "nesterov", "adam", "adamw", "lion", "rmsprop", "clip_by_global_norm")
OTHERS = [name for name in OPTIMIZERS if name not in (*ELEMENTWISE, "MultiSteps")]


@pytest.mark.parametrize("name", grid(OPTIMIZERS, *OTHERS[::4]))
def test_pieces_of_slices_do_what_optax_does_to_the_arrays(name: str) -> None:
    optimizer, pieces = OPTIMIZERS[name], cut(OPTIMIZERS[name])
    ours = Interpreter(pieces, STACKS.split(PARAMS), OWNERS)
    params: Any = jax.tree.map(jnp.asarray, PARAMS)
    state = optimizer.init(params)
    for step in range(STEPS):
        draw = np.random.default_rng(step)
        summed = jax.tree.map(
            lambda x, draw=draw: draw.normal(size=x.shape).astype(x.dtype), params
        )
        ours.update([[jnp.asarray(x)] for x in jax.tree.leaves(STACKS.split(summed))])
        grads = jax.tree.map(lambda x: jnp.asarray(x / np.float32(MICRO)), summed)
        params, state = updated(optimizer, grads, params, state)
    split = jax.tree.structure(STACKS.split(PARAMS))
    close(STACKS.join(jax.tree.unflatten(split, ours.params)), params)
    close(STACKS.join(jax.tree.unflatten(pieces.state_tree, ours.state)), state)


def test_what_belongs_to_a_layer_stays_with_it() -> None:
    lamb = cut(OPTIMIZERS["lamb"])
    owners = {leaf.array.name: leaf.owner for leaf in lamb.state}
    assert [owners[f"0/mu/blocks/w/{i}"] for i in range(LAYERS)] == list(range(LAYERS))
    assert lamb.cross_layer == ("scale_by_trust_ratio",)
    for name in ("nesterov", "adamw", "masked"):
        assert not cut(OPTIMIZERS[name]).cross_layer


def test_a_scan_over_matrices_of_all_layers_runs_with_each() -> None:
    params = {"w": np.ones((LAYERS, 32, 32), np.float32)}
    stacks, dims = Stacks(jax.tree.structure(params), (LAYERS,)), contrib.MuonDimensionNumbers(1, 2)
    muon = contrib.muon(1e-2, muon_weight_dimension_numbers={"w": dims})
    pieces = cut_optimizer(
        muon, stacks.split(params), range(LAYERS), [1] * LAYERS, microbatches=1, stacks=stacks
    )
    assert [piece.layer for piece in pieces.update] == list(range(LAYERS))
    assert len({piece.key for piece in pieces.update}) == 1


def test_layers_alike_have_programs_alike() -> None:
    for name in ("adamw", "masked", "lamb", "adaptive_grad_clip"):
        pieces = [piece for piece in cut(OPTIMIZERS[name]).update if piece.layer in range(LAYERS)]
        keys = {(piece.phase, piece.key) for piece in pieces}
        assert len(keys) == len({phase for phase, _ in keys}), name


def mixing(size: int) -> tuple[Any, Any, Stacks]:
    """An optimizer that takes the mean of all layers' gradients, and stacked parameters."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(lambda g: g - jnp.mean(g, axis=0, keepdims=True), updates), state

    params = {"blocks": {"w": np.ones((LAYERS, size, size), np.float32)}}
    stacks = Stacks(jax.tree.structure(params), (LAYERS,))
    return optax.GradientTransformation(lambda params: optax.EmptyState(), update), params, stacks


def test_what_cannot_be_cut_is_refused_with_the_cure() -> None:
    optimizer, params, stacks = mixing(32)
    slices = stacks.split(params)
    options: Any = {"microbatches": 1, "stacks": stacks}
    with pytest.raises(
        ValueError,
        match=r"mixing combines arrays .* in one reduce_sum\. .* computed from 'blocks/w'\. .*"
        r'With Pipeline\(stacked="per_layer"\)',
    ):
        cut_optimizer(optimizer, slices, range(LAYERS), [1] * LAYERS, **options)
    optimizer, params, stacks = mixing(8)  # little enough to cross
    options["stacks"] = stacks
    cut_optimizer(optimizer, stacks.split(params), range(LAYERS), [1] * LAYERS, **options)


# A pipeline


def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
    def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ p["w"] + p["b"][None]) + x, None

    x, _ = jax.lax.scan(block, batch, params["blocks"])
    return jnp.mean((x @ params["head"] - 1) ** 2)


def batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(2 * MICRO, D)).astype(np.float32)


def trained(optimizer: Any, stages: int, **options: Any) -> tuple[jvpipe.Pipeline, jvpipe.State]:
    pipe = jvpipe.Pipeline(loss_fn, optimizer, stages, MICRO, planner="even", **options)
    state = pipe.init(PARAMS, batch(0), None)
    for step in range(STEPS):
        state, _ = pipe.step(state, batch(step))
    return pipe, state


def same(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", grid(OPTIMIZERS, "adaptive_grad_clip"))
def test_a_pipeline_trains_as_optax_does(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    found = [trained(optimizer, stages) for stages in (2, 1)]
    (params, state), (other, there) = [
        (pipe.params(state), pipe.optimizer_state(state)) for pipe, state in found
    ]
    same((params, state), (other, there))
    plain: Any = jax.tree.map(jnp.asarray, PARAMS)
    own, gradient = optimizer.init(plain), jax.jit(jax.grad(loss_fn))
    for step in range(STEPS):
        plain, own = updated(optimizer, gradient(plain, batch(step), None), plain, own)
    close(params, plain)
    assert jax.tree.structure(state) == jax.tree.structure(own)


def test_a_checkpoint_is_restored_under_another_cut(tmp_path: Path) -> None:
    optimizer = OPTIMIZERS["novograd"]
    (pipe, state), (other, _) = trained(optimizer, 2), trained(optimizer, 3)
    pipe.save(tmp_path / "here", state)
    there = other.restore(tmp_path / "here")
    same(pipe.optimizer_state(state), other.optimizer_state(there))
    state, there = pipe.step(state, batch(STEPS))[0], other.step(there, batch(STEPS))[0]
    same(pipe.params(state), other.params(there))


def test_per_layer_an_optimizer_sees_slices() -> None:
    pipe, state = trained(OPTIMIZERS["adaptive_grad_clip"], 2, stacked="per_layer")
    plain: Any = jax.tree.map(jnp.asarray, STACKS.split(PARAMS))
    gradient = jax.jit(jax.grad(STACKS.of_slices(loss_fn)))
    own = OPTIMIZERS["adaptive_grad_clip"].init(plain)
    for step in range(STEPS):
        grads = gradient(plain, batch(step), None)
        plain, own = updated(OPTIMIZERS["adaptive_grad_clip"], grads, plain, own)
    close(pipe.params(state), STACKS.join(plain))


def test_a_pipeline_names_the_stack_that_cannot_be_cut_and_the_cure() -> None:
    optimizer, params, _ = mixing(32)

    def loss(params: Any, batch: Any, rng: Any) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["blocks"]["w"])
        return jnp.mean(x**2)

    pipe = jvpipe.Pipeline(loss, optimizer, 2, MICRO, planner="even")
    with pytest.raises(
        ValueError, match=r"from 'blocks/w'\. .*With Pipeline\(stacked=\"per_layer\"\)"
    ):
        pipe.init(params, np.ones((MICRO, 32), np.float32), None)


def test_another_word_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"stacked must be None .* or 'per_layer' .*, not 'layers'"
    ):
        jvpipe.Pipeline(loss_fn, optax.sgd(0.1), stacked="layers")
