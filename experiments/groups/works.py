"""The works whose steps are timed: a loss, parameters and a batch by the name of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments.throughput.data import (
    HEADS,
    MICRO_BATCHES,
    Sizes,
    transformer_batch,
    transformer_params,
)
from experiments.throughput.model import chain_loss, chain_params, transformer_loss
from jvpipe.models import load

MICRO_BATCH = 2  # of the built-in models


@dataclass(frozen=True)
class Work:
    """A loss, and what a step of it takes; `params` may be a function of a key."""

    loss: Callable[..., Any]
    params: Any
    batch: Any


def chain() -> Work:
    """Layers of a 4 x 4 product: nothing but dispatch."""
    batch = {k: np.ones((MICRO_BATCHES, 4), np.float32) for k in "xy"}
    return Work(chain_loss, chain_params(4, layers=32), batch)


def transformer(sizes: Sizes) -> Work:
    """The transformer of experiments/throughput."""
    return Work(transformer_loss, transformer_params(sizes), transformer_batch(sizes))


def built_in(model: str) -> Work:
    """One of the package's models at size mini."""
    workload = load(model, "mini")
    shapes = workload.abstract_batch(MICRO_BATCH * MICRO_BATCHES)
    batch = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    return Work(workload.loss_fn, workload.init, batch)


class Block(nn.Module):
    """A pre-norm block of Linen's own layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
        hidden = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(hidden))


class Transformer(nn.Module):
    """A language model of such blocks."""

    sizes: Sizes

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.sizes.vocabulary, self.sizes.width)(tokens)
        for _ in range(self.sizes.blocks):
            x = Block()(x)
        return nn.Dense(self.sizes.vocabulary)(nn.LayerNorm()(x))


def linen(sizes: Sizes) -> Work:
    """The same sizes in Linen."""
    model, batch = Transformer(sizes), transformer_batch(sizes)

    def loss(params: Any, batch: Any, rng: Any) -> jax.Array:
        logits: Any = model.apply(params, batch["tokens"])
        found = nn.log_softmax(logits)
        return -jnp.take_along_axis(found, batch["targets"][..., None], -1).mean()

    return Work(loss, lambda key: model.init(key, batch["tokens"][:1]), batch)


WORKS: Mapping[str, Callable[[], Work]] = {
    "chain": chain,
    "tiny": partial(transformer, Sizes(16, 8, 32, 2)),
    "small": partial(transformer, Sizes(64, 32, 500, 8)),
    "transformer": partial(transformer, Sizes()),
    "few words": partial(transformer, Sizes(vocabulary=32)),  # what is less is the loss's
    "linen": partial(linen, Sizes()),
    "llama": partial(built_in, "llama"),
    "gpt2": partial(built_in, "gpt2"),
    "bert": partial(built_in, "bert"),
}
