"""XLNet (arXiv:1906.08237): tokens predicted in a random order, by two streams of attention, in Flax NNX.

Axes: B batch, T tokens, K predicted ones, Q = T + K rows of both streams, D model, H heads, P distances, V vocabulary.

A row of the first stream knows its token; it sees the tokens that are not predicted, and the predicted ones up to its
own in their order. A row of the second knows only its position; it sees those before it in that order. Both run
through the same blocks, one below the other. Tokens know where others are by learned maps of the sinusoids of their
distance (arXiv:1901.02860). Records are of one segment, and nothing is remembered of the record before.

The size 24 is the paper's large one: 360.2M parameters, published as 360M; the size 36, published as 500M, has 523.9M:
each block maps distances by a matrix of its own, as in the authors' code, and without those there are 486.1M.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jvpipe.models.bert import MaskedConfig, abstract_batch
from jvpipe.models.blocks import (
    LossFunction,
    Parts,
    dropped,
    embedding,
    layer_norm,
    linear,
    normed,
    predicting,
)
from jvpipe.models.transformer import sinusoids
from jvpipe.models.workload import Data, Workload, sized


@dataclass(frozen=True, kw_only=True)
class XlnetConfig(MaskedConfig):
    """The shape of an XLNet; of a record's tokens the share `mask_rate` is predicted."""

    vocabulary: int = 32000
    tokens: int = 512
    mask_rate: float = 1 / 6

    def bias(self, tokens: int) -> None:
        """Each record has a mask of its own, which says which position sees which."""


SIZES = {
    "tiny": XlnetConfig(blocks=2, width=32, heads=2, vocabulary=300, tokens=16, dropout=0.0),
    "mini": XlnetConfig(
        blocks=2, width=128, heads=4, vocabulary=1024, tokens=32, mask_rate=0.25, dropout=0.0
    ),
    "24": XlnetConfig(blocks=24, width=1024, heads=16),
    "36": XlnetConfig(blocks=36, width=1024, heads=16),
}


class Embeddings(nnx.Module):
    """A vector per token, and one for all whose token is not known."""

    def __init__(self, config: XlnetConfig, *, rngs: nnx.Rngs) -> None:
        self.tokens = embedding(config, rngs, config.vocabulary)
        self.unknown = nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.width,)))
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(
        self, tokens: Int[Array, "B T"], predicted: int, key: jax.Array | None
    ) -> Float[Array, "B Q D"]:
        """The rows that the first block reads."""
        x = self.tokens(tokens)
        unknown = jnp.broadcast_to(
            self.unknown[...].astype(x.dtype), (x.shape[0], predicted, x.shape[2])
        )
        return dropped(self.dropout, jnp.concatenate([x, unknown], 1), key)


class Attention(nnx.Module):
    """Rows of both streams look at those of the first, by what these are and by how far away they are."""

    def __init__(self, config: XlnetConfig, *, rngs: nnx.Rngs) -> None:
        self.config, D = config, config.width
        self.queries = linear(config, rngs, D, D, bias=False)
        self.inputs = linear(config, rngs, D, 2 * D, bias=False)
        self.distances = linear(config, rngs, D, D, bias=False)
        self.output = linear(config, rngs, D, D, bias=False)
        self.of_tokens, self.of_distances = nnx.Param(jnp.zeros(D)), nnx.Param(jnp.zeros(D))
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(
        self,
        x: Float[Array, "B Q D"],
        at: Int[Array, "B Q"],
        bias: Float[Array, "B 1 Q T"],
        key: jax.Array | None,
    ) -> Float[Array, "B Q D"]:
        """The mixture of values; `at` are the rows' positions, `bias` says who sees whom."""
        T, D, H = bias.shape[3], self.config.width, self.config.heads
        split = lambda y: y.reshape(*y.shape[:-1], H, D // H)  # noqa: E731
        q = self.queries(x)
        k, v = jnp.split(self.inputs(x[:, :T]), 2, axis=2)
        far = self.distances(sinusoids(2 * T - 1, D, first=1 - T).astype(x.dtype))
        near = jnp.einsum("bqhd,bthd->bhqt", split(q + self._bias(self.of_tokens, q)), split(k))
        away = jnp.einsum("bqhd,phd->bhqp", split(q + self._bias(self.of_distances, q)), split(far))
        distance = at[:, None, :, None] - jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, T), 3)
        scores = (near + jnp.take_along_axis(away, distance + (T - 1), axis=3)).astype(jnp.float32)
        weights = jax.nn.softmax(scores * (D // H) ** -0.5 + bias).astype(x.dtype)
        mixed = jnp.einsum("bhqt,bthd->bqhd", dropped(self.dropout, weights, key), split(v))
        return self.output(mixed.reshape(x.shape))

    def _bias(self, param: Any, q: Float[Array, "B Q D"]) -> Float[Array, "1 1 D"]:
        return param[...].astype(q.dtype)[None, None]


class Block(nnx.Module):
    """Attention, then a feed-forward network, each added to its input, the sum normed."""

    def __init__(self, config: XlnetConfig, *, rngs: nnx.Rngs) -> None:
        units = config.feed_forward or 4 * config.width
        self.attention = Attention(config, rngs=rngs)
        self.attention_norm = layer_norm(config, rngs)
        self.expand = linear(config, rngs, config.width, units)
        self.contract = linear(config, rngs, units, config.width)
        self.feed_forward_norm = layer_norm(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(
        self,
        x: Float[Array, "B Q D"],
        at: Int[Array, "B Q"],
        bias: Float[Array, "B 1 Q T"],
        key: jax.Array | None,
    ) -> Float[Array, "B Q D"]:
        """The rows after one block."""
        k0, k1, k2 = (None, None, None) if key is None else jax.random.split(key, 3)
        x = normed(
            self.attention_norm, x + dropped(self.dropout, self.attention(x, at, bias, k0), k1)
        )
        y = self.contract(jax.nn.gelu(self.expand(x)))
        return normed(self.feed_forward_norm, x + dropped(self.dropout, y, k2))


class Head(nnx.Module):
    """From a row's vector to the logits of its token."""

    def __init__(self, config: XlnetConfig, *, rngs: nnx.Rngs) -> None:
        self.bias = nnx.Param(jnp.zeros(config.vocabulary))

    def __call__(self, x: Float[Array, "B K D"], tokens: nnx.Embed) -> Float[Array, "B K V"]:
        """Logits in float32; the embedding of `tokens` is the tied projection."""
        return tokens.attend(x).astype(jnp.float32) + self.bias[...][None, None]


def order(batch: Any) -> tuple[Int[Array, "B Q"], Float[Array, "B 1 Q T"]]:
    """The position of each row, and what keeps it from what comes later in the order of prediction."""
    (B, T), K = batch["tokens"].shape, batch["positions"].shape[1]
    place = jax.lax.broadcasted_iota(jnp.int32, (B, T), 1)
    turns = jax.lax.broadcasted_iota(jnp.int32, (B, K), 1) + 1
    predicted = (batch["positions"][:, :, None] == place[:, None]) & (batch["weights"] > 0)[
        :, :, None
    ]
    ranks = jnp.sum(jnp.where(predicted, turns[:, :, None], 0), 1)  # 0: not predicted
    sees = ranks[:, None] < jnp.concatenate([ranks + 1, turns], 1)[:, :, None]
    return jnp.concatenate([place, batch["positions"]], 1), jnp.where(sees, 0.0, -1e9)[:, None]


def parts(config: XlnetConfig) -> Parts:
    """The model taken apart."""
    return Parts(config, {"embeddings": Embeddings, "blocks": Block, "head": Head})


def loss_function(config: XlnetConfig) -> LossFunction:
    """The loss of predicted tokens, `loss_fn(params, batch, rng)`.

    The batch holds `tokens` [B, T] int32, `positions` and `targets` [B, K] int32 in the order of prediction, and
    `weights` [B, K] float32; a position of weight 0 does not count. `total` is the sum of the cross entropies in nats,
    `weight` their number.
    """
    return predicting(logits_function(config), config.dropout)


def logits_function(
    config: XlnetConfig,
) -> Callable[[Any, Any, jax.Array | None], Float[Array, "B K V"]]:
    """The logits of tokens at `positions`, `logits(params, batch, key)`; without dropout if the key is None."""
    model = parts(config)

    def logits(params: Any, batch: Any, key: jax.Array | None) -> Float[Array, "B K V"]:
        embeddings = model.part("embeddings", params["embeddings"])
        x = embeddings(batch["tokens"], batch["positions"].shape[1], model.key("embeddings", key))
        x = model.through("blocks", params["blocks"], x, key, *order(batch))
        return model.part("head", params["head"])(x[:, config.tokens :], embeddings.tokens)

    return logits


def open_data(
    config: XlnetConfig, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> Data:
    """Text as records of which some tokens are predicted, in a random order."""
    from jvpipe.models.masking import (
        open_permuted_text,
    )  # a plan needs no data, nor the libraries that read it

    return open_permuted_text(config, data_path, run_dir, seed, batch_size)


def workload(size: str | None = None, **options: Any) -> Workload:
    """XLNet of a size (`tiny`, `mini`, `24`, `36` blocks), with fields of `XlnetConfig` replaced by `options`."""
    return sized(
        "xlnet",
        SIZES,
        size,
        options,
        init=lambda config: parts(config).init,
        loss_function=loss_function,
        abstract_batch=abstract_batch,
        open_data=open_data,
        learning_rate=1e-4,
        batch_size=32,
        mini_rate=1e-3,
    )
