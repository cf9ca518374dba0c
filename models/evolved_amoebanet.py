"""A search space of image models with AmoebaNet's operations, in plain JAX.

Axes: B batch, Y and X of an image, C channels.

A block applies a 1 x 1 convolution, the projection, to its input x. It returns x + left(x) +
right(projection of x). The operation `none` returns the projection unchanged. All groups have
equally many slots, and the blocks of a group have equal shapes. Convolutions between groups halve
the image and double the channels.

A mutation of a block must not change the layers of its neighbors, because unchanged layers are not
compiled again. So unlike a cell of AmoebaNet, a block does not read its predecessor's input: with a
value that skips a block, a layer might span the block and its neighbors. For the same reason, the
parts between blocks begin with a convolution, without a ReLU before it. Batch norm uses the
statistics of the batch and keeps no running averages.
"""

import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jvpipe.ir.weighted import Weighted
from jvpipe.models.amoebanet import POOLINGS, convolutions, unpooled
from jvpipe.models.architecture import Architecture, Block, SearchSpace, Supernet
from jvpipe.models.blocks import Key
from jvpipe.models.losses import LossFunction, prediction_loss
from jvpipe.models.vision import (
    ClassConfig,
    Convolution,
    Head,
    Image,
    abstract_images,
    init_units,
    open_data,
)
from jvpipe.models.workload import Workload, sized

LEFT = ("conv_1x1", "conv_3x3", "conv_1x7_7x1")
RIGHT = ("none", "max_pool_3x3", "avg_pool_3x3", "conv_1x1", "conv_3x3", "conv_1x7_7x1")


@dataclass(frozen=True, kw_only=True)
class EvolvedAmoebaNetConfig(ClassConfig):
    """The shape of the model.

    Attributes:
        slots: the number of slots; all groups have equally many of them.
        filters: the channels of the first group.
        side: the side of an image.
        groups: the number of groups.
    """

    slots: int
    filters: int
    side: int = 32
    classes: int = 10
    groups: int = 2

    def __post_init__(self) -> None:
        is_empty = min(self.slots, self.groups) < 1
        if is_empty or self.slots % self.groups:
            raise ValueError(f"slots={self.slots} must be a multiple of groups={self.groups}")
        if self.filters < 4 or self.filters % 4:
            raise ValueError(
                f"filters={self.filters} must be a multiple of 4: operations work on quarters"
            )
        super().__post_init__()

    def channels(self, group: int) -> int:
        """Returns the channels of the blocks of a group."""
        return self.filters << group

    def group(self, slot: int) -> int:
        """Returns the group of a slot."""
        return slot * self.groups // self.slots


SIZES = {
    "tiny": EvolvedAmoebaNetConfig(slots=4, filters=8, side=8, classes=4),
    "mini": EvolvedAmoebaNetConfig(slots=8, filters=32, side=16),
}

Chain = tuple[Convolution, ...]


def through(chain: Chain, p: Any, x: Image) -> Image:
    """Applies a chain of convolutions whose batch norms use the batch's statistics."""
    for i, unit in enumerate(chain):
        # In training, batch norm does not read the averages, so initial ones are passed and
        # dropped.
        x, _ = unit(p[str(i)], unit.averages(), x, True)
    return x


def init(chain: Chain, key: jax.Array) -> Any:
    """Makes fresh parameters of a chain."""
    return init_units({str(i): unit for i, unit in enumerate(chain)}, key)


def block_chains(block: Block, channels: int) -> dict[str, Chain]:
    """Returns the convolutions of a block. The chain `right` reads the result of `project`."""
    return {
        "left": convolutions(block.left, channels, 1),
        "project": (Convolution(channels, channels),),
        "right": convolutions(block.right, channels, 1),
    }


def run_block(block: Block, p: Any, x: Image) -> Image:
    """Returns the image after a block."""
    chains = block_chains(block, x.shape[3])
    projected = through(chains["project"], p["project"], x)
    right = through(chains["right"], p.get("right", {}), projected)  # no change if it is a pooling
    left = through(chains["left"], p["left"], x)
    pool = POOLINGS.get(block.right, unpooled)  # no change if the operation is a chain
    return x + left + pool(right, 1)


def entry(config: EvolvedAmoebaNetConfig, group: int) -> Convolution:
    """Returns the convolution from colors to the first group, or from a group to the next."""
    strides = (2, 2) if group else (1, 1)
    before = config.channels(group - 1) if group else 3
    return Convolution(before, config.channels(group), (3, 3), strides, linear=True)


def last(config: EvolvedAmoebaNetConfig) -> Convolution:
    """Returns the convolution before the head."""
    channels = config.channels(config.groups - 1)
    return Convolution(channels, channels, linear=True)


def head(config: EvolvedAmoebaNetConfig) -> Head:
    """Returns the map from the last group's channels to classes."""
    return Head(config.channels(config.groups - 1), config.classes)


def params_of(
    config: EvolvedAmoebaNetConfig, architecture: Architecture, key: jax.Array
) -> dict[str, Any]:
    """Makes fresh parameters, e.g. `block_03_conv_1x1_none/left/0/kernel`.

    A part's parameters depend only on the key and on the part's name.
    """

    def leaf(*names: str) -> jax.Array:
        # A checksum of the path is folded in, not a count, because a mutation must not change the
        # keys of other parts.
        return jax.random.fold_in(key, zlib.crc32("/".join(names).encode()))

    parts: dict[str, dict[str, Chain]] = {}
    for group in range(config.groups):
        parts[f"entry_{group}"] = {"conv": (entry(config, group),)}
    parts["last"] = {"conv": (last(config),)}
    for slot, name, block in architecture.blocks():
        parts[name] = block_chains(block, config.channels(config.group(slot)))

    def drawn(name: str) -> dict[str, Any]:
        chains = {side: chain for side, chain in parts[name].items() if chain}
        return {side: init(chain, leaf(name, side)) for side, chain in chains.items()}

    params = {name: drawn(name) for name in parts}
    return params | {"head": head(config).init(leaf("head"))}


def loss_of(config: EvolvedAmoebaNetConfig, architecture: Architecture) -> LossFunction:
    """Makes `loss_fn(params, batch, rng)`, the classification loss of an architecture.

    The batch has `targets` and `weights` as in `vision.class_loss`, and `images` [B, Y, X, 3]
    float32.
    """
    blocks = tuple(architecture.blocks())

    def loss_fn(params: Any, batch: Any, rng: Key) -> Weighted:
        batch = jax.tree.map(jnp.asarray, batch)
        x = batch["images"].astype(config.dtype)
        for group in range(config.groups):
            x = through((entry(config, group),), params[f"entry_{group}"]["conv"], x)
            for slot, name, block in blocks:
                if config.group(slot) == group:
                    x = run_block(block, params[name], x)
        x = through((last(config),), params["last"]["conv"], x)
        return prediction_loss(head(config)(params["head"], x), batch)

    return loss_fn


def default_architecture(config: EvolvedAmoebaNetConfig) -> Architecture:
    """Returns blocks with operations that are frequent in AmoebaNet's cells."""
    pair = (Block("conv_1x7_7x1", "max_pool_3x3"), Block("conv_1x1", "avg_pool_3x3"))
    return Architecture(tuple(pair[slot % 2] for slot in range(config.slots)))


def supernet(config: EvolvedAmoebaNetConfig) -> Supernet:
    """Makes the space of all architectures that fill at least half of the slots."""
    half = (config.slots + 1) // 2
    return Supernet(
        space=SearchSpace(LEFT, RIGHT, slots=config.slots, fewest=half),
        default=default_architecture(config),
        loss_of=partial(loss_of, config),
        params_of=partial(params_of, config),
    )


def workload(size: str | None = None, **options: Any) -> Workload:
    """Makes an evolved AmoebaNet of a size (`tiny`, `mini`; `mini` by default).

    `options` replace fields of `EvolvedAmoebaNetConfig`. Training without a search uses the default
    architecture; a search uses `.supernet`.
    """
    return sized(
        "evolved-amoebanet",
        SIZES,
        size,
        options,
        init=lambda config: partial(params_of, config, default_architecture(config)),
        loss_function=lambda config: loss_of(config, default_architecture(config)),
        abstract_batch=abstract_images,
        open_data=open_data,
        learning_rate=1e-3,
        batch_size=128,
        supernet=supernet,
    )
