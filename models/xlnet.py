"""XLNet (arXiv:1906.08237): tokens predicted in a random order, by two streams of attention.

The model uses Flax NNX. Axes: B batch, T tokens, K predicted tokens, Q = T + K rows of both
streams, D model, H heads, P distances, V vocabulary.

The first stream has a row for each token, and the row knows its token. The row sees all tokens that
are not predicted. If its own token is predicted, the row also sees the predicted tokens up to its
own, in the order of prediction. The second stream has a row for each predicted token, but the row
knows only the position of the token. The row sees all tokens that are not predicted, and the
predicted tokens before its own. The two streams share the parameters of the blocks.

A learned map of sinusoids encodes the distance of two tokens (arXiv:1901.02860). Unlike in the
paper, each record is a single segment, so there is no memory of the previous segment.

The mask of the record a b c, if c is predicted first and then a (section 2.3, figure 1):

                        columns: a b c
    first stream    a            x x x    a predicted token sees earlier ones and itself
                    b            . x .    any other token sees none of them
                    c            . x x
    second stream   c            . x .    a position never sees its own token
                    a            . x x

The size 24 is the paper's large model, with 360.2M parameters, published as 360M. The size 36,
published as 500M, has 523.9M parameters. As in the authors' code, each block has its own matrix for
distances. Without these matrices, the size 36 would have 486.1M parameters.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jvpipe.models.bert import MaskedConfig, abstract_batch
from jvpipe.models.blocks import Key, dropped, embedding, keys_of, layer_norm, linear, normed
from jvpipe.models.kinds import Parts
from jvpipe.models.losses import Logits, LossFunction, predicting
from jvpipe.models.transformer import sinusoids
from jvpipe.models.workload import Data, Workload, sized


@dataclass(frozen=True, kw_only=True)
class XlnetConfig(MaskedConfig):
    """The shape of an XLNet. A fraction `mask_rate` of a record's tokens is predicted."""

    vocabulary: int = 32000
    tokens: int = 512
    mask_rate: float = 1 / 6

    def bias(self, tokens: int) -> None:
        """Returns None, because `order` makes a mask for each record."""


SIZES = {
    "tiny": XlnetConfig(blocks=2, width=32, heads=2, vocabulary=300, tokens=16, dropout=0.0),
    "mini": XlnetConfig(
        blocks=2, width=128, heads=4, vocabulary=1024, tokens=32, mask_rate=0.25, dropout=0.0
    ),
    "24": XlnetConfig(blocks=24, width=1024, heads=16),
    "36": XlnetConfig(blocks=36, width=1024, heads=16),
}


Rows = Float[Array, "B Q D"]
"""Both streams: T rows of the first, then K rows of the second. A cut between blocks sends them."""
Seen = Float[Array, "B 1 Q T"]
"""A bias of scores that determines which row sees which token. It is the same for all heads."""


class Embeddings(nnx.Module):
    """A vector per token, and one vector for every row of the second stream."""

    def __init__(self, config: XlnetConfig, *, rngs: nnx.Rngs) -> None:
        self.tokens = embedding(config, rngs, config.vocabulary)
        self.unknown = nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.width,)))
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, tokens: Int[Array, "B T"], predicted: int, key: Key) -> Rows:
        """Returns the rows that the first block reads.

        Args:
            tokens: the record.
            predicted: K.
            key: the key for dropout.
        """
        x = self.tokens(tokens)  # [B, T, D]
        B, _, D = x.shape
        unknown = jnp.broadcast_to(self.unknown[...].astype(x.dtype), (B, predicted, D))
        return dropped(self.dropout, jnp.concatenate([x, unknown], 1), key)


class Attention(nnx.Module):
    """Attention of both streams' rows to the first stream's rows, by content and by distance."""

    def __init__(self, config: XlnetConfig, *, rngs: nnx.Rngs) -> None:
        self.config, D = config, config.width
        self.queries = linear(config, rngs, D, D, bias=False)
        self.inputs = linear(config, rngs, D, 2 * D, bias=False)
        self.distances = linear(config, rngs, D, D, bias=False)
        self.output = linear(config, rngs, D, D, bias=False)
        self.of_tokens = nnx.Param(jnp.zeros(D))
        self.of_distances = nnx.Param(jnp.zeros(D))
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Rows, at: Int[Array, "B Q"], bias: Seen, key: Key) -> Rows:
        """Mixes the values of the first stream for each row.

        Args:
            x: the rows.
            at: the position of each row.
            bias: determines which row sees which token.
            key: the key for dropout of weights.
        """
        T, D = bias.shape[3], self.config.width
        q = self.queries(x)
        # Keys and values come only from the first stream, whose rows know their tokens.
        k, v = jnp.split(self.inputs(x[:, :T]), 2, axis=2)  # [B, T, D] each
        # All P = 2 T - 1 distances, from 1 - T to T - 1, are mapped once and then looked up.
        waves = sinusoids(2 * T - 1, D, first=1 - T).astype(x.dtype)
        far = self.distances(waves)  # [P, D]
        # arXiv:1901.02860, section 3.3: terms (a) and (c) are by content, (b) and (d) by distance.
        by_token = self._split(q + self._bias(self.of_tokens, q))
        near = jnp.einsum("bqhd,bthd->bhqt", by_token, self._split(k))
        by_distance = self._split(q + self._bias(self.of_distances, q))
        away = jnp.einsum("bqhd,phd->bhqp", by_distance, self._split(far))
        row = at[:, None, :, None]
        column = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, T), 3)
        distance = row - column  # [B, 1, Q, T]
        away = jnp.take_along_axis(away, distance + (T - 1), axis=3)  # [B, H, Q, T]
        scores = (near + away).astype(jnp.float32)
        scale = (D // self.config.heads) ** -0.5
        weights = jax.nn.softmax(scores * scale + bias).astype(x.dtype)
        weights = dropped(self.dropout, weights, key)
        mixed = jnp.einsum("bhqt,bthd->bqhd", weights, self._split(v))
        return self.output(mixed.reshape(x.shape))

    def _split(self, y: Float[Array, "*B D"]) -> Float[Array, "*B H _K"]:
        return y.reshape(*y.shape[:-1], self.config.heads, -1)

    def _bias(self, param: Any, q: Rows) -> Float[Array, "1 1 D"]:
        return param[...].astype(q.dtype)[None, None]


class Block(nnx.Module):
    """Attention, then a feed-forward network. Each is added to its input; the sum is normalized."""

    def __init__(self, config: XlnetConfig, *, rngs: nnx.Rngs) -> None:
        units = config.feed_forward or 4 * config.width
        self.attention = Attention(config, rngs=rngs)
        self.attention_norm = layer_norm(config, rngs)
        self.expand = linear(config, rngs, config.width, units)
        self.contract = linear(config, rngs, units, config.width)
        self.feed_forward_norm = layer_norm(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Rows, at: Int[Array, "B Q"], bias: Seen, key: Key) -> Rows:
        """Returns the rows after the block."""
        k0, k1, k2 = keys_of(key, 3)
        mixed = dropped(self.dropout, self.attention(x, at, bias, k0), k1)
        x = normed(self.attention_norm, x + mixed)
        y = self.contract(jax.nn.gelu(self.expand(x)))
        return normed(self.feed_forward_norm, x + dropped(self.dropout, y, k2))


class Head(nnx.Module):
    """Maps the vector of a row to the logits of its token."""

    def __init__(self, config: XlnetConfig, *, rngs: nnx.Rngs) -> None:
        self.bias = nnx.Param(jnp.zeros(config.vocabulary))

    def __call__(self, x: Float[Array, "B K D"], tokens: nnx.Embed) -> Float[Array, "B K V"]:
        """Returns logits in float32. The embedding of `tokens` is the tied projection."""
        return tokens.attend(x).astype(jnp.float32) + self.bias[...][None, None]


def order(batch: Any) -> tuple[Int[Array, "B Q"], Seen]:
    """Returns the position of each row, and the bias that hides later predicted tokens from it."""
    positions = batch["positions"]
    (B, T), K = batch["tokens"].shape, positions.shape[1]
    place = jax.lax.broadcasted_iota(jnp.int32, (B, T), 1)
    turns = jax.lax.broadcasted_iota(jnp.int32, (B, K), 1) + 1
    is_token = positions[:, :, None] == place[:, None]  # [B, K, T]
    predicted = is_token & (batch["weights"] > 0)[:, :, None]
    # A token's rank is its place in the order of prediction, 1 to K, or 0 if it is not predicted.
    ranks = jnp.sum(jnp.where(predicted, turns[:, :, None], 0), 1)  # [B, T]
    # A row sees tokens of ranks below its limit. The limits are such that a row of the first stream
    # sees its own token, and a row of the second stream does not.
    ranks_seen = ranks[:, None]  # [B, 1, T]
    limits = jnp.concatenate([ranks + 1, turns], 1)  # [B, Q]
    sees = ranks_seen < limits[:, :, None]  # [B, Q, T]
    at = jnp.concatenate([place, positions], 1)
    # The first predicted token may see no token. If its whole row were -inf, softmax would give
    # NaN.
    return at, jnp.where(sees, 0.0, -1e9)[:, None]


def parts(config: XlnetConfig) -> Parts:
    """Lists the kinds of modules of the model."""
    return Parts(config, {"embeddings": Embeddings, "blocks": Block, "head": Head})


def loss_function(config: XlnetConfig) -> LossFunction:
    """Makes `loss_fn(params, batch, rng)`, the loss of predicted tokens.

    The batch holds `tokens` [B, T] int32, `positions` and `targets` [B, K] int32 in the order of
    prediction, and `weights` [B, K] float32, which are 0 for positions that do not count. The loss
    has the `total` of the cross entropies in nats, and the sum of the weights.
    """
    return predicting(logits_function(config), config.dropout)


def logits_function(config: XlnetConfig) -> Logits:
    """Makes `logits(params, batch, key)`, the logits [B, K, V] of predicted tokens."""
    model = parts(config)

    def logits(params: Any, batch: Any, key: Key) -> Float[Array, "B K V"]:
        embeddings = model.part("embeddings", params["embeddings"])
        predicted = batch["positions"].shape[1]
        x = embeddings(batch["tokens"], predicted, model.key("embeddings", key))
        x = model.through("blocks", params["blocks"], x, key, *order(batch))
        # Only the second stream predicts, because rows of the first stream know their tokens.
        second = x[:, config.tokens :]  # [B, K, D]
        return model.part("head", params["head"])(second, embeddings.tokens)

    return logits


def open_data(
    config: XlnetConfig, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> Data:
    """Opens text as records in which some tokens are predicted in a random order."""
    # Imported here because a plan needs neither data nor the libraries that read it.
    from jvpipe.models.masking import open_permuted_text

    return open_permuted_text(config, data_path, run_dir, seed, batch_size)


def workload(size: str | None = None, **options: Any) -> Workload:
    """Makes an XLNet of a size (`tiny`, `mini`, `24` or `36` blocks; `mini` by default).

    `options` replace fields of `XlnetConfig`.
    """
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
