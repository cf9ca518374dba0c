"""Layers whose forward and whose both halves of a backward sleep, each for a time of its own."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from experiments.migration.naps import sleep

Seconds = tuple[float, float, float]
"""Of a layer's forward, of the cotangents of its inputs, of its gradients: F, I, W."""


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dense(x: jax.Array, w: jax.Array, seconds: Seconds) -> jax.Array:
    """The product of both; it and its two derivatives sleep."""
    return sleep(x @ w, seconds[0])


def _forward(
    x: jax.Array, w: jax.Array, seconds: Seconds
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return sleep(x @ w, seconds[0]), (x, w)


def _backward(
    seconds: Seconds, left: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = left
    return sleep(g @ w.T, seconds[1]), sleep(x.T @ g, seconds[2])


dense.defvjp(_forward, _backward)


def loss_fn(seconds: tuple[Seconds, ...]) -> Any:
    """A chain of layers that take these times."""

    def loss(params: Any, batch: Any, rng: Any) -> jax.Array:
        x = batch["x"]
        for w, each in zip(params, seconds, strict=True):
            x = jnp.tanh(dense(x, w, each))
        return jnp.mean((x - batch["y"]) ** 2)

    return loss
