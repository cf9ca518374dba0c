"""Models as a user would write them, for `--model tests/own.py:NAME` and `--model
tests.own:NAME`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

HELD_OUT_SEED = 10**6


def examples(generator: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    x = generator.normal(size=(count, 4)).astype(np.float32)
    return {"x": x, "y": np.cumsum(x, 1)}


@dataclass
class Plain:
    """What a model must have, its batches made by a generator."""

    blocks: int = 3

    def init(self, key: jax.Array) -> Any:
        return [jax.random.normal(k, (4, 4)) for k in jax.random.split(key, self.blocks)]

    def loss_fn(self, params: Any, batch: Any, rng: jax.Array | None) -> Any:
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    def batches(self, seed: int, batch_size: int) -> Iterable[Any]:
        generator = np.random.default_rng(seed)
        while True:
            yield examples(generator, batch_size)


@dataclass
class Full(Plain):
    """All that a model may have, its batches made by Grain."""

    dtype: str = "float32"
    batch_size = 8
    steps = 3
    has_aux = True
    has_state = True

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        return optax.sgd(0.1 / steps)

    def initial_state(self) -> Any:
        return jnp.zeros(4)

    def loss_fn(self, params: Any, state: Any, batch: Any, rng: Any) -> Any:  # type: ignore
        return (
            super().loss_fn(params, batch, rng),
            0.5 * state + batch["x"].mean(0),
            {"largest": batch["x"].max()},
        )

    def batches(self, seed: int, batch_size: int) -> Iterator[Any]:
        drawn = grain.MapDataset.range(10).seed(seed).shuffle().repeat()
        made = drawn.map(
            lambda i: jax.tree.map(lambda x: x[0], examples(np.random.default_rng(i), 1))
        )
        return iter(made.batch(batch_size).to_iter_dataset())

    def held_out(self) -> Any:
        return [examples(np.random.default_rng(HELD_OUT_SEED), 8)]


class Worsens(Full):
    """Whose parameters go uphill."""

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        return optax.sgd(-0.02)


class Varies(Plain):
    """Whose second batch has more examples, and longer texts, than the first."""

    def batches(self, seed: int, batch_size: int) -> Iterable[Any]:
        generator = np.random.default_rng(seed)
        for n in (1, 2):
            tokens = np.zeros((n * batch_size, 5 * n), np.int32)
            yield examples(generator, n * batch_size) | {"tokens": tokens}


full = Full()
full.sizes = {"deep": Full(5), "plain": Plain}  # type: ignore


class Ends(Plain):
    """Whose batches end."""

    def batches(self, seed: int, batch_size: int) -> Iterable[Any]:
        return [examples(np.random.default_rng(seed), batch_size)] * 2
