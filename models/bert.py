"""BERT (arXiv:1810.04805) with masked-language modelling, in Flax NNX.

Axes: B batch, T tokens, D model, H heads, K masked positions, V vocabulary.

What differs from the paper makes it learn in far fewer steps: layer norm stands before each sublayer
(arXiv:2002.04745); a token knows where the others are by a bias on its attention (ALiBi, arXiv:2108.12409, as in
MosaicBERT, arXiv:2312.17482) in place of position embeddings; there is one segment and no next-sentence task
(arXiv:1907.11692). The output projection is the token embedding transposed, applied at the masked positions alone.
With `published` it is as in the paper (`bert_published.py`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jvpipe.models import bert_published
from jvpipe.models.blocks import (
    Block,
    Key,
    Logits,
    LossFunction,
    Part,
    Parts,
    TransformerConfig,
    Vectors,
    distance_bias,
    dropped,
    embedding,
    layer_norm,
    linear,
    normed,
    predicting,
)
from jvpipe.models.workload import Data, Workload, sized


@dataclass(frozen=True, kw_only=True)
class MaskedConfig(TransformerConfig):
    """The shape of a transformer that predicts the share `mask_rate` of a record's tokens."""

    mask_rate: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mask_rate < 1:
            raise ValueError(f"mask_rate={self.mask_rate} must lie in [0, 1)")

    @property
    def masked(self) -> int:
        """K: how many tokens of a record are predicted at most (its first token is special)."""
        # A constant, so that shapes do not depend on the record: the rest is filled up with weight 0.
        return max(1, round(self.mask_rate * (self.tokens - 1)))


@dataclass(frozen=True, kw_only=True)
class BertConfig(MaskedConfig):
    """The shape of a BERT. `published`: as in the paper, and then the output projection may be other than `tied`."""

    vocabulary: int = 30522
    tokens: int = 128
    published: bool = False
    tied: bool = True

    def bias(self, tokens: int) -> Float[Array, "H T T"] | None:
        """What is added to scores: a number that falls with the distance of two tokens."""
        return None if self.published else distance_bias(self.heads, tokens)


SIZES = {
    "tiny": BertConfig(blocks=2, width=32, heads=2, vocabulary=300, tokens=16, dropout=0.0),
    "mini": BertConfig(blocks=4, width=256, heads=4, vocabulary=2048, tokens=64, dropout=0.0),
    "base": BertConfig(blocks=12, width=768, heads=12),
    "large": BertConfig(blocks=24, width=1024, heads=16),
    "48": BertConfig(blocks=48, width=1024, heads=16),
}


class Embeddings(nnx.Module):
    """A vector per token."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        self.tokens = embedding(config, rngs, config.vocabulary)
        self.norm = layer_norm(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, tokens: Int[Array, "B T"], key: Key) -> Vectors:
        """The vectors that the first block reads."""
        # No positions: each block's bias tells them (ALiBi), so longer records need no new table.
        return dropped(self.dropout, normed(self.norm, self.tokens(tokens)), key)


class Head(nnx.Module):
    """From a masked position's vector to the logits of the token that stood there."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        self.input_norm = layer_norm(config, rngs)
        self.transform = linear(config, rngs, config.width, config.width)
        self.norm = layer_norm(config, rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocabulary))

    def __call__(self, x: Float[Array, "B K D"], tokens: nnx.Embed) -> Float[Array, "B K V"]:
        """Logits in float32; the embedding of `tokens` is the tied projection."""
        # The norm that BERT has in its last block stands here, since blocks are pre-norm.
        y = jax.nn.gelu(self.transform(normed(self.input_norm, x)))
        logits = tokens.attend(normed(self.norm, y))
        return logits.astype(jnp.float32) + self.bias[...][None, None]


def parts(config: BertConfig) -> Parts:
    """The model taken apart."""
    kinds: dict[str, Part] = {"embeddings": Embeddings, "blocks": Block, "head": Head}
    if config.published:
        kinds = {
            "embeddings": bert_published.Embeddings,
            "blocks": bert_published.PublishedBlock,
            "head": bert_published.Head,
        }
    return Parts(config, kinds)


def loss_function(config: BertConfig) -> LossFunction:
    """The loss of masked tokens, `loss_fn(params, batch, rng)`.

    The batch holds `tokens` [B, T] int32, `positions` and `targets` [B, K] int32 and `weights` [B, K] float32; a
    position of weight 0 does not count. `total` is the sum of the cross entropies in nats, `weight` their number.
    """
    return predicting(logits_function(config), config.dropout)


def logits_function(config: BertConfig) -> Logits:
    """The logits of tokens at `positions` [B, K, V], `logits(params, batch, key)`; no dropout if the key is None."""
    model = parts(config)

    def logits(params: Any, batch: Any, key: Key) -> Float[Array, "B K V"]:
        embeddings = model.part("embeddings", params["embeddings"])
        x = embeddings(batch["tokens"], model.key("embeddings", key))
        x = model.through("blocks", params["blocks"], x, key)  # [B, T, D]
        # Only a sixth of the rows is predicted: the projection to V, the widest map, skips the rest.
        x = jnp.take_along_axis(x, batch["positions"][:, :, None], axis=1)  # [B, K, D]
        return model.part("head", params["head"])(x, embeddings.tokens)

    return logits


def abstract_batch(config: MaskedConfig, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and types of a batch."""
    masked = (batch_size, config.masked)
    return {
        "tokens": jax.ShapeDtypeStruct((batch_size, config.tokens), np.int32),
        "positions": jax.ShapeDtypeStruct(masked, np.int32),
        "targets": jax.ShapeDtypeStruct(masked, np.int32),
        "weights": jax.ShapeDtypeStruct(masked, np.float32),
    }


def open_data(
    config: BertConfig, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> Data:
    """Text as records with masked tokens."""
    # Imported here because a plan needs neither data nor the libraries that read it.
    from jvpipe.models.masking import open_masked_text

    return open_masked_text(config, data_path, run_dir, seed, batch_size)


FORMAT = bert_published.FORMAT


def workload(size: str | None = None, **options: Any) -> Workload:
    """BERT of a size (`tiny`, `mini`, `base`, `large`, `48`), with fields of `BertConfig` replaced by `options`."""
    return sized(
        "bert",
        SIZES,
        size,
        options,
        init=lambda config: parts(config).init,
        loss_function=loss_function,
        abstract_batch=abstract_batch,
        open_data=open_data,
        learning_rate=1e-4,
        batch_size=64,
    )
