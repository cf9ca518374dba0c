"""Llama (arXiv:2302.13971, arXiv:2407.21783) and its family: causal language models, in Flax NNX.

Axes: B batch, T and S tokens, D model, H heads, G groups of heads, R heads in a group, K width of a
head, V vocabulary.

- Root mean square norm comes before each sublayer and after the last block.
- Queries and keys are rotated by angles that depend on the position (`rotary.py`).
- The heads of a group share keys and values (arXiv:2305.13245).
- The feed-forward network is gated (arXiv:2002.05202). No linear map has a bias.
- The blocks run as a scan over stacked parameters, [blocks, ...].

With other values of the configuration, the model is a Qwen 3 or a Gemma. R = H / G neighboring
heads share the keys of a group:

    queries   q0 q1 │ q2 q3      [B, T, G, R, K]
              ──┬── │ ──┬──
    keys        k0  │   k1       [B, S, G, K]
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from jvpipe.ir.weighted import Weighted
from jvpipe.models import llama_published
from jvpipe.models.blocks import Key, TextConfig, Vectors, embedding, linear, residual_scale
from jvpipe.models.gpt2 import abstract_batch, open_data
from jvpipe.models.kinds import Kind, adapted_kind
from jvpipe.models.losses import Logits, prediction_loss
from jvpipe.models.rotary import Rotation, turned
from jvpipe.models.workload import Workload, sized
from jvpipe.util.names import did_you_mean

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
}
"""The activations that the gate of a feed-forward network may have."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(TextConfig):
    """The shape of a Llama or of a relative (Qwen 3, Gemma).

    A Llama has the default values of the fields from `head_width` to `local_theta`.

    Attributes:
        heads: H.
        groups: G, which divides H.
        hidden: the units of the feed-forward network.
        theta: the base of the angles by which queries and keys are rotated.
        tied: whether the output projection is the transposed token embedding.
        epsilon: the number that norms add to the mean square.
        dropout: always 0, because a Llama has no dropout.
        head_width: K; 0 means D / H.
        normed_heads: whether queries and keys are normalized, each head separately.
        activation: "silu" or "gelu".
        offset_norms: whether norms multiply by one plus their scale.
        scaled_embedding: whether embeddings are multiplied by the square root of D.
        after_norms: whether there are also norms after the sublayers.
        score_width: scores are divided by the square root of this number; 0 means K.
        score_cap: a tanh limits scores to this magnitude; 0 for no limit.
        logit_cap: a tanh limits logits to this magnitude; 0 for no limit.
        window: how many tokens a token sees in a local block, including itself.
        spans: a letter for each block: L for a local block, G for a global one, in which a token
            sees itself and all tokens before it. The letters are repeated if there are more blocks;
            empty means that all blocks are global.
        local_theta: the base of the angles in local blocks, which `stretch` does not change; 0
            means that local blocks have the angles of global blocks.
        stretch: this field and the three after it adapt the angles to longer texts
            (`rotary.Rotation`).
    """

    heads: int
    groups: int
    hidden: int
    theta: float = 1e4
    tied: bool = False
    epsilon: float = 1e-5
    dropout: float = 0.0
    head_width: int = 0
    normed_heads: bool = False
    activation: str = "silu"
    offset_norms: bool = False
    scaled_embedding: bool = False
    after_norms: bool = False
    score_width: float = 0.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    window: int = 0
    spans: str = ""
    local_theta: float = 0.0
    stretch: float = 1.0
    stretch_low: float = 1.0
    stretch_high: float = 4.0
    stretch_from: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        shares_width = not self.head_width
        if self.heads < 1 or (shares_width and self.width % (2 * self.heads)):
            raise ValueError(
                f"width={self.width} divided by heads={self.heads} is not an even number: change "
                "one of them"
            )
        if self.head_width % 2:
            raise ValueError(
                f"head_width={self.head_width} must be even, because numbers are rotated in pairs"
            )
        if self.groups < 1 or self.heads % self.groups:
            raise ValueError(
                f"heads={self.heads} is not divisible by groups={self.groups}: change one of them"
            )
        if self.hidden < 1:
            raise ValueError(f"hidden={self.hidden} must be at least 1")
        if self.dropout:
            raise ValueError(f"dropout={self.dropout}: a Llama has no dropout, give 0")
        if self.activation not in ACTIVATIONS:
            raise ValueError(did_you_mean("activation", self.activation, list(ACTIVATIONS)))
        needs_window = "L" in self.spans and self.window < 1
        if set(self.spans) - {"L", "G"} or needs_window:
            raise ValueError(
                f"spans={self.spans!r} with window={self.window}: give only the letters L and G, "
                "and for L a window of at least 1"
            )

    @property
    def head(self) -> int:
        """K: the width of a head."""
        return self.head_width or self.width // self.heads

    @property
    def rotation(self) -> Rotation:
        """The rotation of queries and keys in global blocks."""
        return Rotation(
            self.theta, self.stretch, self.stretch_low, self.stretch_high, self.stretch_from
        )

    @property
    def local_rotation(self) -> Rotation:
        """The rotation of queries and keys in local blocks."""
        return Rotation(self.local_theta) if self.local_theta else self.rotation

    @property
    def local(self) -> Bool[np.ndarray, "blocks"] | None:
        """Which blocks are local; None if no block is."""
        if "L" not in self.spans:
            return None
        # `spans` has at least one letter, so as many copies as blocks are enough.
        letters = (self.spans * self.blocks)[: self.blocks]
        return np.array([letter == "L" for letter in letters])


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
        stretch=32.0,
        stretch_from=8192,
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
"""Two small models, then Llama 3.2 1B, Llama 2 7B and Llama 3 8B."""


def matrix(
    config: LlamaConfig, rngs: nnx.Rngs, inputs: int, outputs: int, scale: float = 1.0
) -> nnx.Linear:
    """Makes a linear map without a bias."""
    return linear(config, rngs, inputs, outputs, scale, bias=False)


class Norm(nnx.Module):
    """Scales vectors to a mean square of 1, then multiplies by a learned scale.

    It computes in float32. The result has the type of the input.
    """

    def __init__(self, config: LlamaConfig, width: int, *, rngs: nnx.Rngs) -> None:
        self.offset = config.offset_norms
        init = nnx.initializers.zeros if self.offset else nnx.initializers.ones
        self.norm = nnx.RMSNorm(width, epsilon=config.epsilon, scale_init=init, rngs=rngs)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Returns the normalized vectors."""
        y = x.astype(jnp.float32)
        normed = self.norm(y)
        if self.offset:
            # Gemma multiplies n = y / rms(y) by 1 + s. `self.norm` gives s n, so n is added.
            square = jnp.mean(y * y, -1, keepdims=True)
            normed = normed + y * jax.lax.rsqrt(square + self.norm.epsilon)
        return normed.astype(x.dtype)


class GroupedAttention(nnx.Module):
    """Attention of each token to itself and the tokens before it, with H heads in G groups."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        query_width, shared = config.heads * config.head, config.groups * config.head
        self.config = config
        self.queries = matrix(config, rngs, config.width, query_width)
        self.keys = matrix(config, rngs, config.width, shared)
        self.values = matrix(config, rngs, config.width, shared)
        self.output = matrix(config, rngs, query_width, config.width, scale=residual_scale(config))
        if config.normed_heads:
            self.query_norm = Norm(config, config.head, rngs=rngs)
            self.key_norm = Norm(config, config.head, rngs=rngs)

    def __call__(self, x: Vectors, local: Bool[Array, ""] | None = None) -> Vectors:
        """Mixes for each token its own and earlier values; if `local`, only those in its window."""
        config, (B, T, _) = self.config, x.shape
        split = (B, T, -1, config.head)
        q = self.queries(x).reshape(split)  # [B, T, H, K]
        k = self.keys(x).reshape(split)  # [B, T, G, K]
        v = self.values(x).reshape(split)  # [B, T, G, K]
        if config.normed_heads:
            # As in Qwen 3, the norms come before the rotation, which does not change lengths.
            q, k = self.query_norm(q), self.key_norm(k)
        rates = config.rotation.rates(config.head)
        if local is not None:
            # `local` is a traced value of the scan, so one traced block serves as local and as
            # global.
            rates = jnp.where(local, config.local_rotation.rates(config.head), rates)
        q, k = turned(q, rates), turned(k, rates)
        q = q.reshape(B, T, config.groups, -1, config.head)  # [B, T, G, R, K]
        scores = jnp.einsum("btgrk,bsgk->bgrts", q, k).astype(jnp.float32)
        scores = scores * (config.score_width or config.head) ** -0.5
        scores = capped(scores, config.score_cap)  # [B, G, R, T, S]
        # The mask is made here of iotas, so that it is neither sent over cuts nor stored as a
        # constant.
        iota = partial(jax.lax.broadcasted_iota, jnp.int32, scores.shape)
        unseen = iota(4) > iota(3)
        if local is not None:
            is_far = iota(3) - iota(4) >= config.window
            unseen = unseen | (local & is_far)
        # A token always sees itself, so no row of scores is all -inf.
        weights = jax.nn.softmax(jnp.where(unseen, -jnp.inf, scores)).astype(x.dtype)
        mixed = jnp.einsum("bgrts,bsgk->btgrk", weights, v)
        return self.output(mixed.reshape(B, T, -1))  # [B, T, H K] before the map


def capped(x: Float[Array, "*B"], cap: float) -> Float[Array, "*B"]:
    """Limits magnitudes to a cap by tanh (arXiv:2408.00118). A cap of 0 changes nothing."""
    return jnp.tanh(x / cap) * cap if cap else x


class LlamaBlock(nnx.Module):
    """Attention, then a gated feed-forward network, each added to its input."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        width, hidden = config.width, config.hidden
        self.attention_norm = Norm(config, width, rngs=rngs)
        self.attention = GroupedAttention(config, rngs=rngs)
        self.feed_forward_norm = Norm(config, width, rngs=rngs)
        self.gate = matrix(config, rngs, width, hidden)
        self.expand = matrix(config, rngs, width, hidden)
        self.contract = matrix(config, rngs, hidden, width, scale=residual_scale(config))
        if config.after_norms:
            self.mixed_norm = Norm(config, config.width, rngs=rngs)
            self.contracted_norm = Norm(config, config.width, rngs=rngs)

    def __call__(self, x: Vectors, local: Bool[Array, ""] | None = None) -> Vectors:
        """Returns the vectors after the block."""
        after, activation = self.config.after_norms, ACTIVATIONS[self.config.activation]
        mixed = self.attention(self.attention_norm(x), local)
        x = x + (self.mixed_norm(mixed) if after else mixed)
        y = self.feed_forward_norm(x)
        # SwiGLU or GeGLU, arXiv:2002.05202, equation 6; `hidden` numbers per token.
        y = self.contract(activation(self.gate(y)) * self.expand(y))
        return x + (self.contracted_norm(y) if after else y)


@dataclass(frozen=True)
class Llama:
    """The model: an embedding, blocks in a scan, a norm and a projection."""

    config: LlamaConfig

    @property
    def kinds(self) -> dict[str, Kind]:
        """The model's kinds of modules, by name."""
        config = self.config
        kinds: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
            "tokens": lambda rngs: embedding(config, rngs, config.vocabulary),
            "blocks": lambda rngs: LlamaBlock(config, rngs=rngs),
            "norm": lambda rngs: Norm(config, config.width, rngs=rngs),
            "head": lambda rngs: matrix(config, rngs, config.width, config.vocabulary),
        }
        return {
            name: adapted_kind(build, config, name)
            for name, build in kinds.items()
            if name != "head" or not config.tied
        }

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Makes fresh parameters: nested dicts of float32 arrays.

        The parameters of blocks are stacked, e.g. `blocks/attention/keys/kernel` [blocks, D, G K].
        """
        keys = dict(zip(self.kinds, jax.random.split(key, len(self.kinds)), strict=True))
        block_keys = jax.random.split(keys["blocks"], self.config.blocks)
        stack = jax.vmap(self.kinds["blocks"].init)(block_keys)
        return {
            name: stack if name == "blocks" else kind.init(keys[name])
            for name, kind in self.kinds.items()
        }

    def logits(self, params: Any, batch: Any, key: Key) -> Float[Array, "B T V"]:
        """Computes the logits of next tokens in float32. The key is not used."""
        kinds, config = self.kinds, self.config

        def block(x: Vectors, scanned: Any) -> tuple[Vectors, None]:
            p, *local = scanned
            return kinds["blocks"].module(p)(x, *local), None

        tokens = kinds["tokens"].module(params["tokens"])
        x = tokens(batch["tokens"])  # [B, T, D]
        if config.scaled_embedding:
            x = x * jnp.asarray(config.width**0.5, x.dtype)
        # A scan traces one block, however many there are. Cuts lie between the scan's iterations.
        local = () if config.local is None else (config.local,)
        x, _ = jax.lax.scan(block, x, (params["blocks"], *local))
        x = kinds["norm"].module(params["norm"])(x)
        logits = tokens.attend(x) if config.tied else kinds["head"].module(params["head"])(x)
        return capped(logits.astype(jnp.float32), config.logit_cap)

    def loss_fn(self, params: Any, batch: Any, rng: Key) -> Weighted:
        """Computes the loss of next tokens, for a batch as in `gpt2.loss_function`."""
        batch = jax.tree.map(jnp.asarray, batch)
        return prediction_loss(self.logits(params, batch, rng), batch)


def logits_function(config: LlamaConfig) -> Logits:
    """Makes `logits(params, batch, key)`, the logits of next tokens [B, T, V]."""
    return Llama(config).logits


FORMAT = llama_published.FORMAT


def family(
    name: str, sizes: Mapping[str, LlamaConfig], size: str | None, options: Mapping[str, Any]
) -> Workload:
    """Makes a model of the Llama family, of one of its sizes.

    `options` replace fields of `LlamaConfig`.
    """
    return sized(
        name,
        sizes,
        size,
        options,
        init=lambda config: Llama(config).init,
        loss_function=lambda config: Llama(config).loss_fn,
        abstract_batch=abstract_batch,
        open_data=open_data,
        learning_rate=3e-4,
        batch_size=32,
    )


def workload(size: str | None = None, **options: Any) -> Workload:
    """Makes a Llama of a size (`tiny`, `mini`, `1b`, `7b`, `8b`; `mini` by default).

    `options` replace fields of `LlamaConfig`.
    """
    return family("llama", SIZES, size, options)
