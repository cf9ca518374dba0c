"""U-Net (arXiv:1505.04597), scaled as torchgpipe does (arXiv:2004.09910), in plain JAX.

Axes: B batch, Y and X of an image, C and D channels.

On the way down, each level has half the side and twice the channels of the level before. On the way
up, each level also reads the result of the same level on the way down (the skip). Each 3 x 3
convolution is followed by dropout of whole channels, instance norm and a leaky ReLU. No convolution
has a bias, and the norm has no parameters.

    down_0 ───────────────── skip ───────────────── up_0      Y x X
       └─ down_1 ─────────── skip ─────────── up_1 ─┘         Y/2 x X/2
             └─ down_2 ───── skip ───── up_2 ─┘               Y/4 x X/4
                   └────── bottom ───────┘

A cut sends every skip that it crosses. A cut in the middle sends one image of each level.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jvpipe.ir.weighted import Weighted
from jvpipe.models.blocks import Key
from jvpipe.models.vision import Image, ImageConfig, LossWithAux, convolved
from jvpipe.models.workload import Data, Workload, sized

Tree = Any
Mask = Float[Array, "B _Y _X"]


@dataclass(frozen=True, kw_only=True)
class UNetConfig(ImageConfig):
    """The shape of a U-Net. `convolutions` and `channels` are B and C in torchgpipe's paper.

    Attributes:
        convolutions: the number of convolutions of a level on the way down, and again on the way
            up.
        channels: the channels of the first level.
        side: the side of an image.
        levels: the number of levels, not counting the bottom.
        dropout: the fraction of channels that training drops.
    """

    convolutions: int
    channels: int
    side: int = 192
    levels: int = 5
    dropout: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.convolutions, self.levels) < 1:
            raise ValueError(
                f"convolutions={self.convolutions} and levels={self.levels} must be at least 1"
            )
        if self.channels < 2 or self.channels % 2:
            raise ValueError(
                f"channels={self.channels} must be a multiple of 2, because the last level works "
                "on half of them"
            )
        # The bottom needs a side of 2 or more, because instance norm cannot normalize a single
        # pixel.
        least = 2 << self.levels
        if self.side % 2**self.levels or self.side < least:
            raise ValueError(
                f"side={self.side} is halved {self.levels} times: give a multiple of {least}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must lie in [0, 1)")

    @property
    def chains(self) -> dict[str, list[int]]:
        """Maps each chain, e.g. `down_0`, to the channels of its input and of each convolution."""
        chains, channels, inputs = {}, self.channels, 3
        for level in range(self.levels):
            chains[f"down_{level}"] = [inputs] + [channels << level] * self.convolutions
            inputs = channels << level
        bottom = [2 * inputs] * (self.convolutions - 1)
        chains["bottom"] = [inputs, *bottom, inputs]
        for level in reversed(range(self.levels)):
            # The level reads `channels << level` channels each from below and from the skip, and
            # returns half of that number.
            read, returned = channels << level + 1, (channels << level) // 2
            chains[f"up_{level}"] = [read] + [returned] * self.convolutions
        return chains


SIZES = {
    "tiny": UNetConfig(convolutions=1, channels=4, side=8, levels=2, dropout=0.0),
    "mini": UNetConfig(convolutions=2, channels=8, side=32, levels=3, dropout=0.0),
    "233m": UNetConfig(convolutions=5, channels=64),
    "362m": UNetConfig(convolutions=6, channels=72),
    "2.2b": UNetConfig(convolutions=11, channels=128),
    "5b": UNetConfig(convolutions=24, channels=128),
    "7.8b": UNetConfig(convolutions=24, channels=160),
    "15.8b": UNetConfig(convolutions=48, channels=160),
}


def init(config: UNetConfig) -> Callable[[jax.Array], Tree]:
    """Makes a function from a key to fresh parameters (He's initialization).

    The parameters are nested dicts of float32 arrays, e.g. `down_0/003`.
    """
    draw = nnx.initializers.variance_scaling(2.0, "fan_in", "truncated_normal")

    def init(key: jax.Array) -> Tree:
        params: dict[str, Any] = {}
        for i, (name, channels) in enumerate(config.chains.items()):
            chain_key = jax.random.fold_in(key, i)
            params[name] = {
                f"{j:03}": draw(jax.random.fold_in(chain_key, j), (3, 3, before, after))
                for j, (before, after) in enumerate(pairwise(channels))
            }
        last_key = jax.random.fold_in(key, len(params))
        params["segment"] = draw(last_key, (1, 1, config.channels // 2, 1))
        return params

    return init


def logits_function(config: UNetConfig) -> Callable[[Tree, Image, Key], Mask]:
    """Makes `logits(params, images, key)`, the logits that each pixel belongs to the mask.

    Without a key, there is no dropout.
    """
    positions = {name: i for i, name in enumerate(config.chains)}
    dropout = nnx.Dropout(config.dropout, broadcast_dims=(1, 2))  # one decision per channel

    def through(params: Tree, name: str, x: Image, key: Key) -> Image:
        layer_key = None if key is None else jax.random.fold_in(key, positions[name])
        for j, kernel in enumerate(params[name].values()):
            x = convolved(x, kernel.astype(x.dtype), (1, 1))
            if layer_key is not None:
                x = dropout(x, rngs=jax.random.fold_in(layer_key, j), deterministic=False)
            x = jax.nn.leaky_relu(instance_norm(x))
        return x

    def logits(params: Tree, x: Image, key: Key) -> Mask:
        x, skips = x.astype(config.dtype), []
        for level in range(config.levels):
            x = through(params, f"down_{level}", x, key)
            skips.append(x)
            x = nnx.max_pool(x, (2, 2), (2, 2))
        x = through(params, "bottom", x, key)
        for level in reversed(range(config.levels)):
            x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
            x = jnp.concatenate([x, skips.pop()], axis=3)
            x = through(params, f"up_{level}", x, key)
        segments = convolved(x, params["segment"].astype(x.dtype), (1, 1))  # [B, Y, X, 1]
        return segments[..., 0].astype(jnp.float32)

    return logits


def instance_norm(x: Image) -> Image:
    """Gives each channel of each image mean 0 and variance 1 (arXiv:1607.08022), in float32."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, (1, 2), keepdims=True)  # [B, 1, 1, C]
    variance = jnp.var(wide, (1, 2), keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype)


def mask_loss(logits: Mask, batch: Mapping[str, Any]) -> tuple[Weighted, dict[str, Weighted]]:
    """Computes the loss of masks, and Dice's coefficient over all pixels (`dice`).

    The batch holds `masks` [B, Y, X] of 0 and 1, and `weights` [B], both float32. The loss has the
    `total` of the images' mean cross entropies in nats and the sum of the weights.
    """
    masks, weights = batch["masks"], batch["weights"]
    # This equals -m log s(x) - (1 - m) log(1 - s(x)), the cross entropy of a sigmoid s, and cannot
    # overflow.
    pixel_nats = jax.nn.softplus(logits) - masks * logits
    nats = jnp.mean(pixel_nats, (1, 2))  # [B]
    predicted = (logits > 0).astype(jnp.float32)
    both, either = (
        jnp.sum(weights * jnp.sum(pixels, (1, 2)))
        for pixels in (2 * predicted * masks, predicted + masks)
    )
    loss = Weighted(jnp.sum(nats * weights), jnp.sum(weights))
    # Because of `Weighted`, both sums go over all micro-batches before they are divided.
    return loss, {"dice": Weighted(both, either)}


def loss_function(config: UNetConfig) -> LossWithAux:
    """Makes `loss_fn(params, batch, rng)`, the loss of masks and Dice's coefficient."""
    logits = logits_function(config)

    def loss_fn(params: Tree, batch: Tree, rng: Key) -> tuple[Weighted, Tree]:
        batch = jax.tree.map(jnp.asarray, batch)
        key = rng if config.dropout > 0 else None
        return mask_loss(logits(params, batch["images"], key), batch)

    return loss_fn


def abstract_masks(config: UNetConfig, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and types of a batch."""
    square = (batch_size, config.side, config.side)
    shapes = {"images": (*square, 3), "masks": square, "weights": (batch_size,)}
    return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}


def open_data(
    config: UNetConfig, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> Data:
    """Opens images with masks."""
    # Imported here because a plan needs neither data nor the libraries that read it.
    from jvpipe.models.image_data import open_masks

    return open_masks(data_path, seed, batch_size, side=config.side)


def workload(size: str | None = None, **options: Any) -> Workload:
    """Makes a U-Net of one of `SIZES`; `mini` by default.

    `options` replace fields of `UNetConfig`.
    """
    return sized(
        "unet",
        SIZES,
        size,
        options,
        init=init,
        loss_function=loss_function,
        has_aux=True,
        abstract_batch=abstract_masks,
        open_data=open_data,
        learning_rate=1e-3,
        batch_size=32,
    )
