"""The models that are timed: an 8-block transformer, and a chain of layers that cost nothing but their dispatch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

D, T, V, H, BLOCKS = 256, 128, 2000, 4, 8
MICRO_BATCH, MICRO_BATCHES = 4, 8


def normed(x: jax.Array, g: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * g


def attention(x: jax.Array, wqkv: jax.Array, wo: jax.Array) -> jax.Array:
    q, k, v = (a.reshape(*x.shape[:2], H, D // H) for a in jnp.split(x @ wqkv, 3, -1))
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / np.float32(np.sqrt(D // H)), -1)
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ wo


def transformer_loss(params: Any, batch: Any, rng: Any) -> jax.Array:
    """Next-token loss of a pre-norm transformer."""
    x = params["embed"][batch["tokens"]] + params["pos"]
    for p in params["blocks"]:
        x = x + attention(normed(x, p["ln1"]), p["wqkv"], p["wo"])
        x = x + jax.nn.gelu(normed(x, p["ln2"]) @ p["w1"]) @ p["w2"]
    logits = jax.nn.log_softmax(normed(x, params["lnf"]) @ params["out"])
    return -jnp.take_along_axis(logits, batch["targets"][..., None], -1).mean()


def transformer_params() -> Any:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape, scale=0.02).astype(np.float32)

    ones = np.ones(D, np.float32)
    shapes = {"wqkv": (D, 3 * D), "wo": (D, D), "w1": (D, 4 * D), "w2": (4 * D, D)}
    blocks = [{"ln1": ones, "ln2": ones} | {k: draw(*s) for k, s in shapes.items()} for _ in range(BLOCKS)]
    return {"embed": draw(V, D), "pos": draw(T, D), "lnf": ones, "out": draw(D, V), "blocks": blocks}


def transformer_batch() -> Any:
    rng = np.random.default_rng(1)
    shape = (MICRO_BATCH * MICRO_BATCHES, T)
    return {k: rng.integers(0, V, shape).astype(np.int32) for k in ("tokens", "targets")}


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
    return [(w[i], *(np.zeros(width, np.float32) for _ in range(arrays - 1))) for i in range(layers)]


def chain_batch(width: int = 4) -> Any:
    x = np.random.default_rng(1).normal(size=(2 * MICRO_BATCHES, width)).astype(np.float32)
    return {"x": x, "y": np.zeros_like(x)}
