"""A user's model that is evaluated while it trains: drawn waves through a few layers, with dropout
and an aux.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Waves:
    """Tells what the next points of a wave are; it is soon as good as it gets, so that evaluations
    rise and fall.
    """

    width: int = 32
    layers: int = 4
    batch_size: int = 8
    has_aux: bool = True

    def init(self, key: jax.Array) -> Any:
        keys = jax.random.split(key, self.layers)
        return [jax.random.normal(k, (self.width, self.width)) / self.width**0.5 for k in keys]

    def loss_fn(self, params: Any, batch: Any, rng: jax.Array | None) -> Any:
        x = batch["seen"]
        for i, w in enumerate(params):
            x = jnp.tanh(x @ w)
            if rng is not None:
                x *= jax.random.bernoulli(jax.random.fold_in(rng, i), 0.9, x.shape)
        loss = jnp.mean((x - batch["next"]) ** 2)
        return loss, {"largest": jnp.abs(x).max()}

    def batches(self, seed: int, batch_size: int) -> Iterator[Any]:
        generator = np.random.default_rng(seed)
        while True:
            yield self._batch(generator, batch_size)

    def held_out(self) -> list[Any]:
        return [self._batch(np.random.default_rng(10**6), self.batch_size)]

    def _batch(self, generator: np.random.Generator, batch_size: int) -> Any:
        points = np.arange(2 * self.width) / self.width
        phases = generator.uniform(0, 2 * np.pi, (batch_size, 1))
        wave = np.sin(phases + generator.uniform(1, 9, (batch_size, 1)) * points).astype(np.float32)
        return {"seen": wave[:, : self.width], "next": wave[:, self.width :]}


waves = Waves()
