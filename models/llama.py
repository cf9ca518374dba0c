"""Llama (arXiv:2302.13971, arXiv:2407.21783): a causal language model, in Flax NNX.

Axes: B batch, T and S tokens, D model, H heads, G groups of them, R heads of a group, K width of a head, V vocabulary.

Root mean square norm stands before each sublayer and after the last block; queries and keys turn with their position
(arXiv:2104.09864); the heads of a group share keys and values (arXiv:2305.13245); the feed-forward network is gated by
SiLU (arXiv:2002.05202). Nothing has a bias. Blocks are one scan over parameters that are stacked, [blocks, ...].
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jvpipe.ir.weighted import Weighted
from jvpipe.models.blocks import Kind, TextConfig, embedding, prediction_loss, residual_scale
from jvpipe.models.gpt2 import abstract_batch, open_data
from jvpipe.models.workload import Workload, sized


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(TextConfig):
    """The shape of a Llama: `hidden` units in the feed-forward networks; there are no more `groups` than `heads`.

    `theta` is the base of the angles by which queries and keys turn. `tied`: the output projection is the token
    embedding transposed.
    """

    heads: int
    groups: int
    hidden: int
    theta: float = 1e4
    tied: bool = False
    epsilon: float = 1e-5
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads < 1 or self.width % (2 * self.heads):
            raise ValueError(
                f"width={self.width} is no even number for each of heads={self.heads}: change one of them"
            )
        if self.groups < 1 or self.heads % self.groups:
            raise ValueError(
                f"heads={self.heads} is not divisible by groups={self.groups}: change one of them"
            )
        if self.hidden < 1:
            raise ValueError(f"hidden={self.hidden} must be at least 1")
        if self.dropout:
            raise ValueError(f"dropout={self.dropout}: a Llama has none")


SIZES = {
    "tiny": LlamaConfig(blocks=4, width=16, heads=4, groups=2, hidden=24, vocabulary=300, tokens=8),
    "mini": LlamaConfig(
        blocks=4, width=256, heads=4, groups=2, hidden=688, vocabulary=2048, tokens=64
    ),
    "1b": LlamaConfig(
        blocks=16,
        width=2048,
        heads=32,
        groups=8,
        hidden=8192,
        vocabulary=128256,
        tokens=8192,
        theta=5e5,
        tied=True,
    ),
    "7b": LlamaConfig(
        blocks=32, width=4096, heads=32, groups=32, hidden=11008, vocabulary=32000, tokens=4096
    ),
    "8b": LlamaConfig(
        blocks=32,
        width=4096,
        heads=32,
        groups=8,
        hidden=14336,
        vocabulary=128256,
        tokens=8192,
        theta=5e5,
    ),
}
"""Llama 3.2 1B, Llama 2 7B, Llama 3 8B."""


def matrix(
    config: LlamaConfig, rngs: nnx.Rngs, inputs: int, outputs: int, scale: float = 1.0
) -> nnx.Linear:
    """A linear map without a bias."""
    draw = nnx.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
    return nnx.Linear(
        inputs, outputs, use_bias=False, kernel_init=draw, dtype=jnp.dtype(config.dtype), rngs=rngs
    )


class Norm(nnx.Module):
    """Vectors of mean square 1, scaled; in float32, whatever their type, which they keep."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(config.width, epsilon=config.epsilon, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The normalised vectors."""
        return self.norm(x.astype(jnp.float32)).astype(x.dtype)


class GroupedAttention(nnx.Module):
    """Tokens look at those before them, with H heads in G groups."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.config, shared = config, config.width // config.heads * config.groups
        self.queries = matrix(config, rngs, config.width, config.width)
        self.keys = matrix(config, rngs, config.width, shared)
        self.values = matrix(config, rngs, config.width, shared)
        self.output = matrix(config, rngs, config.width, config.width, scale=residual_scale(config))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The mixture of the values of tokens up to each."""
        config, (B, T, D) = self.config, x.shape
        K = D // config.heads
        q, k, v = (
            project(x).reshape(B, T, -1, K) for project in (self.queries, self.keys, self.values)
        )
        q, k = turned(q, config.theta), turned(k, config.theta)
        q = q.reshape(B, T, config.groups, -1, K)
        scores = jnp.einsum("btgrk,bsgk->bgrts", q, k).astype(jnp.float32) * K**-0.5
        iota = partial(jax.lax.broadcasted_iota, jnp.int32, scores.shape)
        weights = jax.nn.softmax(jnp.where(iota(4) > iota(3), -jnp.inf, scores)).astype(x.dtype)
        return self.output(jnp.einsum("bgrts,bsgk->btgrk", weights, v).reshape(x.shape))


def turned(x: Float[Array, "B T H K"], theta: float) -> Float[Array, "B T H K"]:
    """Pairs of numbers, half a head apart, turned by the position times angles that fall from 1 to 1 / `theta`."""
    T, K = x.shape[1], x.shape[3]
    rates = jnp.exp(jax.lax.iota(jnp.float32, K // 2) * (-2 / K * jnp.log(theta)))
    angles = jax.lax.iota(jnp.float32, T)[None, :, None, None] * rates[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=3)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=3).astype(x.dtype)


class LlamaBlock(nnx.Module):
    """Attention, then a gated feed-forward network, each added to its input."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = Norm(config, rngs=rngs)
        self.attention = GroupedAttention(config, rngs=rngs)
        self.feed_forward_norm = Norm(config, rngs=rngs)
        self.gate = matrix(config, rngs, config.width, config.hidden)
        self.expand = matrix(config, rngs, config.width, config.hidden)
        self.contract = matrix(
            config, rngs, config.hidden, config.width, scale=residual_scale(config)
        )

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The tokens after one block."""
        x = x + self.attention(self.attention_norm(x))
        y = self.feed_forward_norm(x)
        return x + self.contract(jax.nn.silu(self.gate(y)) * self.expand(y))


@dataclass(frozen=True)
class Llama:
    """The model: an embedding, blocks under a scan, a norm and a projection."""

    config: LlamaConfig

    @property
    def kinds(self) -> dict[str, Kind]:
        """Its kinds of modules, by name."""
        config = self.config
        kinds: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
            "tokens": lambda rngs: embedding(config, rngs, config.vocabulary),
            "blocks": lambda rngs: LlamaBlock(config, rngs=rngs),
            "norm": lambda rngs: Norm(config, rngs=rngs),
            "head": lambda rngs: matrix(config, rngs, config.width, config.vocabulary),
        }
        return {
            name: Kind(build) for name, build in kinds.items() if name != "head" or not config.tied
        }

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Fresh parameters: nested dicts of float32 arrays, e.g. `blocks/attention/keys/kernel` [blocks, D, G K]."""
        keys = dict(zip(self.kinds, jax.random.split(key, len(self.kinds)), strict=True))
        stack = jax.vmap(self.kinds["blocks"].init)(
            jax.random.split(keys["blocks"], self.config.blocks)
        )
        return {
            name: stack if name == "blocks" else kind.init(keys[name])
            for name, kind in self.kinds.items()
        }

    def logits(self, params: Any, batch: Any, key: jax.Array | None) -> Float[Array, "B T V"]:
        """The logits of next tokens, in float32; nothing depends on the key."""
        kinds = self.kinds

        def block(x: Float[Array, "B T D"], p: Any) -> tuple[Float[Array, "B T D"], None]:
            return kinds["blocks"].module(p)(x), None

        tokens = kinds["tokens"].module(params["tokens"])
        x, _ = jax.lax.scan(block, tokens(batch["tokens"]), params["blocks"])
        x = kinds["norm"].module(params["norm"])(x)
        logits = tokens.attend(x) if self.config.tied else kinds["head"].module(params["head"])(x)
        return logits.astype(jnp.float32)

    def loss_fn(self, params: Any, batch: Any, rng: jax.Array | None) -> Weighted:
        """The loss of next tokens; the batch is that of GPT-2."""
        batch = jax.tree.map(jnp.asarray, batch)
        return prediction_loss(self.logits(params, batch, rng), batch)


def workload(size: str | None = None, **options: Any) -> Workload:
    """Llama of a size (`tiny`, `mini`, `1b`, `7b`, `8b`), with fields of `LlamaConfig` replaced by `options`."""
    return sized(
        "llama",
        SIZES,
        size,
        options,
        init=lambda config: Llama(config).init,
        loss_function=lambda config: Llama(config).loss_fn,
        abstract_batch=abstract_batch,
        open_data=open_data,
        learning_rate=3e-4,
        batch_size=32,
    )
