"""The Transformer (arXiv:1706.03762): an encoder reads a sentence, a decoder writes its translation, in Flax NNX.

Axes: B batch, T tokens that are read, and as many that are written, D model, H heads, V vocabulary.

As in the paper: layer norm stands after each sublayer, positions are sinusoids, and one table of vectors serves both
languages and, transposed, the output. Its base model has 65M parameters there, its big one 213M, both rounded; here it
is 63.1M and 214.2M with a vocabulary of 37,000 and biases of all products.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jvpipe.ir.weighted import Weighted
from jvpipe.models.blocks import (
    CrossAttention,
    Parts,
    TransformerConfig,
    dropped,
    layer_norm,
    linear,
    looking_back,
    normed,
)
from jvpipe.models.translators import (
    Logits,
    TranslatorConfig,
    abstract_batch,
    loss_of,
    open_data,
    unseen,
)
from jvpipe.models.workload import Workload, sized


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(TranslatorConfig, TransformerConfig):
    """The shape of a Transformer; `blocks` are those of the encoder, and as many has the decoder."""

    vocabulary: int = 37000
    tokens: int = 128

    def bias(self, tokens: int) -> Float[Array, "1 T T"]:
        """Nobody looks ahead."""
        return looking_back(tokens)


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
    """A vector per token plus one per position; also the output's."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        init, dtype = nnx.initializers.normal(config.width**-0.5), jnp.dtype(config.dtype)
        self.tokens = nnx.Embed(
            config.vocabulary, config.width, embedding_init=init, dtype=dtype, rngs=rngs
        )
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, tokens: Int[Array, "B T"], key: jax.Array | None) -> Float[Array, "B T D"]:
        """The vectors that a first block reads."""
        x = self.tokens(tokens)
        D = x.shape[2]
        return dropped(
            self.dropout, x * D**0.5 + sinusoids(tokens.shape[1], D).astype(x.dtype)[None], key
        )

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Computes the logits of the next token, in float32."""
        return self.tokens.attend(x).astype(jnp.float32)


class Block(nnx.Module):
    """Attention and a feed-forward network, each added to its input, the sum normed."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        units = config.feed_forward or 4 * config.width
        self.attention = CrossAttention(config, rngs=rngs)
        self.attention_norm = layer_norm(config, rngs)
        self.expand = linear(config, rngs, config.width, units)
        self.contract = linear(config, rngs, units, config.width)
        self.feed_forward_norm = layer_norm(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def attended(
        self, x: Float[Array, "B T D"], bias: jax.Array, key: jax.Array | None
    ) -> Float[Array, "B T D"]:
        """The tokens after they have looked at each other."""
        k0, k1 = _keys(key, 2)
        return normed(
            self.attention_norm, x + dropped(self.dropout, self.attention(x, x, k0, bias), k1)
        )

    def fed(self, x: Float[Array, "B T D"], key: jax.Array | None) -> Float[Array, "B T D"]:
        """The tokens, each for itself."""
        y = self.contract(jax.nn.relu(self.expand(x)))
        return normed(self.feed_forward_norm, x + dropped(self.dropout, y, key))


class EncoderBlock(Block):
    """One after the other."""

    def __call__(
        self, x: Float[Array, "B T D"], mask: Float[Array, "B 1 1 T"], key: jax.Array | None
    ) -> Float[Array, "B T D"]:
        """The tokens after one block."""
        k0, k1 = _keys(key, 2)
        return self.fed(self.attended(x, mask, k0), k1)


class DecoderBlock(Block):
    """Its tokens look back, and between the two at what was read."""

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.config = config
        self.reading = CrossAttention(config, rngs=rngs)
        self.reading_norm = layer_norm(config, rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        read: Float[Array, "B T D"],
        mask: Float[Array, "B 1 1 T"],
        key: jax.Array | None,
    ) -> Float[Array, "B T D"]:
        """The tokens after one block."""
        k0, k1, k2, k3 = _keys(key, 4)
        x = self.attended(x, self.config.bias(x.shape[1])[None], k0)
        x = normed(
            self.reading_norm, x + dropped(self.dropout, self.reading(x, read, k1, mask), k2)
        )
        return self.fed(x, k3)


def sinusoids(tokens: int, width: int, first: int = 0) -> Float[Array, "T D"]:
    """The vectors of positions from `first` on: half sines, half cosines, of wave lengths from 2 pi to 20,000 pi."""
    half = width // 2
    rates = jnp.exp(jax.lax.iota(jnp.float32, half) * (-np.log(1e4) / max(1, half - 1)))
    angles = (jax.lax.broadcasted_iota(jnp.float32, (tokens, half), 0) + first) * rates[None]
    return jnp.pad(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], 1), ((0, 0), (0, width % 2)))


def parts(config: EncoderDecoderConfig) -> Parts:
    """The model taken apart."""
    kinds = {"embeddings": Embeddings, "encoder": EncoderBlock, "decoder": DecoderBlock}
    return Parts(config, kinds, stacked=("encoder", "decoder"))


def loss_function(config: EncoderDecoderConfig) -> Callable[[Any, Any, jax.Array | None], Weighted]:
    """The loss of the tokens that are written, that of `loss_of`."""
    return loss_of(config, logits_function(config))


def logits_function(config: EncoderDecoderConfig) -> Logits:
    """The logits of the tokens that are written, `logits(params, batch, key)`; no dropout if the key is None."""
    model = parts(config)

    def logits(params: Any, batch: Any, key: jax.Array | None) -> Float[Array, "B T V"]:
        embeddings = model.part("embeddings", params["embeddings"])
        mask = unseen(batch["lengths"], config.tokens)[:, None, None]
        x = embeddings(batch["inputs"], model.key("embeddings", key))
        read = model.through("encoder", params["encoder"], x, key, mask)
        y = embeddings(batch["tokens"], model.key("decoder", key, config.blocks))
        return embeddings.logits(model.through("decoder", params["decoder"], y, key, read, mask))

    return logits


def workload(size: str | None = None, **options: Any) -> Workload:
    """A Transformer of a size (`tiny`, `mini`, `base`, `big`), with fields replaced by `options`."""
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


def _keys(key: jax.Array | None, count: int) -> Any:
    return [None] * count if key is None else jax.random.split(key, count)
