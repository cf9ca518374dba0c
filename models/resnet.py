"""ResNet of bottlenecks (arXiv:1512.03385), in plain JAX.

Axes: B batch, Y and X of an image, C channels.

Each group of blocks works on half the side and twice the channels of the group before. In a block
that halves the image, the 3 x 3 convolution has the stride (as in arXiv:1706.02677). A ReLU
precedes each convolution of a block. No ReLU follows the sum that the block returns.

    x ──┬── reduce 1x1 ── middle 3x3 ── expand 1x1 ──(+)── y     arXiv:1512.03385, figure 5
        └────────────── shortcut 1x1, or ReLU ────────┘
    4 C       C             C               4 C

The loss takes and returns the running averages of batch norm (`has_state=True`). If the loss gets
no key, it uses the averages instead of the batch's statistics and does not change them.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jvpipe.ir.weighted import Weighted
from jvpipe.models.vision import (
    ClassConfig,
    Convolution,
    Head,
    Image,
    abstract_images,
    class_loss,
    init_units,
    open_data,
)
from jvpipe.models.workload import Workload, sized

Tree = Any
BLOCKS = {
    8: (1, 1),
    11: (1, 1, 1),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
"""The number of blocks in each group, by depth. The depth counts convolutions (without shortcuts)
and the linear map."""


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(ClassConfig):
    """The shape of a ResNet.

    Attributes:
        depth: the number of convolutions without shortcuts, plus one for the linear map; a key of
            `BLOCKS`.
        filters: the filters of the first group; the group's result has 4 times as many channels.
        stem_reductions: how often the stem halves the image: 2, or 0 for small images.
    """

    depth: int
    filters: int = 64
    stem_reductions: int = 2

    def __post_init__(self) -> None:
        if self.depth not in BLOCKS:
            raise ValueError(f"depth={self.depth} must be one of {', '.join(map(str, BLOCKS))}")
        if self.filters < 1:
            raise ValueError(f"filters={self.filters} must be at least 1")
        if self.stem_reductions not in (0, 2):
            raise ValueError(
                f"stem_reductions={self.stem_reductions} must be 0 for small images, else 2"
            )
        super().__post_init__()


SIZES = {
    "tiny": ResNetConfig(depth=8, filters=4, side=8, classes=4, stem_reductions=0),
    "mini": ResNetConfig(depth=11, filters=16, side=16, classes=10, stem_reductions=0),
    "50": ResNetConfig(depth=50),
    "101": ResNetConfig(depth=101),
    "152": ResNetConfig(depth=152),
}


@dataclass(frozen=True)
class Bottleneck:
    """Three convolutions, whose result is added to the input or to a projection of the input."""

    inputs: int
    channels: int
    stride: int

    @property
    def outputs(self) -> int:
        """The number of channels of the result."""
        return 4 * self.channels

    @property
    def units(self) -> dict[str, Convolution]:
        """The convolutions by name, with a `shortcut` if input and result differ in shape."""
        strides = (self.stride, self.stride)
        chain = {
            "reduce": Convolution(self.inputs, self.channels),
            "middle": Convolution(self.channels, self.channels, (3, 3), strides),
            "expand": Convolution(self.channels, self.outputs),
        }
        fits = self.inputs == self.outputs and self.stride == 1
        if not fits:
            chain["shortcut"] = Convolution(self.inputs, self.outputs, strides=strides)
        return chain

    def __call__(self, p: Tree, averages: Tree, x: Image, training: bool) -> tuple[Image, Tree]:
        """Returns the image after the block, and the new averages."""
        units, new = self.units, {}

        def after(name: str, image: Image) -> Image:
            image, new[name] = units[name](p[name], averages[name], image, training)
            return image

        y = after("expand", after("middle", after("reduce", x)))
        if "shortcut" in units:
            # The projection begins with a ReLU, and the identity below gets one, too.
            return after("shortcut", x) + y, new
        return jax.nn.relu(x) + y, new


@dataclass(frozen=True)
class ResNet:
    """The model: a stem, blocks, and a linear map of each channel's mean."""

    config: ResNetConfig

    @property
    def stem(self) -> Convolution:
        """The convolution from colors to channels."""
        size, stride = (7, 2) if self.config.stem_reductions else (3, 1)
        kernel, strides = (size, size), (stride, stride)
        # The stem has no ReLU, because it reads colors, which may be negative.
        return Convolution(3, self.config.filters, kernel, strides, linear=True)

    @property
    def blocks(self) -> dict[str, Bottleneck]:
        """The blocks by name, in order."""
        blocks: dict[str, Bottleneck] = {}
        inputs = self.config.filters
        for group, count in enumerate(BLOCKS[self.config.depth]):
            channels = self.config.filters << group
            for i in range(count):
                # The first group does not halve the image, because the stem has already halved
                # large images.
                stride = 2 if group and not i else 1
                block = Bottleneck(inputs, channels, stride)
                blocks[f"{len(blocks):03}"] = block
                inputs = block.outputs
        return blocks

    @property
    def head(self) -> Head:
        """The map from the last block's channels to classes."""
        return Head(list(self.blocks.values())[-1].outputs, self.config.classes)

    def init(self, key: jax.Array) -> Tree:
        """Makes fresh parameters: nested dicts of arrays, e.g. `blocks/003/middle/kernel`."""
        blocks = self.blocks
        keys = [jax.random.fold_in(key, i) for i in range(2 + len(blocks))]
        key_of = dict(zip(blocks, keys[2:], strict=True))
        stem = self.stem.init(keys[0])
        of_blocks = {name: init_units(block.units, key_of[name]) for name, block in blocks.items()}
        return {"stem": stem, "blocks": of_blocks, "head": self.head.init(keys[1])}

    def averages(self) -> Tree:
        """Makes the initial model state: the running averages."""
        blocks = {
            name: {n: unit.averages() for n, unit in block.units.items()}
            for name, block in self.blocks.items()
        }
        return {"stem": self.stem.averages(), "blocks": blocks}

    def loss_fn(
        self, params: Tree, averages: Tree, batch: Tree, rng: jax.Array | None
    ) -> tuple[Weighted, Tree, Tree]:
        """Computes the loss of classes, the new averages and the top-1 accuracy.

        Without a key, the loss uses the averages and returns them unchanged.
        """
        batch, training = jax.tree.map(jnp.asarray, batch), rng is not None
        x = batch["images"].astype(self.config.dtype)
        x, stem = self.stem(params["stem"], averages["stem"], x, training)
        if self.config.stem_reductions:
            x = nnx.max_pool(x, (3, 3), (2, 2), "SAME")
        new = {}
        # Only the image passes from block to block, so a cut between two blocks sends nothing else.
        for name, block in self.blocks.items():
            x, new[name] = block(params["blocks"][name], averages["blocks"][name], x, training)
        loss, aux = class_loss(self.head(params["head"], x), batch)
        return loss, {"stem": stem, "blocks": new}, aux


def workload(size: str | None = None, **options: Any) -> Workload:
    """Makes a ResNet of a size (`tiny`, `mini`, `50`, `101`, `152`; `mini` by default).

    `options` replace fields of `ResNetConfig`.
    """
    return sized(
        "resnet",
        SIZES,
        size,
        options,
        init=lambda config: ResNet(config).init,
        loss_function=lambda config: ResNet(config).loss_fn,
        model_state=lambda config: ResNet(config).averages,
        has_aux=True,
        abstract_batch=abstract_images,
        open_data=open_data,
        learning_rate=1e-3,
        batch_size=128,
    )
