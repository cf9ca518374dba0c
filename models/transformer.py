"""The Transformer (arXiv:1706.03762): an encoder and a decoder that translate, in Flax NNX.

Axes: B batch, T tokens of a source sentence and of its translation, D model, H heads, V vocabulary.

As in the paper, layer norm comes after each sublayer, positions are sinusoids, and one table of
vectors serves both languages and, transposed, the output. The paper gives 65M parameters for its
base model and 213M for its big model. Here they have 63.1M and 214.2M, with a vocabulary of 37,000
and with biases in all linear maps.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jvpipe.models.blocks import (
    CrossAttention,
    Key,
    TransformerConfig,
    Vectors,
    dropped,
    embedding,
    keys_of,
    layer_norm,
    linear,
    looking_back,
    normed,
)
from jvpipe.models.kinds import Parts
from jvpipe.models.losses import Logits, LossFunction
from jvpipe.models.translators import (
    TranslatorConfig,
    abstract_batch,
    loss_of,
    open_data,
    unseen,
)
from jvpipe.models.workload import Workload, sized


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(TranslatorConfig, TransformerConfig):
    """The shape of a Transformer. The encoder and the decoder have `blocks` blocks each."""

    vocabulary: int = 37000
    tokens: int = 128

    def bias(self, tokens: int) -> Float[Array, "1 T T"]:
        """Returns the bias that hides later tokens."""
        return looking_back(tokens)


Mask = Float[Array, "B 1 1 T"]
"""A bias of scores that hides padding. It is the same for all heads and all queries."""
_config = EncoderDecoderConfig
SIZES = {
    "tiny": _config(
        blocks=2, width=32, heads=2, vocabulary=300, tokens=8, dropout=0.0, smoothing=0.0
    ),
    "mini": _config(blocks=2, width=128, heads=4, vocabulary=1024, tokens=32, dropout=0.2),
    "base": _config(blocks=6, width=512, heads=8),
    "big": _config(blocks=6, width=1024, heads=16, dropout=0.3),
}


class Embeddings(nnx.Module):
    """The sum of a token's scaled vector and its position's sinusoids; also computes logits."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        # Rows of length 1 suit the projection to logits. Multiplied by the root of D (section 3.4),
        # they suit the sum with sinusoids.
        self.tokens = embedding(config, rngs, config.vocabulary, spread=config.width**-0.5)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, tokens: Int[Array, "B T"], key: Key) -> Vectors:
        """Returns the vectors that a first block reads."""
        x = self.tokens(tokens)
        T, D = x.shape[1:]
        scaled = x * D**0.5
        positions = sinusoids(T, D).astype(x.dtype)[None]  # [1, T, D]
        return dropped(self.dropout, scaled + positions, key)

    def logits(self, x: Vectors) -> Float[Array, "B T V"]:
        """Computes the logits of the next token, in float32."""
        return self.tokens.attend(x).astype(jnp.float32)


class Block(nnx.Module):
    """The two sublayers that every block has. Each is added to its input; the sum is normalized."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        units = config.feed_forward or 4 * config.width
        self.attention = CrossAttention(config, rngs=rngs)
        self.attention_norm = layer_norm(config, rngs)
        self.expand = linear(config, rngs, config.width, units)
        self.contract = linear(config, rngs, units, config.width)
        self.feed_forward_norm = layer_norm(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def attended(self, x: Vectors, bias: jax.Array, key: Key) -> Vectors:
        """Returns the vectors after self-attention. `bias` hides tokens from other tokens."""
        k0, k1 = keys_of(key, 2)
        mixed = dropped(self.dropout, self.attention(x, x, k0, bias), k1)
        return normed(self.attention_norm, x + mixed)

    def fed(self, x: Vectors, key: Key) -> Vectors:
        """Returns the vectors after the feed-forward network."""
        y = self.contract(jax.nn.relu(self.expand(x)))  # equation 2 of the paper
        return normed(self.feed_forward_norm, x + dropped(self.dropout, y, key))


class EncoderBlock(Block):
    """A block of the encoder: attention, then the feed-forward network."""

    def __call__(self, x: Vectors, mask: Mask, key: Key) -> Vectors:
        """Returns the vectors after the block. `mask` hides padding."""
        k0, k1 = keys_of(key, 2)
        return self.fed(self.attended(x, mask, k0), k1)


class DecoderBlock(Block):
    """A block of the decoder: self-attention, attention to the encoder, feed-forward network."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.config = config
        self.reading = CrossAttention(config, rngs=rngs)
        self.reading_norm = layer_norm(config, rngs)

    def __call__(self, x: Vectors, read: Vectors, mask: Mask, key: Key) -> Vectors:
        """Returns the vectors after the block.

        Args:
            x: the vectors of the target tokens.
            read: the result of the encoder.
            mask: hides the padding of `read`.
            key: the key for dropout.
        """
        k0, k1, k2, k3 = keys_of(key, 4)
        x = self.attended(x, self.config.bias(x.shape[1])[None], k0)
        mixed = dropped(self.dropout, self.reading(x, read, k1, mask), k2)
        x = normed(self.reading_norm, x + mixed)
        return self.fed(x, k3)


def sinusoids(tokens: int, width: int, first: int = 0) -> Float[Array, "T D"]:
    """Returns the vectors of positions from `first` on (section 3.5 of the paper).

    Half of the numbers are sines and half are cosines, with wavelengths from 2 pi to 20,000 pi.
    """
    half = width // 2
    # As in tensor2tensor, all sines come before all cosines, while the paper alternates them. The
    # order does not matter, because the following linear maps mix all numbers of a vector.
    step = -np.log(1e4) / max(1, half - 1)
    rates = jnp.exp(jax.lax.iota(jnp.float32, half) * step)
    positions = jax.lax.broadcasted_iota(jnp.float32, (tokens, half), 0) + first
    angles = positions * rates[None]
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], 1)  # [T, 2 half]
    return jnp.pad(waves, ((0, 0), (0, width % 2)))  # a last 0 if D is odd


def parts(config: EncoderDecoderConfig) -> Parts:
    """Lists the kinds of modules of the model."""
    kinds = {"embeddings": Embeddings, "encoder": EncoderBlock, "decoder": DecoderBlock}
    return Parts(config, kinds, stacked=("encoder", "decoder"))


def loss_function(config: EncoderDecoderConfig) -> LossFunction:
    """Makes `loss_fn(params, batch, rng)`, the loss of target tokens as in `loss_of`."""
    return loss_of(config, logits_function(config))


def logits_function(config: EncoderDecoderConfig) -> Logits:
    """Makes `logits(params, batch, key)`, the logits [B, T, V] of target tokens."""
    model = parts(config)

    def logits(params: Any, batch: Any, key: Key) -> Float[Array, "B T V"]:
        embeddings = model.part("embeddings", params["embeddings"])
        # The mask [B, 1, 1, T] hides the padding of inputs from the encoder and the decoder.
        mask = unseen(batch["lengths"], config.tokens)[:, None, None]
        x = embeddings(batch["inputs"], model.key("embeddings", key))
        read = model.through("encoder", params["encoder"], x, key, mask)
        # This key comes after that of the last block, so the second use of the table has its own
        # dropout.
        y = embeddings(batch["tokens"], model.key("decoder", key, config.blocks))
        y = model.through("decoder", params["decoder"], y, key, read, mask)
        return embeddings.logits(y)

    return logits


def workload(size: str | None = None, **options: Any) -> Workload:
    """Makes a Transformer of a size (`tiny`, `mini`, `base`, `big`; `mini` by default).

    `options` replace fields of `EncoderDecoderConfig`.
    """
    return sized(
        "transformer",
        SIZES,
        size,
        options,
        init=lambda config: parts(config).init,
        loss_function=loss_function,
        abstract_batch=abstract_batch,
        open_data=open_data,
        learning_rate=5e-4,
        batch_size=128,
        mini_rate=2e-3,
    )
