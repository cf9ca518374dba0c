"""Oracles 1 and 2 of the design: equal to plain JAX, and bit-identical however the model was cut."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from tests.zoo import CASES, Case, in_bfloat16

KEY = 7
STEPS = 2


@cache
def case(name: str) -> Case:
    return in_bfloat16(CASES[name[5:]]()) if name.startswith("bf16-") else CASES[name]()


def batch_of(m: Case) -> Any:
    """Twice the case's batch, so that there are 8 examples to split."""
    return jax.tree.map(lambda x: np.concatenate([x, x[::-1]]), m.batch)


def key_of(m: Case) -> jax.Array:
    return jax.random.key(KEY) if m.rng is None else m.rng


def plain_gradients(m: Case, micro: int) -> tuple[Any, Any, Any]:
    """Loss, gradients and model state of a batch on one device, without jvpipe; micro-batches are seen in order."""
    batch, state, sums, total, weight = batch_of(m), m.state, None, 0.0, 0.0
    size = len(jax.tree.leaves(batch)[0]) // micro

    def parts(params: Any, state: Any, part: Any, rng: Any) -> tuple[Any, tuple[Any, Any]]:
        out = m.loss_fn(params, state, part, rng) if m.has_state else m.loss_fn(params, part, rng)
        loss, new = (out[0] if m.has_state or m.has_aux else out), (out[1] if m.has_state else None)
        return (loss.total, (loss.weight, new)) if isinstance(loss, jvpipe.Weighted) else (loss, (np.float32(1), new))

    grad = jax.jit(jax.value_and_grad(parts, has_aux=True))
    for i in range(micro):
        part = jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], batch)
        rng = jax.random.fold_in(jax.random.fold_in(key_of(m), 0), i)
        (loss, (w, state)), g = grad(m.params, state, part, rng)
        total, weight = total + float(loss), weight + float(w)
        sums = g if sums is None else jax.tree.map(jnp.add, sums, g)
    return total / weight, jax.tree.map(lambda g: np.asarray(g) / np.asarray(weight, g.dtype), sums), state


def start(m: Case, stages: int, micro: int, schedule: str, optimizer: Any) -> tuple[jvpipe.Pipeline, jvpipe.State]:
    pipe = jvpipe.Pipeline(
        m.loss_fn,
        optimizer,
        stages=stages,
        microbatches=micro,
        schedule=schedule,
        planner="even",
        has_aux=m.has_aux,
        has_state=m.has_state,
    )
    return pipe, pipe.init(m.params, batch_of(m), key_of(m), m.state)


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_plain_jax(name: str) -> None:
    m, layers = case(name), 0
    for stages, micro in ((1, 1), (2, 8), (3, 2), (4, 4)):
        if layers and stages > layers:
            continue
        loss, gradients, new_state = plain_gradients(m, micro)
        pipe, state = start(m, stages, micro, "1f1b", optax.sgd(1.0))
        layers = len(pipe.graph.layers)
        before = jax.tree.leaves(pipe.params(state))
        state, metrics = pipe.step(state, batch_of(m))
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        scale = float(optax.tree.norm(gradients))
        for old, new, plain in zip(
            before, jax.tree.leaves(pipe.params(state)), jax.tree.leaves(gradients), strict=True
        ):
            np.testing.assert_allclose(old - new, plain, atol=1e-5 * scale + 1e-6)
        for ours, plain in zip(jax.tree.leaves(pipe.model_state(state)), jax.tree.leaves(new_state), strict=True):
            np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)
    assert layers >= 2, "a case that is never cut shows nothing"


BITS = ["pre-norm", "resnet", "unet", "three-readers", "integers", "with-aux", "linen", "nnx"]


def trained(m: Case, stages: int, schedule: str) -> tuple[list[Any], list[float], int]:
    pipe, state = start(m, stages, 4, schedule, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))
    losses = []
    for _ in range(STEPS):
        state, metrics = pipe.step(state, batch_of(m))
        losses.append(float(metrics["loss"]))
    arrays = [*jax.tree.leaves(pipe.params(state)), *jax.tree.leaves(pipe.model_state(state))]
    return arrays, losses, len(pipe.graph.layers)


@pytest.mark.parametrize("name", [*BITS, "bf16-pre-norm", "bf16-resnet"])
def test_bit_identical_for_every_cut_and_schedule(name: str) -> None:
    m = case(name)
    one, one_losses, layers = trained(m, 1, "gpipe")
    for stages, schedule in ((2, "gpipe"), (3, "1f1b"), (4, "1f1b")):
        if stages <= layers:
            arrays, losses, _ = trained(m, stages, schedule)
            assert losses == one_losses
            for ours, other in zip(arrays, one, strict=True):
                np.testing.assert_array_equal(ours, other)
