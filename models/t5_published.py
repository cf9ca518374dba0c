"""T5 exactly as published (arXiv:1910.10683), so that published weights fit, in Flax NNX.

Axes: B batch, T tokens, S attended tokens, D model, H heads, F feed-forward, V vocabulary.

Layer norm neither centers nor shifts, linear maps have no biases, and scores are not divided by the
square root of the head width. A learned bias for each class of distances encodes the distance of
two tokens. All blocks of the encoder share one table of these biases, and all blocks of the decoder
share another.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jvpipe.models.blocks import (
    Key,
    TransformerConfig,
    Vectors,
    dropped,
    embedding,
    keys_of,
    mixture,
)
from jvpipe.models.folder_settings import Settings
from jvpipe.models.kinds import Parts
from jvpipe.models.losses import Logits
from jvpipe.models.weight_folder import Folder
from jvpipe.models.weights import Format, Source
from jvpipe.models.weights import linear as linear_of
from jvpipe.models.weights import norm as norm_of
from jvpipe.models.weights import table as table_of

_TABLE, _HEAD = "shared.weight", "lm_head.weight"
"""The embedding and the projection, which are the same tensor if tied."""
Table = Float[Array, "buckets H"]
"""The bias of each head for each class of distances. All blocks of the encoder share a table, and
so do those of the decoder.
"""


def buckets_of(tokens: int, buckets: int, distance: int, *, ahead: bool) -> Int[Array, "T T"]:
    """Returns the class of the distance from each token (row) to each other token (column).

    Half of the classes have one short distance each. The others divide longer distances evenly on a
    log scale.

    Args:
        tokens: T.
        buckets: the number of classes.
        distance: all distances from this one on are in the last class.
        ahead: whether half of the classes are for later tokens. If not, later tokens count as
            distance 0.

    >>> buckets_of(3, 8, 16, ahead=True).tolist()
    [[0, 5, 6], [1, 0, 5], [2, 1, 0]]
    """
    forward = jnp.arange(tokens)[None] - jnp.arange(tokens)[:, None]  # [T, T]
    half = buckets // 2 if ahead else buckets
    far = jnp.abs(forward) if ahead else jnp.maximum(-forward, 0)
    # Classes of a direction:   0 1 2 3 ... exact - 1  |  exact ... half - 1
    #                           one distance each      |  up to `distance`, log scale
    exact = half // 2
    ratio = jnp.maximum(far, 1).astype(jnp.float32) / exact
    log = jnp.log(ratio) / math.log(distance / exact) * (half - exact)
    logarithmic = jnp.minimum(exact + log.astype(jnp.int32), half - 1)
    bucket = jnp.where(far < exact, far, logarithmic)
    if not ahead:
        return bucket
    return bucket + jnp.where(forward > 0, half, 0)


class Embeddings(nnx.Module):
    """A vector per token."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        self.tokens = embedding(config, rngs, config.vocabulary, spread=1.0)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, tokens: Int[Array, "B T"], key: Key) -> Vectors:
        """Returns the vectors that a first block reads."""
        return dropped(self.dropout, self.tokens(tokens), key)


class Distances(nnx.Module):
    """The table of each head's biases for each class of distances."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(config.width**-0.5)
        self.table = nnx.Embed(config.buckets, config.heads, embedding_init=init, rngs=rngs)


class Attention(nnx.Module):
    """Attention with H heads, whose scores are not divided by the square root of the head width."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        D, inner = config.width, config.heads * config.head_width
        self.heads = config.heads
        # Scores are not divided by the root of the head width. Instead, the initial queries are
        # smaller by this factor.
        self.queries = _linear(config, rngs, D, inner, (D * config.head_width) ** -0.5)
        self.keys = _linear(config, rngs, D, inner, D**-0.5)
        self.values = _linear(config, rngs, D, inner, D**-0.5)
        self.output = _linear(config, rngs, inner, D, inner**-0.5)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(
        self, x: Vectors, read: Float[Array, "B S D"], bias: Float[Array, "H T S"] | None, key: Key
    ) -> Vectors:
        """Mixes the values of the tokens in `read` for each token of `x`."""
        q, k, v = self.queries(x), self.keys(read), self.values(read)
        drop = partial(dropped, self.dropout, key=key)
        return self.output(mixture(q, k, v, self.heads, bias, drop, scale=1.0))


class FeedForward(nnx.Module):
    """A network with F hidden units. If `gated`, they are multiplied by another linear map."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        D, units = config.width, config.feed_forward or 4 * config.width
        self.expand = _linear(config, rngs, D, units, D**-0.5)
        self.gate = _linear(config, rngs, D, units, D**-0.5) if config.gated else None
        self.contract = _linear(config, rngs, units, D, units**-0.5)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Vectors, key: Key) -> Vectors:
        """Maps each token separately."""
        y = self.expand(x)  # [B, T, F]
        # T5 1.1 is gated (GEGLU, arXiv:2002.05202). `expand`, whose result the GELU reads, is wi_0
        # in transformers.
        y = jax.nn.relu(y) if self.gate is None else self.gate(x) * jax.nn.gelu(y)
        return self.contract(dropped(self.dropout, y, key))


class EncoderBlock(nnx.Module):
    """Attention, then a feed-forward network, each added to its input."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.attention_norm, self.feed_forward_norm = _norm(config, rngs), _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def bias(self, table: Table, tokens: int) -> Float[Array, "H T T"]:
        """Returns the bias of scores, by distance."""
        kinds = buckets_of(tokens, self.config.buckets, self.config.distance, ahead=True)
        return jnp.moveaxis(table[kinds], -1, 0)

    def __call__(self, x: Vectors, table: Table, key: Key) -> Vectors:
        """Returns the vectors after the block."""
        k0, k1, k2, k3 = keys_of(key, 4)
        y = _normed(self.attention_norm, x)
        # Each block looks up the bias itself, so that a cut sends the small table instead of [H, T,
        # T].
        mixed = self.attention(y, y, self.bias(table, x.shape[1]), k0)
        x = x + dropped(self.dropout, mixed, k1)
        y = self.feed_forward(_normed(self.feed_forward_norm, x), k2)
        return x + dropped(self.dropout, y, k3)


class DecoderBlock(nnx.Module):
    """Attention to earlier tokens, attention to the encoder, then a feed-forward network.

    The result of each of the three is added to its input.
    """

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.attention_norm = _norm(config, rngs)
        self.reading_norm = _norm(config, rngs)
        self.feed_forward_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.reading = Attention(config, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def bias(self, table: Table, tokens: int) -> Float[Array, "H T T"]:
        """Returns the bias of scores, by distance; it hides later tokens."""
        kinds = buckets_of(tokens, self.config.buckets, self.config.distance, ahead=False)
        ahead = jnp.arange(tokens)[None] > jnp.arange(tokens)[:, None]
        by_distance = jnp.moveaxis(table[kinds], -1, 0)
        return jnp.where(ahead[None], -jnp.inf, by_distance)

    def __call__(self, x: Vectors, read: Vectors, table: Table, key: Key) -> Vectors:
        """Returns the vectors after the block."""
        k0, k1, k2, k3, k4, k5 = keys_of(key, 6)
        y = _normed(self.attention_norm, x)
        mixed = self.attention(y, y, self.bias(table, x.shape[1]), k0)
        x = x + dropped(self.dropout, mixed, k1)
        # Tokens of two different texts have no distance, so this attention has no bias.
        mixed = self.reading(_normed(self.reading_norm, x), read, None, k2)
        x = x + dropped(self.dropout, mixed, k3)
        y = self.feed_forward(_normed(self.feed_forward_norm, x), k4)
        return x + dropped(self.dropout, y, k5)


class Head(nnx.Module):
    """Maps a position's vector to the logits of the next token, by the embedding if `tied`."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        D, vocabulary = config.width, config.vocabulary
        scaled = config.tied if config.scaled is None else config.scaled
        self.norm = _norm(config, rngs)
        self.scale = D**-0.5 if scaled else None
        self.output = None if config.tied else _linear(config, rngs, D, vocabulary, D**-0.5)

    def __call__(self, x: Vectors, tokens: nnx.Embed) -> Float[Array, "B T V"]:
        """Returns logits in float32."""
        x = _normed(self.norm, x)
        # A tied table is initialized with variance 1 for the embeddings, so the logits would be
        # large without the factor D^-0.5.
        x = x if self.scale is None else x * self.scale
        logits = tokens.attend(x) if self.output is None else self.output(x)
        return logits.astype(jnp.float32)


class Read(nnx.Module):
    """The norm of the encoder's result, with dropout. All blocks of the decoder read it."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        self.norm = _norm(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Vectors, key: Key) -> Vectors:
        """Returns the normalized vectors."""
        return dropped(self.dropout, _normed(self.norm, x), key)


def parts(config: TransformerConfig) -> Parts:
    """Lists the kinds of modules of the model."""
    kinds = {
        "embeddings": Embeddings,
        "encoder_distances": Distances,
        "encoder": EncoderBlock,
        "read": Read,
        "decoder_distances": Distances,
        "decoder": DecoderBlock,
        "head": Head,
    }
    return Parts(config, kinds, stacked=("encoder", "decoder"))


def logits_function(config: TransformerConfig) -> Logits:
    """Makes `logits(params, batch, key)`, the logits [B, T, V] of the decoder's tokens."""
    model = parts(config)

    def logits(params: Any, batch: Any, key: Key) -> Float[Array, "B T V"]:
        encoder_table = params["encoder_distances"]["table"]["embedding"]
        decoder_table = params["decoder_distances"]["table"]["embedding"]
        embeddings = model.part("embeddings", params["embeddings"])
        x = embeddings(batch["inputs"], model.key("embeddings", key))
        x = model.through("encoder", params["encoder"], x, key, encoder_table)
        read = model.part("read", params["read"])(x, model.key("read", key))
        # Tables of distances have no dropout, so their key is free for the second use of the
        # embeddings.
        y = embeddings(batch["tokens"], model.key("encoder_distances", key))
        # A cut in the decoder sends two arrays of [B, T, D], y and `read`, and the table.
        y = model.through("decoder", params["decoder"], y, key, read, decoder_table)
        return model.part("head", params["head"])(y, embeddings.tokens)

    return logits


def _linear(config: Any, rngs: nnx.Rngs, inputs: int, outputs: int, spread: float) -> nnx.Linear:
    init = nnx.initializers.normal(spread)
    dtype = jnp.dtype(config.dtype)
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, dtype=dtype, rngs=rngs)


def _norm(config: Any, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.width, epsilon=config.epsilon, rngs=rngs)


def _normed(norm: nnx.RMSNorm, x: jax.Array) -> jax.Array:
    return norm(x.astype(jnp.float32)).astype(x.dtype)


def _fields(settings: Settings, folder: Folder) -> dict[str, Any]:
    """Reads the fields of a `T5Config` from a folder, and rejects unsupported settings.

    A newer config.json says that the projection is tied, even if it is not. So the tensors decide:
    the projection is tied unless the folder has a tensor for it that differs from the embedding. An
    older config.json does not say whether logits are `scaled`. In this case, they are scaled unless
    the config.json says that the projection is not tied.
    """
    gated = settings.get("feed_forward_proj", "relu") == "gated-gelu"
    tied = settings.get("tie_word_embeddings", True)
    settings.only("feed_forward_proj", "relu", "gated-gelu")
    settings.only("is_gated_act", gated)
    settings.only("dense_act_fn", "gelu_new" if gated else "relu")
    blocks = settings.count("num_layers")
    settings.only("num_decoder_layers", blocks, None)
    settings.only("is_encoder_decoder", True)
    settings.only("is_decoder", False)
    settings.only("tie_word_embeddings", True, False)
    settings.only("scale_decoder_outputs", tied, not tied)
    return {
        "blocks": blocks,
        "width": settings.count("d_model"),
        "heads": settings.count("num_heads"),
        "vocabulary": settings.count("vocab_size"),
        "tokens": 128,
        "head_width": settings.count("d_kv"),
        "feed_forward": settings.count("d_ff"),
        "buckets": settings.count("relative_attention_num_buckets", 32),
        "distance": settings.count("relative_attention_max_distance", 128),
        "epsilon": settings.number("layer_norm_epsilon", 1e-6, or_zero=True),
        "dropout": settings.number("dropout_rate", 0.1, or_zero=True),
        "gated": gated,
        "tied": _HEAD not in folder.files or folder.repeats(_HEAD, _TABLE),
        "scaled": settings.get("scale_decoder_outputs", tied),
        "published": True,
    }


def _sources(config: Any) -> dict[str, Source]:
    """Maps each parameter to its tensors in a folder."""
    sources = table_of("embeddings.tokens", _TABLE.removesuffix(".weight"))
    for half, last_part in (("encoder", "read"), ("decoder", "head")):
        # The folder stores the tables of distances in the first blocks of encoder and decoder.
        first = f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias"
        sources |= table_of(f"{half}_distances.table", first)
        sources |= norm_of(f"{last_part}.norm", f"{half}.final_layer_norm", bias=False)
        for i in range(config.blocks):
            ours = f"{half}.{i:03}"
            theirs = f"{half}.block.{i}.layer"
            sources |= _block(config, ours, theirs, decodes=half == "decoder")
    if not config.tied:
        sources |= linear_of("head.output", _HEAD.removesuffix(".weight"), bias=False)
    return sources


def _block(config: Any, ours: str, theirs: str, *, decodes: bool) -> dict[str, Source]:
    """Returns the sources of a block. A folder numbers its sublayers 0, 1 and, if it decodes, 2."""
    sources = _attention(f"{ours}.attention", f"{theirs}.0", "SelfAttention")
    last = f"{theirs}.1"
    if decodes:
        sources |= _attention(f"{ours}.reading", f"{theirs}.1", "EncDecAttention")
        last = f"{theirs}.2"
    sources |= norm_of(f"{ours}.feed_forward_norm", f"{last}.layer_norm", bias=False)
    units = {"expand": "wi_0", "gate": "wi_1"} if config.gated else {"expand": "wi"}
    for name, letters in (units | {"contract": "wo"}).items():
        there = f"{last}.DenseReluDense.{letters}"
        sources |= linear_of(f"{ours}.feed_forward.{name}", there, bias=False)
    return sources


def _attention(ours: str, theirs: str, kind: str) -> dict[str, Source]:
    """Returns the sources of an attention and of the norm before it."""
    sources = norm_of(f"{ours}_norm", f"{theirs}.layer_norm", bias=False)
    for part in ("queries", "keys", "values", "output"):
        letter = part[0]  # in transformers, the four maps are called q, k, v and o
        sources |= linear_of(f"{ours}.{part}", f"{theirs}.{kind}.{letter}", bias=False)
    return sources


FORMAT = Format(
    _fields,
    _sources,
    harmless=("initializer_factor", "n_positions", "vocab"),
    copies={
        "encoder.embed_tokens.weight": _TABLE,
        "decoder.embed_tokens.weight": _TABLE,
        _HEAD: _TABLE,
    },
    ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
)
"""T5ForConditionalGeneration, of the versions 1.0 (`tied`) and 1.1.

The ignored tensor is a table of distances for attention to the encoder, which does not use
distances.
"""
