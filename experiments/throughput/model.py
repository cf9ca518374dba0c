"""The models that are timed: an 8-block transformer, and a chain of layers that cost nothing but
their dispatch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.throughput.data import HEADS, MICRO_BATCHES


def normed(x: jax.Array, g: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * g


def attention(x: jax.Array, wqkv: jax.Array, wo: jax.Array) -> jax.Array:
    B, T, D = x.shape
    q, k, v = (a.reshape(B, T, HEADS, D // HEADS) for a in jnp.split(x @ wqkv, 3, -1))
    weights = jax.nn.softmax(
        jnp.einsum("bthd,bshd->bhts", q, k) / np.float32(np.sqrt(D // HEADS)), -1
    )
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ wo


def transformer_loss(
    params: Any,
    batch: Any,
    rng: Any,
    before: Callable[[int, jax.Array], jax.Array] = lambda _, x: x,
) -> jax.Array:
    """Next-token loss of a pre-norm transformer; `before` sees what goes into each half of a block,
    with its number.
    """
    x = params["embed"][batch["tokens"]] + params["pos"]
    for i, p in enumerate(params["blocks"]):
        x = before(2 * i, x)
        x = x + attention(normed(x, p["ln1"]), p["wqkv"], p["wo"])
        x = before(2 * i + 1, x)
        x = x + jax.nn.gelu(normed(x, p["ln2"]) @ p["w1"]) @ p["w2"]
    logits = jax.nn.log_softmax(normed(x, params["lnf"]) @ params["out"])
    return -jnp.take_along_axis(logits, batch["targets"][..., None], -1).mean()


def chain_loss(params: Any, batch: Any, rng: Any) -> jax.Array:
    """A chain of tiny layers: what takes time is their dispatch."""
    x = batch["x"]
    for w, *biases in params:
        x = x @ w
        for b in biases:
            x = x + b
        x = jnp.tanh(x)
    return jnp.mean((x - batch["y"]) ** 2)


def chain_params(arrays: int, layers: int = 8, width: int = 4) -> Any:
    w = np.random.default_rng(0).normal(size=(layers, width, width)).astype(np.float32)
    return [
        (w[i], *(np.zeros(width, np.float32) for _ in range(arrays - 1))) for i in range(layers)
    ]


def chain_batch(width: int = 4) -> Any:
    x = np.random.default_rng(1).normal(size=(2 * MICRO_BATCHES, width)).astype(np.float32)
    return {"x": x, "y": np.zeros_like(x)}
