"""The smallest model that has something to cut: three layers of four numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jvpipe

MICRO = 2
PARAMS = [np.array([[0.5, 0.1], [0.2, 0.4]], np.float32) * (1 + i) for i in range(3)]
BATCH = {"x": np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32) / 8}
HERE, THERE = jvpipe.Plan.from_cuts([2, 1]), jvpipe.Plan.from_cuts([1, 2])


def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def pipeline(stages: Any = HERE, **options: Any) -> jvpipe.Pipeline:
    options = {
        "devices": jax.devices()[:2],
        "planner": "even",
        "optimizer": optax.sgd(0.5),
    } | options
    return jvpipe.Pipeline(loss_fn, options.pop("optimizer"), stages, MICRO, **options)


def begun(stages: Any = HERE, **options: Any) -> tuple[jvpipe.Pipeline, jvpipe.State]:
    pipe = pipeline(stages, **options)
    return pipe, pipe.init(PARAMS, BATCH, None)
