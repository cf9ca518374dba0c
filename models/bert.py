"""BERT (arXiv:1810.04805) with masked-language modelling, in Flax NNX.

Axes: B batch, T tokens, D model, H heads, F feed-forward, K masked positions, V vocabulary.

What differs from the paper makes it learn in far fewer steps: layer norm stands before each sublayer
(arXiv:2002.04745); a token knows where the others are by a bias on its attention (ALiBi, arXiv:2108.12409, as in
MosaicBERT, arXiv:2312.17482) in place of position embeddings; there is one segment and no next-sentence task
(arXiv:1907.11692). The output projection is the token embedding transposed, applied at the masked positions alone.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jvpipe.ir.names import did_you_mean
from jvpipe.ir.weighted import Weighted
from jvpipe.models.recipe import AdamW
from jvpipe.models.workload import Data, Workload


@dataclass(frozen=True)
class BertConfig:
    """The shape of a BERT. `dtype` is that of the computation, float32 or bfloat16; parameters are float32.

    `tokens` is the length of a record, of which the share `mask_rate` is predicted.
    """

    blocks: int
    width: int
    heads: int
    vocabulary: int = 30522
    tokens: int = 128
    mask_rate: float = 0.15
    dropout: float = 0.1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not divisible by heads={self.heads}: change one of them")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(did_you_mean("dtype", self.dtype, ["float32", "bfloat16"]))
        for name in ("dropout", "mask_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1)")
        if min(self.blocks, self.width, self.heads) < 1 or self.tokens < 8 or self.vocabulary < 300:
            raise ValueError(f"{self} is too small: it needs a block, a head, 8 tokens and a vocabulary of 300")

    @property
    def masked(self) -> int:
        """K: how many tokens of a record are predicted at most (its first token is special)."""
        return max(1, round(self.mask_rate * (self.tokens - 1)))


SIZES = {
    "tiny": BertConfig(blocks=2, width=32, heads=2, vocabulary=300, tokens=16, dropout=0.0),
    "mini": BertConfig(blocks=4, width=256, heads=4, vocabulary=2048, tokens=64, dropout=0.0),
    "base": BertConfig(blocks=12, width=768, heads=12),
    "large": BertConfig(blocks=24, width=1024, heads=16),
    "48": BertConfig(blocks=48, width=1024, heads=16),
}


def distance_bias(heads: int, tokens: int) -> Float[Array, "H T T"]:
    """What a head adds to its scores: less, the farther away a token is (ALiBi).

    The first half of the heads looks back, the other half ahead: on the other side distances count fourfold. In each
    half slopes fall from 1 towards 2^-8.

    >>> distance_bias(2, 3)[0].astype("int32").tolist()
    [[0, -4, -8], [-1, 0, -4], [-2, -1, 0]]
    """
    half = (heads + 1) // 2
    iota = partial(jax.lax.broadcasted_iota, jnp.float32)
    slope = jnp.exp2(iota((half, 1, 1), 0) * (-8 / half))
    ahead = iota((1, tokens, tokens), 2) - iota((1, tokens, tokens), 1)
    back = slope * jnp.minimum(ahead, -4 * ahead)
    return jnp.concatenate([back, jnp.swapaxes(back, 1, 2)])[:heads]


class Attention(nnx.Module):
    """Every token looks at every token of its record, with H heads."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        linear = _linear(config, rngs)
        self.heads = config.heads
        self.inputs = linear(config.width, 3 * config.width)
        self.output = linear(config.width, config.width, scale=_residual_scale(config))
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Float[Array, "B T D"], key: jax.Array | None) -> Float[Array, "B T D"]:
        """The mixture of the other tokens' values; `key` draws the dropped weights."""
        B, T, D = x.shape
        q, k, v = (y.reshape(B, T, self.heads, D // self.heads) for y in jnp.split(self.inputs(x), 3, axis=-1))
        scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * (D // self.heads) ** -0.5
        scores = scores + distance_bias(self.heads, T)[None]
        weights = _dropped(self.dropout, jax.nn.softmax(scores).astype(x.dtype), key)
        return self.output(jnp.einsum("bhts,bshd->bthd", weights, v).reshape(B, T, D))


class Block(nnx.Module):
    """Attention, then a feed-forward network of F = 4 D units, each added to its input."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        linear = _linear(config, rngs)
        self.attention_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.expand = linear(config.width, 4 * config.width)
        self.contract = linear(4 * config.width, config.width, scale=_residual_scale(config))
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Float[Array, "B T D"], key: jax.Array | None) -> Float[Array, "B T D"]:
        """The tokens after one block."""
        k0, k1, k2 = (None, None, None) if key is None else jax.random.split(key, 3)
        x = x + _dropped(self.dropout, self.attention(_normed(self.attention_norm, x), k0), k1)
        y = self.contract(jax.nn.gelu(self.expand(_normed(self.feed_forward_norm, x))))
        return x + _dropped(self.dropout, y, k2)


class Embeddings(nnx.Module):
    """A vector per token."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(
            config.vocabulary,
            config.width,
            embedding_init=nnx.initializers.normal(0.02),
            dtype=jnp.dtype(config.dtype),
            rngs=rngs,
        )
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, tokens: Int[Array, "B T"], key: jax.Array | None) -> Float[Array, "B T D"]:
        """The vectors that the first block reads."""
        return _dropped(self.dropout, _normed(self.norm, self.tokens(tokens)), key)


class Head(nnx.Module):
    """From a masked position's vector to the logits of the token that stood there."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        self.input_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.transform = _linear(config, rngs)(config.width, config.width)
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocabulary))

    def __call__(self, x: Float[Array, "B K D"], embedding: nnx.Embed) -> Float[Array, "B K V"]:
        """Logits in float32; `embedding` is the tied projection."""
        y = _normed(self.norm, jax.nn.gelu(self.transform(_normed(self.input_norm, x))))
        return embedding.attend(y).astype(jnp.float32) + self.bias[...][None, None]


def loss_function(config: BertConfig) -> Callable[[Any, Any, jax.Array | None], Weighted]:
    """The loss of masked tokens, `loss_fn(params, batch, rng)`.

    The batch holds `tokens` [B, T] int32, `positions` and `targets` [B, K] int32 and `weights` [B, K] float32; a
    position of weight 0 does not count. `total` is the sum of the cross entropies in nats, `weight` their number.
    """

    @cache
    def structure() -> dict[str, Any]:
        parts = {name: _abstract(part) for name, part in _parts(config).items()}
        return {name: nnx.split(part, nnx.Param, ...) for name, part in parts.items()}

    def part(name: str, params: Any) -> Any:
        graph, _, rest = structure()[name]
        return nnx.merge(graph, params, rest, copy=True)

    def logits(params: Any, batch: Any, key: jax.Array | None) -> Float[Array, "B K V"]:
        """Dropout keys are derived by position in the model, so blocks are alike but for a number."""
        embeddings = part("embeddings", params["embeddings"])
        x = embeddings(batch["tokens"], _fold_in(key, 0))
        for i in range(config.blocks):
            x = part("block", params["blocks"][_block_name(i)])(x, _fold_in(key, i + 1))
        x = jnp.take_along_axis(x, batch["positions"][:, :, None], axis=1)
        return part("head", params["head"])(x, embeddings.tokens)

    def loss_fn(params: Any, batch: Any, rng: jax.Array | None) -> Weighted:
        batch = jax.tree.map(jnp.asarray, batch)
        scores = jax.nn.log_softmax(logits(params, batch, rng if config.dropout > 0 else None))
        scores = jnp.take_along_axis(scores, batch["targets"][:, :, None], axis=2)
        weights = batch["weights"]
        return Weighted(-jnp.sum(jnp.squeeze(scores, 2) * weights), jnp.sum(weights))

    return loss_fn


def init(config: BertConfig, key: jax.Array) -> dict[str, Any]:
    """Fresh parameters: nested dicts of float32 arrays, e.g. `blocks/003/attention/inputs/kernel`.

    A block is traced once for all: Flax takes seconds to build 48 of them.
    """
    make = {name: jax.jit(partial(_fresh, part)) for name, part in _parts(config).items()}
    return {
        "embeddings": make["embeddings"](jax.random.fold_in(key, 0)),
        "blocks": {_block_name(i): make["block"](jax.random.fold_in(key, i + 1)) for i in range(config.blocks)},
        "head": make["head"](jax.random.fold_in(key, config.blocks + 1)),
    }


def abstract_batch(config: BertConfig, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and types of a batch."""
    masked = (batch_size, config.masked)
    return {
        "tokens": jax.ShapeDtypeStruct((batch_size, config.tokens), np.int32),
        "positions": jax.ShapeDtypeStruct(masked, np.int32),
        "targets": jax.ShapeDtypeStruct(masked, np.int32),
        "weights": jax.ShapeDtypeStruct(masked, np.float32),
    }


def open_data(config: BertConfig, data_path: Path | None, run_dir: Path, seed: int, batch_size: int) -> Data:
    """Text as records with masked tokens."""
    from jvpipe.models.masking import open_masked_text  # a plan needs no data, nor the libraries that read it

    return open_masked_text(
        data_path,
        run_dir,
        seed,
        batch_size,
        vocabulary=config.vocabulary,
        tokens=config.tokens,
        masked=config.masked,
        mask_rate=config.mask_rate,
    )


def workload(size: str | None = None, **options: Any) -> Workload:
    """BERT of a size (`mini`, `base`, `large`, `48`), with fields of `BertConfig` replaced by `options`."""
    size = size or "mini"
    if size not in SIZES:
        raise ValueError(did_you_mean("size of bert", size, list(SIZES)))
    fields = [field.name for field in dataclasses.fields(BertConfig)]
    for name in options:
        if name not in fields:
            raise ValueError(did_you_mean("option of bert", name, fields))
    config = dataclasses.replace(SIZES[size], **options)
    mini = size == "mini"
    recipe = AdamW(3e-3 if mini else 1e-4)
    return Workload(
        name="bert",
        size=size,
        config=config,
        init=partial(init, config),
        loss_fn=loss_function(config),
        abstract_batch=partial(abstract_batch, config),
        open_data=partial(open_data, config),
        optimizer=recipe.optimizer,
        learning_rates=recipe.learning_rates,
        batch_size=32 if mini else 64,
        steps=800 if mini else 100_000,
    )


def _parts(config: BertConfig) -> dict[str, Callable[[nnx.Rngs], nnx.Module]]:
    """How the parts of the model are built."""
    kinds = {"embeddings": Embeddings, "block": Block, "head": Head}
    return {name: lambda rngs, kind=kind: kind(config, rngs=rngs) for name, kind in kinds.items()}


def _abstract(build: Callable[[nnx.Rngs], nnx.Module]) -> Any:
    return nnx.eval_shape(lambda: build(nnx.Rngs(0)))


def _fresh(build: Callable[[nnx.Rngs], nnx.Module], key: jax.Array) -> Any:
    return nnx.to_pure_dict(nnx.state(build(nnx.Rngs(params=key)), nnx.Param))


def _block_name(i: int) -> str:
    return f"{i:03}"


def _linear(config: BertConfig, rngs: nnx.Rngs) -> Callable[..., nnx.Linear]:
    def linear(inputs: int, outputs: int, scale: float = 1.0) -> nnx.Linear:
        kernel_init = nnx.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
        return nnx.Linear(inputs, outputs, kernel_init=kernel_init, dtype=jnp.dtype(config.dtype), rngs=rngs)

    return linear


def _residual_scale(config: BertConfig) -> float:
    """Sublayers that add to the residual stream start smaller the more of them there are (GPT-2's rule)."""
    return (2 * config.blocks) ** -0.5


def _fold_in(key: jax.Array | None, number: int) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, number)


def _normed(norm: nnx.LayerNorm, x: jax.Array) -> jax.Array:
    """Layer norm in float32, whatever the type of `x`, which it keeps."""
    return norm(x.astype(jnp.float32)).astype(x.dtype)


def _dropped(dropout: nnx.Dropout, x: jax.Array, key: jax.Array | None) -> jax.Array:
    return x if key is None else dropout(x, rngs=key, deterministic=False)
