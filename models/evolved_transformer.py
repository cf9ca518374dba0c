"""A search space of causal language models like the Evolved Transformer (arXiv:1901.11117).

The models use Flax NNX. Axes: B batch, T tokens, D model, K width of a convolution.

A block adds the results of its left and its right branch to its input. Embeddings, head and data
are GPT-2's. A branch has one of these operations, here with an example of a size and an activation:

    attention4     attention with 4 heads
    glu            a gated linear unit
    conv7_relu     a separable convolution over the last 7 tokens
    ffn4_swish     a feed-forward network of 4 D units
    none           no operation; the branch adds nothing
"""

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jvpipe.ir.weighted import Weighted
from jvpipe.models.architecture import Architecture, Block, SearchSpace, Supernet
from jvpipe.models.blocks import (
    Attention,
    Key,
    Vectors,
    dropped,
    keys_of,
    linear,
    normed,
    residual_scale,
)
from jvpipe.models.gpt2 import Embeddings, Gpt2Config, Head, abstract_batch, open_data
from jvpipe.models.kinds import Kind
from jvpipe.models.losses import LossFunction, prediction_loss
from jvpipe.models.workload import Workload, sized

LEFT = (
    "attention4",
    "attention8",
    "glu",
    "conv3_relu",
    "conv7_swish",
    "conv11_relu",
    "ffn1_swish",
    "ffn2_relu",
    "ffn4_relu",
)
RIGHT = ("none", "glu", "conv3_swish", "conv7_relu", "ffn1_relu")
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "swish": jax.nn.silu,
}
GPT = (Block("attention4", "none"), Block("ffn4_relu", "none"))
"""Two blocks that together make an ordinary block of a transformer."""
LAST = Block("ffn1_relu", "none")
"""The fixed last block. The head's norm shares a layer with the end of the block before it. If a
search could change that block, the layer would change, too.
"""


@dataclass(frozen=True)
class EvolvedTransformerConfig(Gpt2Config):
    """The shape of an evolved transformer. `blocks` is the number of slots."""


SIZES = {
    "tiny": EvolvedTransformerConfig(
        blocks=4, width=16, heads=4, vocabulary=300, tokens=16, dropout=0.0
    ),
    "mini": EvolvedTransformerConfig(
        blocks=12, width=256, heads=4, vocabulary=2048, tokens=64, dropout=0.0
    ),
    "small": EvolvedTransformerConfig(blocks=24, width=768, heads=12),
}


class Glu(nnx.Module):
    """A gated linear unit: a linear map, times the sigmoid of another linear map."""

    def __init__(self, config: Gpt2Config, *, rngs: nnx.Rngs) -> None:
        D = config.width
        self.inputs = linear(config, rngs, D, 2 * D, scale=residual_scale(config))

    def __call__(self, x: Vectors, key: Key) -> Vectors:
        """Returns the gated vectors."""
        y, gate = jnp.split(self.inputs(x), 2, axis=2)  # [B, T, D] each
        return y * jax.nn.sigmoid(gate)


class SeparableConvolution(nnx.Module):
    """A convolution of each channel over the last K tokens, an activation, then a linear map."""

    def __init__(self, config: Gpt2Config, K: int, activation: str, *, rngs: nnx.Rngs) -> None:
        D, dtype = config.width, jnp.dtype(config.dtype)
        # Each channel is a group, so there are D K parameters; a full convolution would have D D K.
        self.channels = nnx.Conv(
            D, D, (K,), padding="CAUSAL", feature_group_count=D, dtype=dtype, rngs=rngs
        )
        self.output = linear(config, rngs, D, D, scale=residual_scale(config))
        self.activation = activation

    def __call__(self, x: Vectors, key: Key) -> Vectors:
        """Mixes each token with the tokens before it."""
        return self.output(ACTIVATIONS[self.activation](self.channels(x)))


class FeedForward(nnx.Module):
    """A network with one hidden layer of `expansion` times D units."""

    def __init__(
        self, config: Gpt2Config, expansion: int, activation: str, *, rngs: nnx.Rngs
    ) -> None:
        D = config.width
        self.expand = linear(config, rngs, D, expansion * D)
        self.contract = linear(config, rngs, expansion * D, D, scale=residual_scale(config))
        self.activation = activation

    def __call__(self, x: Vectors, key: Key) -> Vectors:
        """Maps each token separately."""
        return self.contract(ACTIVATIONS[self.activation](self.expand(x)))


def operation(name: str, config: Gpt2Config, rngs: nnx.Rngs) -> Any:
    """Makes the module of a branch's operation; None for `none`.

    Raises:
        ValueError: there is no such operation.
    """
    # A name is a kind, then optionally a size and an activation: conv7_relu, attention4, glu.
    match = re.fullmatch(r"([a-z]+)(\d*)(?:_([a-z]+))?", name)
    kind, size, activation = match.groups() if match else ("", "", None)
    match kind:
        case "none":
            return None
        case "attention":
            return Attention(replace(config, heads=int(size)), rngs=rngs)
        case "glu":
            return Glu(config, rngs=rngs)
        case "conv":
            return SeparableConvolution(config, int(size), activation or "", rngs=rngs)
        case "ffn":
            return FeedForward(config, int(size), activation or "", rngs=rngs)
        case _:
            operations = ", ".join(sorted({*LEFT, *RIGHT}))
            raise ValueError(f"unknown operation '{name}': there are {operations}")


class TwoBranches(nnx.Module):
    """A block: a norm, then two branches. Their results are added to the input."""

    def __init__(self, config: Gpt2Config, block: Block, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.left = operation(block.left, config, rngs)
        self.right = operation(block.right, config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Vectors, key: Key) -> Vectors:
        """Returns the vectors after the block."""
        keys = keys_of(key, 4)
        y = normed(self.norm, x)
        # Each branch has two keys, even without an operation, so that a mutation of one branch
        # does not change the keys of the other.
        branches = (
            (self.left, keys[0], keys[1]),
            (self.right, keys[2], keys[3]),
        )
        for branch, inner, outer in branches:
            if branch is not None:
                x = x + dropped(self.dropout, branch(y, inner), outer)
        return x


@cache
def block_kind(config: EvolvedTransformerConfig, block: Block) -> Kind:
    """Returns the kind of module of a block. Each kind is made and traced only once."""
    return Kind(lambda rngs: TwoBranches(config, block, rngs=rngs))


@cache
def end_kinds(config: EvolvedTransformerConfig) -> dict[str, Kind]:
    """Returns the kinds of the modules before and after the blocks."""
    return {
        "embeddings": Kind(lambda rngs: Embeddings(config, rngs=rngs)),
        "last": Kind(lambda rngs: TwoBranches(config, LAST, rngs=rngs)),
        "head": Kind(lambda rngs: Head(config, rngs=rngs)),
    }


KindOf = Callable[[EvolvedTransformerConfig, Block], Kind]


def params_of(
    config: EvolvedTransformerConfig,
    architecture: Architecture,
    key: jax.Array,
    kind_of: KindOf = block_kind,
) -> dict[str, Any]:
    """Makes fresh parameters, e.g. `block_03_glu_none/left/inputs/kernel`.

    A part's parameters depend only on the key and on the part's name.
    """
    kinds = dict(end_kinds(config))
    for _, name, block in architecture.blocks():
        kinds[name] = kind_of(config, block)
    # A checksum of the name is folded in, not a count, because a mutation must not change the keys
    # of other parts.
    params = {}
    for name, kind in kinds.items():
        number = zlib.crc32(name.encode())
        params[name] = kind.init(jax.random.fold_in(key, number))
    return params


def loss_of(
    config: EvolvedTransformerConfig, architecture: Architecture, kind_of: KindOf = block_kind
) -> LossFunction:
    """Makes `loss_fn(params, batch, rng)`, the next-token loss of an architecture.

    The batch is as for GPT-2 (`gpt2.loss_function`).
    """
    ends, blocks = end_kinds(config), tuple(architecture.blocks())

    def loss_fn(params: Any, batch: Any, rng: Key) -> Weighted:
        batch = jax.tree.map(jnp.asarray, batch)

        def key(number: int) -> Key:
            if rng is None or config.dropout == 0:
                return None
            return jax.random.fold_in(rng, number)

        embeddings = ends["embeddings"].module(params["embeddings"])
        x = embeddings(batch["tokens"], key(0))
        for slot, name, block in blocks:
            module = kind_of(config, block).module(params[name])
            # The key depends only on the slot, so adding or removing another block does not change
            # it.
            x = module(x, key(2 + slot))
        x = ends["last"].module(params["last"])(x, key(1))
        logits = ends["head"].module(params["head"])(x, embeddings.tokens)
        return prediction_loss(logits, batch)

    return loss_fn


def default_architecture(config: EvolvedTransformerConfig) -> Architecture:
    """Returns the blocks of a plain transformer: attention and feed-forward networks alternate."""
    return Architecture(tuple(GPT[slot % 2] for slot in range(config.blocks)))


def supernet(config: EvolvedTransformerConfig, kind_of: KindOf = block_kind) -> Supernet:
    """Makes the space of all architectures that fill at least half of the slots.

    The space leaves out attention whose number of heads does not divide D.
    """

    def fits(operation: str) -> bool:
        heads = operation.removeprefix("attention")
        return heads == operation or config.width % int(heads) == 0

    left, half = tuple(filter(fits, LEFT)), (config.blocks + 1) // 2
    space = SearchSpace(left, RIGHT, slots=config.blocks, fewest=half)
    return Supernet(
        space=space,
        default=default_architecture(config),
        loss_of=partial(loss_of, config, kind_of=kind_of),
        params_of=partial(params_of, config, kind_of=kind_of),
    )


def workload(size: str | None = None, **options: Any) -> Workload:
    """Makes an evolved transformer of a size (`tiny`, `mini`, `small`; `mini` by default).

    `options` replace fields of `EvolvedTransformerConfig`. Training without a search uses the
    default architecture; a search uses `.supernet`.
    """
    return sized(
        "evolved-transformer",
        SIZES,
        size,
        options,
        init=lambda config: partial(params_of, config, default_architecture(config)),
        loss_function=lambda config: loss_of(config, default_architecture(config)),
        abstract_batch=abstract_batch,
        open_data=open_data,
        learning_rate=2.5e-4,
        batch_size=32,
        supernet=supernet,
    )
