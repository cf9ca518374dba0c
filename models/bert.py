"""BERT (arXiv:1810.04805) with masked language modeling, in Flax NNX.

Axes: B batch, T tokens, D model, H heads, K masked positions, V vocabulary.

Three departures from the paper make the model learn in far fewer steps:

- Layer norm comes before each sublayer (arXiv:2002.04745).
- A bias of attention scores replaces position embeddings (ALiBi, arXiv:2108.12409), as in
  MosaicBERT (arXiv:2312.17482).
- There is one segment and no next-sentence task (arXiv:1907.11692).

The output projection is the transposed token embedding. Only masked positions are projected. With
`published`, the layers are as in the paper (`bert_published.py`).
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
    TransformerConfig,
    Vectors,
    distance_bias,
    dropped,
    embedding,
    layer_norm,
    linear,
    normed,
)
from jvpipe.models.kinds import Part, Parts
from jvpipe.models.losses import Logits, LossFunction, predicting
from jvpipe.models.workload import Data, Workload, sized


@dataclass(frozen=True, kw_only=True)
class MaskedConfig(TransformerConfig):
    """The shape of a transformer that predicts a fraction `mask_rate` of a record's tokens."""

    mask_rate: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mask_rate < 1:
            raise ValueError(f"mask_rate={self.mask_rate} must lie in [0, 1)")

    @property
    def masked(self) -> int:
        """K, the largest number of predicted tokens of a record."""
        # The first token of a record is special and never predicted. All records have the same K,
        # and so the same shape. Entries of weight 0 pad the positions.
        return max(1, round(self.mask_rate * (self.tokens - 1)))


@dataclass(frozen=True, kw_only=True)
class BertConfig(MaskedConfig):
    """The shape of a BERT.

    Attributes:
        published: whether the layers are as in the paper, so that published weights fit.
        tied: whether the output projection is the transposed token embedding. It can be False only
            if `published`.
    """

    vocabulary: int = 30522
    tokens: int = 128
    published: bool = False
    tied: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tied and not self.published:
            raise ValueError(f"tied={self.tied} needs published=True: give both, or neither")

    def bias(self, tokens: int) -> Float[Array, "H T T"] | None:
        """Returns the bias by distance (ALiBi); None if `published`."""
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
        """Returns the vectors that the first block reads."""
        # Each block's bias encodes the positions (ALiBi), so there is no table of positions.
        return dropped(self.dropout, normed(self.norm, self.tokens(tokens)), key)


class Head(nnx.Module):
    """Maps the vector of a masked position to the logits of the original token."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        self.input_norm = layer_norm(config, rngs)
        self.transform = linear(config, rngs, config.width, config.width)
        self.norm = layer_norm(config, rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocabulary))

    def __call__(self, x: Float[Array, "B K D"], tokens: nnx.Embed) -> Float[Array, "B K V"]:
        """Returns logits in float32. The embedding of `tokens` is the tied projection."""
        # A pre-norm block does not normalize its result, so the head normalizes the last block's
        # result.
        y = jax.nn.gelu(self.transform(normed(self.input_norm, x)))
        logits = tokens.attend(normed(self.norm, y))
        return logits.astype(jnp.float32) + self.bias[...][None, None]


def parts(config: BertConfig) -> Parts:
    """Lists the kinds of modules of the model."""
    kinds: dict[str, Part] = {"embeddings": Embeddings, "blocks": Block, "head": Head}
    if config.published:
        kinds = {
            "embeddings": bert_published.Embeddings,
            "blocks": bert_published.PublishedBlock,
            "head": bert_published.Head,
        }
    return Parts(config, kinds)


def loss_function(config: BertConfig) -> LossFunction:
    """Makes `loss_fn(params, batch, rng)`, the loss of masked tokens.

    The batch holds `tokens` [B, T] int32, `positions` and `targets` [B, K] int32, and `weights` [B,
    K] float32, which are 0 for positions that do not count. The loss has the `total` of the cross
    entropies in nats, and the sum of the weights.
    """
    return predicting(logits_function(config), config.dropout)


def logits_function(config: BertConfig) -> Logits:
    """Makes `logits(params, batch, key)`, the logits [B, K, V] at `positions`."""
    model = parts(config)

    def logits(params: Any, batch: Any, key: Key) -> Float[Array, "B K V"]:
        embeddings = model.part("embeddings", params["embeddings"])
        x = embeddings(batch["tokens"], model.key("embeddings", key))
        x = model.through("blocks", params["blocks"], x, key)  # [B, T, D]
        # K is about T / 7, so the projection to V, the model's widest map, skips most positions.
        x = jnp.take_along_axis(x, batch["positions"][:, :, None], axis=1)  # [B, K, D]
        return model.part("head", params["head"])(x, embeddings.tokens)

    return logits


def abstract_batch(config: MaskedConfig, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and types of a batch."""
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
    """Opens text as records with masked tokens."""
    # Imported here because a plan needs neither data nor the libraries that read it.
    from jvpipe.models.masking import open_masked_text

    return open_masked_text(config, data_path, run_dir, seed, batch_size)


FORMAT = bert_published.FORMAT


def workload(size: str | None = None, **options: Any) -> Workload:
    """Makes a BERT of a size (`tiny`, `mini`, `base`, `large`, `48`; `mini` by default).

    `options` replace fields of `BertConfig`.
    """
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
