"""VGG (arXiv:1409.1556), in plain JAX.

Axes: B batch, Y and X of an image, C channels, U units, K classes.

A group is a chain of 3 x 3 convolutions, each with a bias and a ReLU, but without a norm. Max
pooling after each group halves the image. Three linear maps follow, with dropout before the second
and the third.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jvpipe.ir.weighted import Weighted
from jvpipe.models.blocks import Key
from jvpipe.models.losses import Logits
from jvpipe.models.vision import (
    ClassConfig,
    Image,
    LossWithAux,
    abstract_images,
    class_loss,
    convolved,
    open_data,
)
from jvpipe.models.workload import Workload, sized

Tree = Any
CONVOLUTIONS = {7: (2, 2), 9: (2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""The number of convolutions in each group, by depth. The depth also counts three linear maps."""


@dataclass(frozen=True, kw_only=True)
class VggConfig(ClassConfig):
    """The shape of a VGG.

    Attributes:
        depth: the number of convolutions and linear maps; a key of `CONVOLUTIONS`.
        filters: the filters of the first group. The second, third and fourth group each have twice
            as many as the group before, and the fifth group has as many as the fourth.
        units: the units of the first two linear maps.
        dropout: the fraction of units that training drops.
    """

    depth: int
    filters: int = 64
    units: int = 4096
    dropout: float = 0.5

    def __post_init__(self) -> None:
        if self.depth not in CONVOLUTIONS:
            raise ValueError(
                f"depth={self.depth} must be one of {', '.join(map(str, CONVOLUTIONS))}"
            )
        if min(self.filters, self.units) < 1:
            raise ValueError(f"filters={self.filters} and units={self.units} must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must lie in [0, 1)")
        # Each group halves the image, and no halving may leave a remainder.
        groups = len(CONVOLUTIONS[self.depth])
        if self.side % 2**groups:
            raise ValueError(
                f"side={self.side} is halved {groups} times: give a multiple of {2**groups}"
            )
        super().__post_init__()

    @property
    def channels(self) -> list[int]:
        """The channels of the image, then the channels of each group."""
        groups = range(len(CONVOLUTIONS[self.depth]))
        return [3, *(self.filters << min(group, 3) for group in groups)]


SIZES = {
    "tiny": VggConfig(depth=7, filters=4, units=8, side=8, classes=4, dropout=0.0),
    "mini": VggConfig(depth=9, filters=16, units=64, side=16, classes=10, dropout=0.0),
    "16": VggConfig(depth=16),
    "19": VggConfig(depth=19),
}


def init(config: VggConfig) -> Callable[[jax.Array], Tree]:
    """Makes a function from a key to fresh parameters (He's initialization).

    The parameters are nested dicts of float32 arrays, e.g. `groups/1/0/kernel`.
    """
    draw = nnx.initializers.variance_scaling(2.0, "fan_in", "truncated_normal")

    def layer(key: jax.Array, *shape: int) -> Tree:
        return {"kernel": draw(key, shape), "bias": jnp.zeros(shape[-1])}

    def init(key: jax.Array) -> Tree:
        counts, channels = CONVOLUTIONS[config.depth], config.channels
        groups: dict[str, Any] = {}
        for group, count in enumerate(counts):
            before, after = channels[group : group + 2]
            convolutions = {}
            for i in range(count):
                layer_key = jax.random.fold_in(jax.random.fold_in(key, group), i)
                convolutions[str(i)] = layer(layer_key, 3, 3, after if i else before, after)
            groups[str(group)] = convolutions
        # The first linear map reads the remaining image as one vector. It has most of the
        # parameters of VGG-16.
        left = (config.side >> len(counts)) ** 2 * channels[-1]
        widths = (left, config.units, config.units, config.classes)
        maps_key = jax.random.fold_in(key, len(counts))
        maps = {
            str(i): layer(jax.random.fold_in(maps_key, i), *shape)
            for i, shape in enumerate(pairwise(widths))
        }
        return {"groups": groups, "maps": maps}

    return init


def logits_function(config: VggConfig) -> Logits:
    """Makes `logits(params, images, key)`, the logits [B, K]; without a key, no dropout."""

    def logits(params: Tree, x: Image, key: Key) -> Float[Array, "B K"]:
        x = x.astype(config.dtype)
        for group in params["groups"].values():
            for p in group.values():
                y = convolved(x, p["kernel"].astype(x.dtype), (1, 1))
                bias = p["bias"].astype(x.dtype)[None, None, None]
                x = jax.nn.relu(y + bias)
            # A cut after the pooling sends a quarter of the bytes of a cut before it.
            x = nnx.max_pool(x, (2, 2), (2, 2))
        return classified(params["maps"], x.reshape(x.shape[0], -1), key)

    def classified(maps: Tree, x: Float[Array, "B U"], key: Key) -> Float[Array, "B K"]:
        for i, p in enumerate(maps.values()):
            if i:
                x = nnx.Dropout(config.dropout)(jax.nn.relu(x), rngs=key, deterministic=key is None)
                key = None if key is None else jax.random.fold_in(key, i)
            y = x @ p["kernel"].astype(x.dtype)
            x = y + p["bias"].astype(x.dtype)[None]
        return x.astype(jnp.float32)

    return logits


def loss_function(config: VggConfig) -> LossWithAux:
    """Makes `loss_fn(params, batch, rng)`, the loss of classes and the top-1 as in `class_loss`."""
    logits = logits_function(config)

    def loss_fn(params: Tree, batch: Tree, rng: Key) -> tuple[Weighted, Tree]:
        batch = jax.tree.map(jnp.asarray, batch)
        key = rng if config.dropout > 0 else None
        return class_loss(logits(params, batch["images"], key), batch)

    return loss_fn


def workload(size: str | None = None, **options: Any) -> Workload:
    """Makes a VGG of a size (`tiny`, `mini`, `16`, `19`; `mini` by default).

    `options` replace fields of `VggConfig`.
    """
    return sized(
        "vgg",
        SIZES,
        size,
        options,
        init=init,
        loss_function=loss_function,
        has_aux=True,
        abstract_batch=abstract_images,
        open_data=open_data,
        learning_rate=1e-4,
        batch_size=128,
    )
