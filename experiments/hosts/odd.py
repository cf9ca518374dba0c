"""A model of which one process may have another one: `ODD` in its environment names the part that
is its own.
"""

import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.own import Plain


@dataclass
class Odd(Plain):
    """Three layers, each process's own in one part."""

    def init(self, key: jax.Array) -> Any:
        scale = 0.25 if is_odd("init") else 0.5
        return [scale * jax.random.normal(k, (4, 4)) for k in jax.random.split(key, self.blocks)]

    def loss_fn(self, params: Any, batch: Any, rng: jax.Array | None) -> Any:
        table = np.ones(4, np.float32)
        table[-1] += is_odd("closed-over array")
        x = batch["x"] * table
        for w in params:
            x = jnp.sin(x @ w) if is_odd("loss code") else jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        if is_odd("optimizer"):
            return optax.adam(0.1)
        return optax.sgd(0.2 if is_odd("its rate") else 0.1)


def is_odd(part: str) -> bool:
    """Whether this process has another one of a part."""
    return os.environ.get("ODD") == part
