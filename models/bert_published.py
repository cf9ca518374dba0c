"""BERT with the layers of the paper (arXiv:1810.04805), so that published weights fit, in Flax NNX.

Layer norm comes after each sublayer. Positions and segments have learned vectors, and all tokens
are in the first segment. There is no next-sentence task. Axes: B batch, T tokens, D model, K masked
positions, V vocabulary.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jvpipe.models.blocks import (
    Block,
    Key,
    TransformerConfig,
    Vectors,
    dropped,
    embedding,
    keys_of,
    layer_norm,
    linear,
    normed,
)
from jvpipe.models.folder_settings import Settings
from jvpipe.models.weight_folder import Folder
from jvpipe.models.weights import Format, Source
from jvpipe.models.weights import linear as linear_of
from jvpipe.models.weights import norm as norm_of
from jvpipe.models.weights import table as table_of

_gelu = partial(jax.nn.gelu, approximate=False)


class Embeddings(nnx.Module):
    """The normalized sum of the vectors of a token, of its position and of its segment."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.tokens = embedding(config, rngs, config.vocabulary)
        self.positions = embedding(config, rngs, config.positions or config.tokens)
        self.segments = embedding(config, rngs, 2)
        self.norm = layer_norm(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, tokens: Int[Array, "B T"], key: Key) -> Vectors:
        """Returns the vectors that the first block reads."""
        positions = self.positions(jnp.arange(tokens.shape[1]))[None]  # [1, T, D]
        segment = jnp.zeros((1, 1), jnp.int32)
        x = self.tokens(tokens) + positions + self.segments(segment)
        return dropped(self.dropout, normed(self.norm, x), key)


class PublishedBlock(Block):
    """Attention, then a feed-forward network. Each is added to its input; the sum is normalized."""

    def __call__(self, x: Vectors, key: Key) -> Vectors:
        """Returns the vectors after the block."""
        # `Block` has the same parameters, but its norms come before the sublayers, not after them.
        k0, k1, k2 = keys_of(key, 3)
        mixed = dropped(self.dropout, self.attention(x, k0), k1)
        x = normed(self.attention_norm, x + mixed)
        y = self.contract(_gelu(self.expand(x)))
        return normed(self.feed_forward_norm, x + dropped(self.dropout, y, k2))


class Head(nnx.Module):
    """Maps the vector of a masked position to the logits of the original token."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        self.transform = linear(config, rngs, config.width, config.width)
        self.norm = layer_norm(config, rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocabulary))
        width, vocabulary = config.width, config.vocabulary
        self.output = None if config.tied else linear(config, rngs, width, vocabulary, bias=False)

    def __call__(self, x: Float[Array, "B K D"], tokens: nnx.Embed) -> Float[Array, "B K V"]:
        """Returns logits in float32. If `tied`, the embedding of `tokens` is the projection."""
        project = tokens.attend if self.output is None else self.output
        y = project(normed(self.norm, _gelu(self.transform(x))))
        return y.astype(jnp.float32) + self.bias[...][None, None]


def _fields(settings: Settings, folder: Folder) -> dict[str, Any]:
    """Reads the fields of a `BertConfig` from config.json, and rejects unsupported settings."""
    dropout = settings.number("hidden_dropout_prob", 0.1, or_zero=True)
    settings.only("hidden_act", "gelu")
    settings.only("type_vocab_size", 2)
    settings.only("position_embedding_type", "absolute")
    settings.only("attention_probs_dropout_prob", dropout)
    settings.only("is_decoder", False)
    settings.only("add_cross_attention", False)
    settings.only("is_encoder_decoder", False)
    positions = settings.count("max_position_embeddings")
    return {
        "blocks": settings.count("num_hidden_layers"),
        "width": settings.count("hidden_size"),
        "heads": settings.count("num_attention_heads"),
        "vocabulary": settings.count("vocab_size"),
        "positions": positions,
        "tokens": min(128, positions),
        "feed_forward": settings.count("intermediate_size"),
        "epsilon": settings.number("layer_norm_eps", 1e-12, or_zero=True),
        "dropout": dropout,
        "tied": settings.flag("tie_word_embeddings", True),
        "published": True,
    }


def _sources(config: Any) -> dict[str, Source]:
    """Maps each parameter to its tensors in a folder."""
    sources = table_of("embeddings.tokens", "embeddings.word_embeddings")
    sources |= table_of("embeddings.positions", "embeddings.position_embeddings")
    sources |= table_of("embeddings.segments", "embeddings.token_type_embeddings")
    sources |= norm_of("embeddings.norm", "embeddings.LayerNorm")
    for i in range(config.blocks):
        ours, theirs = f"blocks.{i:03}", f"encoder.layer.{i}"
        # The folder has three tensors for queries, keys and values; our model has one, [D, 3 D].
        read = (f"{theirs}.attention.self.{name}" for name in ("query", "key", "value"))
        sources |= linear_of(f"{ours}.attention.inputs", *read)
        sources |= linear_of(f"{ours}.attention.output", f"{theirs}.attention.output.dense")
        sources |= norm_of(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
        sources |= linear_of(f"{ours}.expand", f"{theirs}.intermediate.dense")
        sources |= linear_of(f"{ours}.contract", f"{theirs}.output.dense")
        sources |= norm_of(f"{ours}.feed_forward_norm", f"{theirs}.output.LayerNorm")
    sources |= linear_of("head.transform", "cls.predictions.transform.dense")
    sources |= norm_of("head.norm", "cls.predictions.transform.LayerNorm")
    if config.tied:
        return sources | {"head.bias": Source(("cls.predictions.bias",))}
    decoder = linear_of("head.output", "cls.predictions.decoder", bias=False)
    return sources | decoder | {"head.bias": Source(("cls.predictions.decoder.bias",))}


FORMAT = Format(
    _fields,
    _sources,
    harmless=(
        "directionality",
        "initializer_range",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    ),
    copies={
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    ignored=(
        "cls.predictions.bias",
        "pooler.dense.*",
        "cls.seq_relationship.*",
        "embeddings.position_ids",
    ),
)
"""BertForMaskedLM, and BertForPreTraining without its next-sentence task.

An untied projection has its own bias, and then `cls.predictions.bias` is unused.
"""
