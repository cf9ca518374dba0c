"""T5 (arXiv:1910.10683): an encoder reads, a decoder writes, in Flax NNX.

Axes: B batch, T tokens that are read, and as many that are written, D model, H heads, V vocabulary.

The decoder predicts the second half of a record, and every block of it looks at the first half as the encoder left
it. What differs from the paper: layer norm has a bias, products have biases, and tokens know where others are by ALiBi
(arXiv:2108.12409) in place of learned distances.

    inputs ── embeddings ── encoder 0 ── ... ── encoder n ── read ──┬────────────┬──────┐
    tokens ── embeddings ─────────────────────────────────── decoder 0 ── ... ── n ── head

What is read stays alive up to the last decoder block, so a cut in the decoder carries two arrays of [B, T, D].
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jvpipe.models import t5_published
from jvpipe.models.blocks import (
    Block,
    CrossAttention,
    Key,
    Logits,
    LossFunction,
    Parts,
    TransformerConfig,
    Vectors,
    distance_bias,
    dropped,
    embedding,
    keys_of,
    layer_norm,
    linear,
    looking_back,
    normed,
    predicting,
)
from jvpipe.models.workload import Data, Workload, sized


@dataclass(frozen=True)
class T5Config(TransformerConfig):
    """The shape of a T5; `blocks` are those of the encoder, and as many has the decoder.

    `published`: as in the paper (`t5_published.py`), with heads of `head_width`, `buckets` for distances up to
    `distance`, a feed-forward network that may be `gated`, and a projection `tied` to the embedding or not; it reads
    vectors that are `scaled` by D^-0.5, or are not. None: those for a tied one are.
    """

    vocabulary: int = 32128
    tokens: int = 128
    published: bool = False
    head_width: int = 64
    buckets: int = 32
    distance: int = 128
    gated: bool = False
    tied: bool = True
    scaled: bool | None = None

    def bias(self, tokens: int) -> Float[Array, "H T T"]:
        """What is added to scores: a number that falls with the distance of two tokens."""
        return distance_bias(self.heads, tokens)


class _DecoderConfig(T5Config):
    def bias(self, tokens: int) -> Float[Array, "H T T"]:
        """The encoder's bias, and tokens ahead are hidden."""
        return looking_back(tokens) + distance_bias(self.heads, tokens)


SIZES = {
    "tiny": T5Config(blocks=2, width=32, heads=2, vocabulary=300, tokens=8, dropout=0.0),
    "mini": T5Config(blocks=2, width=256, heads=4, vocabulary=2048, tokens=32, dropout=0.0),
    "small": T5Config(blocks=6, width=512, heads=8),
    "780m": T5Config(blocks=24, width=1024, heads=16),
}


class Embeddings(nnx.Module):
    """A vector per token."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.tokens = embedding(config, rngs, config.vocabulary)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, tokens: Int[Array, "B T"], key: Key) -> Vectors:
        """The vectors that a first block reads."""
        return dropped(self.dropout, self.tokens(tokens), key)


class DecoderBlock(nnx.Module):
    """A look at what was read, then a block whose tokens look back."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.norm = layer_norm(config, rngs)
        self.reading = CrossAttention(config, rngs=rngs)
        self.block = Block(_DecoderConfig(**dataclasses.asdict(config)), rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Vectors, read: Vectors, key: Key) -> Vectors:
        """The tokens after one block."""
        k0, k1, k2 = keys_of(key, 3)
        mixed = self.reading(normed(self.norm, x), read, k0)
        x = x + dropped(self.dropout, mixed, k1)
        return self.block(x, k2)


class Head(nnx.Module):
    """From a position's vector to the logits of the next token, by a projection of its own."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.norm = layer_norm(config, rngs)
        self.output = linear(config, rngs, config.width, config.vocabulary)

    def __call__(self, x: Vectors) -> Float[Array, "B T V"]:
        """Logits in float32."""
        return self.output(normed(self.norm, x)).astype(jnp.float32)


class Read(nnx.Module):
    """What the encoder passes on: its tokens, normed."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.norm = layer_norm(config, rngs)

    def __call__(self, x: Vectors) -> Vectors:
        """The same for every block of the decoder."""
        return normed(self.norm, x)


def parts(config: T5Config) -> Parts:
    """The model taken apart."""
    if config.published:
        return t5_published.parts(config)
    kinds = {
        "embeddings": Embeddings,
        "encoder": Block,
        "read": Read,
        "decoder": DecoderBlock,
        "head": Head,
    }
    return Parts(config, kinds, stacked=("encoder", "decoder"))


def loss_function(config: T5Config) -> LossFunction:
    """The loss of the tokens that are written, `loss_fn(params, batch, rng)`.

    The batch holds `inputs`, `tokens` and `targets` [B, T] int32, which the encoder reads, the decoder reads and the
    decoder predicts, and `weights` [B, T] float32; a position of weight 0 does not count. `total` is the sum of the
    cross entropies in nats, `weight` their number.
    """
    return predicting(logits_function(config), config.dropout)


def logits_function(config: T5Config) -> Logits:
    """The logits of what is written [B, T, V], `logits(params, batch, key)`; no dropout if the key is None."""
    if config.published:
        return t5_published.logits_function(config)
    model = parts(config)

    def logits(params: Any, batch: Any, key: Key) -> Float[Array, "B T V"]:
        embeddings = model.part("embeddings", params["embeddings"])
        x = embeddings(batch["inputs"], model.key("embeddings", key))
        x = model.through("encoder", params["encoder"], x, key)
        read = model.part("read", params["read"])(x)
        # `read` drops nothing, so its key is free for the second use of the embeddings.
        y = embeddings(batch["tokens"], model.key("read", key))
        y = model.through("decoder", params["decoder"], y, key, read)
        return model.part("head", params["head"])(y)

    return logits


def abstract_batch(config: T5Config, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and types of a batch."""
    shape = (batch_size, config.tokens)
    dtypes = {"inputs": np.int32, "tokens": np.int32, "targets": np.int32, "weights": np.float32}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


def open_data(
    config: T5Config, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> Data:
    """Text as records whose second half is written when the first has been read."""
    # Imported here because a plan needs neither data nor the libraries that read it.
    from jvpipe.models.text import open_halves

    sizes = {"vocabulary": config.vocabulary, "tokens": config.tokens}
    return open_halves(data_path, run_dir, seed, batch_size, **sizes)


FORMAT = t5_published.FORMAT


def workload(size: str | None = None, **options: Any) -> Workload:
    """T5 of a size (`tiny`, `mini`, `small`, `780m`), with fields of `T5Config` replaced by `options`."""
    return sized(
        "t5",
        SIZES,
        size,
        options,
        init=lambda config: parts(config).init,
        loss_function=loss_function,
        abstract_batch=abstract_batch,
        open_data=open_data,
        learning_rate=1e-4,
        batch_size=128,
    )
