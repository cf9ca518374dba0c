"""Oracles 1 and 2 of the design: equal to plain JAX, and bit-identical however the model was cut.

Stages lie on two devices in turns, or on one where transfers are not the matter: programs are
compiled per device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from tests.grid import grid
from tests.zoo import CASES, Case, in_bfloat16

MICRO_BATCH = 2


def batch_of(m: Case, micro: int) -> Any:
    """A batch of `micro` micro-batches, made of the case's examples."""
    return jax.tree.map(lambda x: np.resize(x, (micro * MICRO_BATCH, *x.shape[1:])), m.batch)


def key_of(m: Case) -> jax.Array:
    return jax.random.key(7) if m.rng is None else m.rng


def plain_gradient(m: Case) -> Any:
    """Loss and gradients of a micro-batch, without jvpipe; compiled once."""

    def parts(params: Any, state: Any, part: Any, rng: Any) -> tuple[Any, tuple[Any, Any]]:
        out = m.loss_fn(params, state, part, rng) if m.has_state else m.loss_fn(params, part, rng)
        loss, new = (out[0] if m.has_state or m.has_aux else out), (out[1] if m.has_state else None)
        return (
            (loss.total, (loss.weight, new))
            if isinstance(loss, jvpipe.Weighted)
            else (loss, (np.float32(1), new))
        )

    return jax.jit(jax.value_and_grad(parts, has_aux=True))


def plain_gradients(m: Case, grad: Any, micro: int) -> tuple[Any, Any, Any]:
    """Loss, gradients and model state of a batch on one device, without jvpipe; micro-batches are
    seen in order.
    """
    state, sums, total, weight = m.state, None, 0.0, 0.0
    for i in range(micro):
        part = jax.tree.map(
            lambda x, i=i: x[i * MICRO_BATCH : (i + 1) * MICRO_BATCH], batch_of(m, micro)
        )
        rng = jax.random.fold_in(jax.random.fold_in(key_of(m), 0), i)
        (loss, (w, state)), g = grad(m.params, state, part, rng)
        total, weight = total + float(loss), weight + float(w)
        sums = g if sums is None else jax.tree.map(jnp.add, sums, g)
    return (
        total / weight,
        jax.tree.map(lambda g: np.asarray(g) / np.asarray(weight, g.dtype), sums),
        state,
    )


def start(
    m: Case, stages: int, micro: int, schedule: str, optimizer: Any, *, together: bool = False
) -> tuple[jvpipe.Pipeline, jvpipe.State]:
    pipe = jvpipe.Pipeline(
        m.loss_fn,
        optimizer,
        stages=stages,
        microbatches=micro,
        schedule=schedule,
        planner="even",
        devices=(jax.devices()[: 1 if together else 2] * stages)[:stages],
        has_aux=m.has_aux,
        has_state=m.has_state,
    )
    return pipe, pipe.init(m.params, batch_of(m, micro), key_of(m), m.state)


GRADIENTS = (
    "scanned",
    "experts",
    "with-aux",
    "threefry",
    "custom-rules",
    "cond",
    "integers",
    "unused",
    "nested",
)
"""One of each kind; the others are compared with one device below."""


@pytest.mark.parametrize("name", grid(CASES, *GRADIENTS))
def test_gradients_equal_plain_jax(name: str) -> None:
    m = CASES[name]()
    grad = plain_gradient(m)
    loss, gradients, new_state = plain_gradients(m, grad, micro=3)
    pipe, state = start(m, 2, 3, "1f1b", optax.sgd(1.0), together=True)
    assert len(pipe.session.graph.layers) >= 2, "a case that is never cut shows nothing"
    before = jax.tree.leaves(pipe.params(state))
    state, metrics = pipe.step(state, batch_of(m, 3))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    scale = float(optax.tree.norm(gradients))
    after, plain = jax.tree.leaves(pipe.params(state)), jax.tree.leaves(gradients)
    for old, new, gradient in zip(before, after, plain, strict=True):
        np.testing.assert_allclose(old - new, gradient, atol=1e-5 * scale + 1e-6)
    for ours, theirs in zip(
        jax.tree.leaves(pipe.model_state(state)), jax.tree.leaves(new_state), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def trained(
    m: Case, stages: int, schedule: str, *, together: bool = False
) -> tuple[list[Any], list[float], int]:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    pipe, state = start(m, stages, 4, schedule, optimizer, together=together)
    losses = []
    for _ in range(2):
        state, metrics = pipe.step(state, batch_of(m, 4))
        losses.append(float(metrics["loss"]))
    arrays = [*jax.tree.leaves(pipe.params(state)), *jax.tree.leaves(pipe.model_state(state))]
    return arrays, losses, len(pipe.session.graph.layers)


def assert_same_bits(
    ours: tuple[list[Any], list[float], int], theirs: tuple[list[Any], list[float], int]
) -> None:
    assert ours[1] == theirs[1]
    for a, b in zip(ours[0], theirs[0], strict=True):
        np.testing.assert_array_equal(a, b)


SEVERAL = ("scanned", "with-aux")
"""One of each kind; two others are cut in every way below."""


@pytest.mark.parametrize("name", grid(CASES, *SEVERAL))
def test_bit_identical_on_several_devices(name: str) -> None:
    m = CASES[name]()
    one = trained(m, 1, "gpipe")
    assert_same_bits(trained(m, min(4, one[2]), "1f1b"), one)


@pytest.mark.thorough
def test_bit_identical_in_bfloat16() -> None:
    m = in_bfloat16(CASES["resnet"]())
    assert_same_bits(trained(m, 3, "1f1b"), trained(m, 1, "gpipe"))


@pytest.mark.parametrize(
    "name",
    grid(
        ["mlp", "three-readers", "integers", "resnet", "chained-keys"],
        "mlp",
        "three-readers",
    ),
)
def test_bit_identical_for_every_cut_and_schedule(name: str) -> None:
    m = CASES[name]()
    one = trained(m, 1, "gpipe")
    for stages, schedule in ((2, "1f1b"), (3, "gpipe")):
        assert_same_bits(trained(m, stages, schedule), one)


@pytest.mark.parametrize(
    "name", grid(["mlp", "chained-keys", "post-norm in bfloat16"], "chained-keys")
)
def test_bit_identical_with_all_stages_on_one_device(name: str) -> None:
    m = in_bfloat16(CASES["post-norm"]()) if name.endswith("bfloat16") else CASES[name]()
    assert_same_bits(trained(m, 3, "1f1b", together=True), trained(m, 1, "gpipe"))
