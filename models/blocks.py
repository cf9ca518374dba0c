"""The modules that text models share: pre-norm transformer blocks and their initialization.

The modules use Flax NNX (papers: arXiv:1706.03762, arXiv:2002.04745). Axes: B batch, T tokens, S
attended tokens, D model, H heads, F feed-forward, V vocabulary.

A pre-norm block normalizes the input of each sublayer, but not the residual stream x:

    x ──┬── norm ── attention ──(+)──┬── norm ── expand, gelu, contract ──(+)── x'
        └────────────────────────┘   └────────────────────────────────────┘
        [B, T, D]                    [B, T, D]          [B, T, F]         [B, T, D]
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jvpipe.util.names import did_you_mean

Key = jax.Array | None
"""The key that draws the masks of dropout; None for no dropout."""
Vectors = Float[Array, "B T D"]
"""The residual stream, a vector per token. A cut between two blocks sends it."""


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The shape of a text model.

    Attributes:
        blocks: the number of blocks.
        width: D.
        vocabulary: V.
        tokens: the length of a record, in tokens.
        dropout: the fraction of values that training drops.
        dtype: the type of the computation, float32 or bfloat16. Parameters are float32.
        lora: the rank of adapters (`lora.py`); 0 for no adapters. If there are adapters, only they
            are trained.
        lora_on: patterns, separated by commas; linear maps whose path matches one get an adapter.
    """

    blocks: int
    width: int
    vocabulary: int
    tokens: int
    dropout: float = 0.1
    dtype: str = "float32"
    lora: int = 0
    lora_on: str = "*attention*"

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(did_you_mean("dtype", self.dtype, ["float32", "bfloat16"]))
        if self.lora < 0:
            raise ValueError(f"lora={self.lora} must be a rank, 1 or more, or 0 for no adapters")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must lie in [0, 1)")
        # A tokenizer has 256 bytes and four special tokens, so 300 tokens leave room for 40 merges.
        is_small = self.tokens < 8 or self.vocabulary < 300
        if min(self.blocks, self.width) < 1 or is_small:
            raise ValueError(
                f"{self} is too small: it needs at least one block, a width of 1, 8 tokens and a "
                "vocabulary of 300"
            )


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(TextConfig, ABC):
    """The shape of a transformer.

    Only published weights need `positions`, `feed_forward` and `epsilon`.

    Attributes:
        heads: H, which divides D.
        positions: the number of rows of the table of positions; 0 means `tokens`.
        feed_forward: F; 0 means 4 D.
        epsilon: the number that layer norm adds to the variance.
    """

    heads: int
    positions: int = 0
    feed_forward: int = 0
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not divisible by heads={self.heads}: change one of them"
            )
        if 0 < self.positions < self.tokens:
            raise ValueError(
                f"tokens={self.tokens} are more than the {self.positions} positions: give fewer"
            )

    @abstractmethod
    def bias(self, tokens: int) -> Float[Array, "#H T T"] | None:
        """Returns the bias that is added to attention scores; None for no bias.

        A bias of -inf hides one token from another.
        """


def distance_bias(heads: int, tokens: int) -> Float[Array, "H T T"]:
    """Returns a bias of each head's scores that falls with the distance between two tokens.

    This is ALiBi (arXiv:2108.12409) for attention in both directions. The first half of the heads
    prefers earlier tokens, and the second half prefers later tokens. In the direction that it does
    not prefer, a head multiplies distances by 4. In each half, the slopes fall from 1 towards 2^-8.

    >>> distance_bias(2, 3)[0].astype("int32").tolist()
    [[0, -4, -8], [-1, 0, -4], [-2, -1, 0]]
    """
    half = (heads + 1) // 2
    iota = partial(jax.lax.broadcasted_iota, jnp.float32)
    # ALiBi's geometric slopes, 2^(-8 i / half) for the heads i of one half.
    slope = jnp.exp2(iota((half, 1, 1), 0) * (-8 / half))
    square = (1, tokens, tokens)
    ahead = iota(square, 2) - iota(square, 1)  # [1, T, T], negative for tokens before this one
    back = slope * jnp.minimum(ahead, -4 * ahead)  # [half, T, T], never above 0
    # The transposed bias prefers later tokens. If H is odd, there is one head too many, and it is
    # cut off.
    return jnp.concatenate([back, jnp.swapaxes(back, 1, 2)])[:heads]


def looking_back(tokens: int) -> Float[Array, "1 T T"]:
    """Returns the bias of scores that hides later tokens: -inf for later tokens, else 0."""
    iota = partial(jax.lax.broadcasted_iota, jnp.int32, (1, tokens, tokens))
    # A token always sees itself, so no row is all -inf and softmax stays finite.
    return jnp.where(iota(2) > iota(1), -jnp.inf, 0.0).astype(jnp.float32)


class Attention(nnx.Module):
    """Attention among the tokens of a record, with H heads."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.inputs = linear(config, rngs, config.width, 3 * config.width)
        self.output = linear(config, rngs, config.width, config.width, scale=residual_scale(config))
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Vectors, key: Key) -> Vectors:
        """Mixes the values of all tokens for each token. `key` is for dropout of the weights."""
        # One matrix product gives queries, keys and values: [B, T, 3 D] splits into three of [B, T,
        # D].
        q, k, v = jnp.split(self.inputs(x), 3, axis=-1)
        bias = self.config.bias(x.shape[1])
        drop = partial(dropped, self.dropout, key=key)
        return self.output(mixture(q, k, v, self.config.heads, bias, drop))


Bias = Float[Array, "#H T S"] | Float[Array, "#B #H #T S"]
"""A bias that is added to scores. With three axes, it is the same for all records."""


def mixture(
    q: Vectors,
    k: Float[Array, "B S D"],
    v: Float[Array, "B S D"],
    heads: int,
    bias: Bias | None,
    drop: Callable[[jax.Array], jax.Array],
    scale: float | None = None,
) -> Vectors:
    """Mixes values v for each query q, weighted by how well their keys k match q, head by head.

    This is equation 1 of arXiv:1706.03762.

    Args:
        q: the queries.
        k: the keys.
        v: the values.
        heads: H, which divides D.
        bias: the bias that is added to scores; None for no bias.
        drop: applies dropout to the weights.
        scale: the factor of scores; None means the paper's (D / H)^-0.5.
    """
    B, T, D = q.shape
    width = D // heads

    def by_head(y: jax.Array) -> jax.Array:
        return y.reshape(*y.shape[:2], heads, width)  # [B, T or S, H, D / H]

    q, k, v = map(by_head, (q, k, v))
    factor = width**-0.5 if scale is None else scale
    # Scores are always float32, because softmax takes differences of large numbers.
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * factor
    if bias is not None:
        scores = scores + (bias if bias.ndim == 4 else bias[None])
    weights = drop(jax.nn.softmax(scores).astype(q.dtype))  # [B, H, T, S]
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(B, T, D)


class CrossAttention(nnx.Module):
    """Attention of the tokens of one sequence to the tokens of another sequence, with H heads."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.queries = linear(config, rngs, config.width, config.width)
        self.inputs = linear(config, rngs, config.width, 2 * config.width)
        self.output = linear(config, rngs, config.width, config.width, scale=residual_scale(config))
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(
        self,
        x: Vectors,
        read: Float[Array, "B S D"],
        key: Key,
        bias: Float[Array, "#B #H #T S"] | None = None,
    ) -> Vectors:
        """Mixes the values of the tokens in `read` for each token of `x`."""
        k, v = jnp.split(self.inputs(read), 2, axis=-1)  # [B, S, D] each
        drop = partial(dropped, self.dropout, key=key)
        return self.output(mixture(self.queries(x), k, v, self.config.heads, bias, drop))


class Block(nnx.Module):
    """Attention, then a feed-forward network of F units, each added to its input."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        units = config.feed_forward or 4 * config.width
        self.attention_norm = layer_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = layer_norm(config, rngs)
        self.expand = linear(config, rngs, config.width, units)
        self.contract = linear(config, rngs, units, config.width, scale=residual_scale(config))
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Vectors, key: Key) -> Vectors:
        """Returns the vectors after the block."""
        k0, k1, k2 = keys_of(key, 3)
        mixed = self.attention(normed(self.attention_norm, x), k0)
        x = x + dropped(self.dropout, mixed, k1)
        hidden = jax.nn.gelu(self.expand(normed(self.feed_forward_norm, x)))  # [B, T, F]
        return x + dropped(self.dropout, self.contract(hidden), k2)


def embedding(config: TextConfig, rngs: nnx.Rngs, rows: int, spread: float = 0.02) -> nnx.Embed:
    """Makes a table of vectors of width D, with a standard deviation of `spread`."""
    return nnx.Embed(
        rows,
        config.width,
        embedding_init=nnx.initializers.normal(spread),
        dtype=jnp.dtype(config.dtype),
        rngs=rngs,
    )


def linear(
    config: TextConfig,
    rngs: nnx.Rngs,
    inputs: int,
    outputs: int,
    scale: float = 1.0,
    *,
    bias: bool = True,
) -> nnx.Linear:
    """Makes a linear map whose results have `scale` times the standard deviation of its inputs."""
    # LeCun's initialization: the variance of a kernel is scale^2 / inputs.
    init = nnx.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=bias,
        kernel_init=init,
        dtype=jnp.dtype(config.dtype),
        rngs=rngs,
    )


def layer_norm(config: TransformerConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Makes a layer norm of vectors of width D."""
    return nnx.LayerNorm(config.width, epsilon=config.epsilon, rngs=rngs)


def residual_scale(config: TextConfig) -> float:
    """Returns the scale of the last linear map of each sublayer (GPT-2's rule).

    The residual stream adds two sublayers per block. The scale keeps the variance of their sum near
    1.
    """
    return (2 * config.blocks) ** -0.5


def normed(norm: nnx.LayerNorm, x: jax.Array) -> jax.Array:
    """Applies layer norm in float32. The result has the type of `x`."""
    return norm(x.astype(jnp.float32)).astype(x.dtype)


def dropped(dropout: nnx.Dropout, x: jax.Array, key: Key) -> jax.Array:
    """Applies dropout. Without a key, nothing is dropped."""
    return x if key is None else dropout(x, rngs=key, deterministic=False)


def keys_of(key: Key, count: int) -> Any:
    """Splits a key into `count` keys. Without a key, all of them are None."""
    return (None,) * count if key is None else jax.random.split(key, count)
