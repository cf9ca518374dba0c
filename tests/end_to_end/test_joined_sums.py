"""Sums and means over examples that go to stages of other widths: the step is plain JAX's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvpipe
from tests.grid import grid

D, EXAMPLES, MICRO = 4, 6, 2
DRAW = np.random.default_rng(3)
PARAMS = [(0.5 * DRAW.normal(size=(D, D))).astype(np.float32) for _ in range(6)]
BATCH = {"x": DRAW.normal(size=(MICRO * EXAMPLES, D)).astype(np.float32)}
RATE = 0.3


def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
    """Each layer reads what all before it have left: a sum and a mean, which reach the end too."""
    x, sums, means = batch["x"], [], []
    for w in params:
        x = jnp.tanh(x @ w)
        scale = jnp.sum(w**2)
        sums.append(scale * jnp.sum(x) - sum(sums))
        means.append(scale * jnp.mean(x**2) - sum(means) / 3)
    scales = jnp.arange(1.0, len(params) + 1)
    total = jnp.stack(sums) @ scales / x.shape[0]
    return total + jnp.stack(means) @ scales + jnp.mean(x**2)


def plain_step() -> tuple[Any, Any]:
    """The loss and the parameters after a step of SGD, micro-batches one after another."""

    def whole(params: Any) -> Any:
        parts = [BATCH["x"][m * EXAMPLES : (m + 1) * EXAMPLES] for m in range(MICRO)]
        return sum(loss_fn(params, {"x": part}, None) for part in parts) / MICRO

    loss, gradients = jax.value_and_grad(whole)([jnp.asarray(w) for w in PARAMS])
    return loss, [w - RATE * g for w, g in zip(PARAMS, gradients, strict=True)]


WIDTHS = ((2, 1, 2), (1, 3, 2), (3, 1, 1), (2, 2, 1), (1, 2, 4))


@pytest.mark.parametrize(
    ("widths", "schedule"),
    grid(
        [(widths, schedule) for widths in WIDTHS for schedule in ("1f1b", "zb-h1")],
        ((3, 1, 1), "zb-h1"),
        ((2, 2, 1), "1f1b"),
    ),
)
def test_what_layers_leave_goes_between_any_widths(widths: tuple[int, ...], schedule: str) -> None:
    pipe = jvpipe.Pipeline(
        loss_fn,
        optax.sgd(RATE),
        stages=len(widths),
        microbatches=MICRO,
        planner="even",
        schedule=schedule,
        replicas=widths,
    )
    state, metrics = pipe.step(pipe.init(PARAMS, BATCH, jax.random.key(0)), BATCH)
    loss, params = plain_step()
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
    for found, wanted in zip(pipe.params(state), params, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)


def test_what_is_divided_by_a_count_stays_with_it() -> None:
    def divided(params: Any, batch: Any, rng: Any) -> Any:
        x, total = batch["x"], 0.0
        for w in params:
            x = jnp.tanh(x @ w)
            total = total + jnp.sum(x)
        count = jnp.sum((batch["x"] > 0).astype(jnp.float32))
        return total / jnp.maximum(count, 1.0) * count

    pipe = jvpipe.Pipeline(
        divided, optax.sgd(RATE), stages=2, microbatches=MICRO, planner="even", replicas=(2, 1)
    )
    with pytest.raises(ValueError, match=r"give them as many as each other"):
        pipe.init(PARAMS, BATCH, jax.random.key(0))
