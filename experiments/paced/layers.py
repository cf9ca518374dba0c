"""Paced layers: beside its own small work, a layer's forward and backward each spin for a given
time.

On few cores an idle device lends its core to a busy one, which hides imbalance. A spin is a scalar
loop whose steps depend on each other: no second core can help. Its iterations are calibrated in
seconds before it is used.
"""

import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 32


def spin(x: jax.Array, iterations: int) -> jax.Array:
    """`x`, once a loop that starts from it has run."""
    end = jax.lax.fori_loop(
        0, iterations, lambda _, c: c * np.float32(0.999) + np.float32(1e-3), x.ravel()[0]
    )
    return jnp.where(end > 1e30, end, x)  # never so, which the compiler cannot know


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def paced(x: jax.Array, forward: int, backward: int) -> jax.Array:
    """`x`; its forward and its backward spin."""
    return spin(x, forward)


def _forward(x: jax.Array, forward: int, backward: int) -> tuple[jax.Array, None]:
    return spin(x, forward), None


def _backward(forward: int, backward: int, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (spin(g, backward),)


paced.defvjp(_forward, _backward)


def iterations_per_s() -> float:
    """How many iterations of a spin a core does in a second."""
    count = 2_000_000
    run = jax.jit(lambda x: spin(x, count))
    x, taken = jnp.ones(4), []
    for _ in range(6):
        start_s = time.perf_counter()
        run(x).block_until_ready()
        taken.append(time.perf_counter() - start_s)
    return count / statistics.median(taken[1:])


def paced_loss(seconds: tuple[tuple[float, float], ...]) -> Any:
    """A chain of layers; layer i's forward and backward spin for `seconds[i]`."""
    rate = iterations_per_s()
    counts = [(int(f * rate), int(b * rate)) for f, b in seconds]

    def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
        x = batch["x"]
        for w, (f, b) in zip(params, counts, strict=True):
            x = jnp.tanh(paced(x, f, b) @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    return loss_fn


def params(layers: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [
        draw.normal(size=(WIDTH, WIDTH), scale=WIDTH**-0.5).astype(np.float32)
        for _ in range(layers)
    ]


def batch(examples: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(1).normal(size=(examples, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.zeros_like(x)}
