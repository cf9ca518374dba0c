"""A small model whose parameters can lie over the axes of meshes, and such meshes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from tests.zoo import dropout

WIDTH, HIDDEN, LAYERS, MICRO = 4, 8, 2, 3
ROWS = np.random.default_rng(1).normal(size=(4 * MICRO, WIDTH)).astype(np.float32)
TENSOR_PARALLEL = {".*/up": PartitionSpec(None, "model"), ".*/(bias|down)": PartitionSpec("model")}
FULLY = {
    ".*/up": PartitionSpec("fsdp", "model"),
    ".*/down": PartitionSpec("model", "fsdp"),
    ".*/bias": PartitionSpec(("fsdp", "model")),
}


def shapes() -> list[dict[str, jax.ShapeDtypeStruct]]:
    """The shapes of the parameters."""
    of_layer = {"up": (WIDTH, HIDDEN), "bias": (HIDDEN,), "down": (HIDDEN, WIDTH)}
    return [
        {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in of_layer.items()}
    ] * LAYERS


def parameters() -> Any:
    """Drawn anew, always the same."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: 0.5 * rng.normal(size=leaf.shape).astype(np.float32), shapes())


def loss_fn(params: Any, batch: Any, rng: Any) -> jax.Array:
    """A residual MLP with dropout."""
    x = batch
    for i, layer in enumerate(params):
        h = jnp.tanh(x @ layer["up"] + jnp.broadcast_to(layer["bias"], (x.shape[0], HIDDEN)))
        if rng is not None:
            h = dropout(h, jax.random.fold_in(rng, i))
        x = x + h @ layer["down"]
    return jnp.mean(x**2)


def meshes(*sizes: int) -> list[Mesh]:
    """As many meshes as there are devices for; of two sizes the first is of an axis for whole
    layers' weights.
    """
    sizes = sizes or (2,)
    each, names = math.prod(sizes), ("fsdp", "model")[-len(sizes) :]
    devices = jax.devices()
    groups = (devices[i : i + each] for i in range(0, len(devices) - each + 1, each))
    return [Mesh(np.array(group).reshape(sizes), names) for group in groups]


def coupled_loss(params: Any, state: Any, batch: Any, rng: Any) -> tuple[jax.Array, Any]:
    """Batch norm, whose statistics the state remembers, and a loss that tells each example from the
    others.
    """
    x, kept = batch, []
    for layer, mean in zip(params, state, strict=True):
        h = x @ layer["up"]
        center, spread = jnp.mean(h, 0, keepdims=True), jnp.var(h, 0, keepdims=True)
        h = jnp.tanh((h - center) * jax.lax.rsqrt(spread + 0.1) + layer["bias"][None])
        kept.append(0.9 * mean + 0.1 * center[0])
        x = x + h @ layer["down"]
    alike = jax.nn.log_softmax(x @ x.T, axis=-1)
    return -jnp.mean(jnp.diagonal(alike)), kept
