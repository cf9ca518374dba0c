"""T5 (arXiv:1910.10683): an encoder-decoder model of text, in Flax NNX.

Axes: B batch, T tokens of each half of a record, D model, H heads, V vocabulary.

The encoder reads the first half of a record. The decoder predicts the second half, and each of its
blocks attends to the encoder's result (`read`). In contrast to the paper, layer norms and linear
maps have biases, and the biases of scores by distance are not learned (ALiBi, arXiv:2108.12409).
With `published`, the model is as in the paper (`t5_published.py`).

    inputs ── embeddings ── encoder 0 ── ... ── encoder n ── read ──┬────────────┐
    tokens ── embeddings ─────────────────────────────────── decoder 0 ── ... ── n ── head

All decoder blocks need `read`, so a cut between two of them sends two arrays of [B, T, D]: `read`,
and the result of the block before the cut.
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
)
from jvpipe.models.kinds import Parts
from jvpipe.models.losses import Logits, LossFunction, predicting
from jvpipe.models.workload import Data, Workload, sized

_PUBLISHED = ("head_width", "buckets", "distance", "gated", "tied", "scaled")


@dataclass(frozen=True)
class T5Config(TransformerConfig):
    """The shape of a T5. The fields from `head_width` on apply only if `published`.

    Attributes:
        blocks: the number of blocks of the encoder, and also of the decoder.
        published: whether the model is as in the paper (`t5_published.py`).
        head_width: the width of a head.
        buckets: the number of classes of distances, each of which has a bias.
        distance: all distances from this one on are in the last class.
        gated: whether the feed-forward network is gated.
        tied: whether the output projection is the transposed token embedding.
        scaled: whether the projection's input is multiplied by D^-0.5; None means only if tied.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _PUBLISHED and value != field.default and not self.published:
                raise ValueError(
                    f"{field.name}={value} needs published=True: give both, or neither"
                )
        # Encoder: each direction has half of the classes, and half of these have one distance each.
        if self.buckets < 4:
            raise ValueError(f"buckets={self.buckets} must be at least 4")
        # Decoder: half of all classes have one distance each, the others have longer distances.
        if self.distance <= self.buckets // 2:
            raise ValueError(
                f"distance={self.distance} must be more than {self.buckets // 2}, half of "
                f"buckets={self.buckets}: change one of them"
            )

    def bias(self, tokens: int) -> Float[Array, "H T T"]:
        """Returns the bias by distance (ALiBi)."""
        return distance_bias(self.heads, tokens)


class _DecoderConfig(T5Config):
    def bias(self, tokens: int) -> Float[Array, "H T T"]:
        """Returns the encoder's bias, with -inf for later tokens."""
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
        """Returns what the first block of the encoder or of the decoder reads."""
        return dropped(self.dropout, self.tokens(tokens), key)


class DecoderBlock(nnx.Module):
    """Attention to the encoder, then a block in which tokens attend to no later tokens.

    In the paper, self-attention comes before attention to the encoder.
    """

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.norm = layer_norm(config, rngs)
        self.reading = CrossAttention(config, rngs=rngs)
        self.block = Block(_DecoderConfig(**dataclasses.asdict(config)), rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Vectors, read: Vectors, key: Key) -> Vectors:
        """Returns the vectors after the block."""
        k0, k1, k2 = keys_of(key, 3)
        mixed = self.reading(normed(self.norm, x), read, k0)
        x = x + dropped(self.dropout, mixed, k1)
        return self.block(x, k2)


class Head(nnx.Module):
    """Maps the vector of a position to the logits of the next token, by an untied projection."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.norm = layer_norm(config, rngs)
        self.output = linear(config, rngs, config.width, config.vocabulary)

    def __call__(self, x: Vectors) -> Float[Array, "B T V"]:
        """Returns logits in float32."""
        return self.output(normed(self.norm, x)).astype(jnp.float32)


class Read(nnx.Module):
    """The norm of the encoder's result. All blocks of the decoder read it."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs) -> None:
        self.norm = layer_norm(config, rngs)

    def __call__(self, x: Vectors) -> Vectors:
        """Returns the normalized vectors."""
        return normed(self.norm, x)


def parts(config: T5Config) -> Parts:
    """Lists the kinds of modules of the model."""
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
    """Makes `loss_fn(params, batch, rng)`, the loss of the second halves of records.

    The batch holds `inputs` (for the encoder), `tokens` (for the decoder) and `targets` [B, T]
    int32, and `weights` [B, T] float32, which are 0 for positions that do not count. The loss has
    the `total` of the weighted cross entropies in nats, and the sum of the weights.
    """
    return predicting(logits_function(config), config.dropout)


def logits_function(config: T5Config) -> Logits:
    """Makes `logits(params, batch, key)`, the logits [B, T, V] of the second halves."""
    if config.published:
        return t5_published.logits_function(config)
    model = parts(config)

    def logits(params: Any, batch: Any, key: Key) -> Float[Array, "B T V"]:
        embeddings = model.part("embeddings", params["embeddings"])
        x = embeddings(batch["inputs"], model.key("embeddings", key))
        x = model.through("encoder", params["encoder"], x, key)
        read = model.part("read", params["read"])(x)
        # The module `read` has no dropout, so its key is free for the second use of the embeddings.
        y = embeddings(batch["tokens"], model.key("read", key))
        y = model.through("decoder", params["decoder"], y, key, read)
        return model.part("head", params["head"])(y)

    return logits


def abstract_batch(config: T5Config, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and types of a batch."""
    shape = (batch_size, config.tokens)
    dtypes = {"inputs": np.int32, "tokens": np.int32, "targets": np.int32, "weights": np.float32}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


def open_data(
    config: T5Config, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> Data:
    """Opens text as records whose second half is predicted from the first."""
    # Imported here because a plan needs neither data nor the libraries that read it.
    from jvpipe.models.text import open_halves

    sizes = {"vocabulary": config.vocabulary, "tokens": config.tokens}
    return open_halves(data_path, run_dir, seed, batch_size, **sizes)


FORMAT = t5_published.FORMAT


def workload(size: str | None = None, **options: Any) -> Workload:
    """Makes a T5 of a size (`tiny`, `mini`, `small`, `780m`; `mini` by default).

    `options` replace fields of `T5Config`.
    """
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
