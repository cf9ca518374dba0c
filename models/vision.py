"""What the image models here share: convolutions with batch norm, classes and their data, in plain JAX.

Axes: B batch, Y and X of an image, C and D channels, H and W of a kernel, K classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jvpipe.ir.weighted import Weighted
from jvpipe.models.blocks import prediction_loss
from jvpipe.models.workload import Data
from jvpipe.util.names import did_you_mean

Tree = Any
Image = Float[Array, "B _Y _X _C"]


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """What a model of images reads: squares of `side`.

    `dtype` is that of the computation, float32 or bfloat16; parameters are float32.
    """

    side: int = 224
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(did_you_mean("dtype", self.dtype, ["float32", "bfloat16"]))
        if self.side < 8:
            raise ValueError(f"side={self.side} is too small: it must be at least 8")


@dataclass(frozen=True, kw_only=True)
class ClassConfig(ImageConfig):
    """The shape of a model that tells to which of some `classes` an image belongs."""

    classes: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes < 2:
            raise ValueError(f"classes={self.classes} is too small: there must be 2 at least")


@dataclass(frozen=True)
class Convolution:
    """ReLU (unless `linear`), convolution, batch norm; `shifted`: half the channels see the image moved by a pixel."""

    inputs: int
    outputs: int
    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    shifted: bool = False
    linear: bool = False

    def init(self, key: jax.Array) -> Tree:
        """Fresh parameters (He's initialisation)."""
        draw = nnx.initializers.variance_scaling(2.0, "fan_in", "truncated_normal")
        kernel = draw(key, (*self.kernel, self.inputs, self.outputs))
        return {"kernel": kernel, "scale": jnp.ones(self.outputs), "bias": jnp.zeros(self.outputs)}

    def averages(self) -> Tree:
        """The running averages before any step."""
        return {
            "mean": np.zeros(self.outputs, np.float32),
            "variance": np.ones(self.outputs, np.float32),
        }

    def __call__(self, p: Tree, averages: Tree, x: Image, training: bool) -> tuple[Image, Tree]:
        """The image after it, and the new averages."""
        x = x if self.linear else jax.nn.relu(x)
        kernel = p["kernel"].astype(x.dtype)
        if self.shifted:
            moved = jnp.pad(x[:, 1:, 1:], ((0, 0), (0, 1), (0, 1), (0, 0)))
            halves = zip((x, moved), jnp.split(kernel, 2, axis=3), strict=True)
            y = jnp.concatenate(
                [convolved(image, half, self.strides) for image, half in halves], axis=3
            )
        else:
            y = convolved(x, kernel, self.strides)
        return batch_norm(p, averages, y, training)


def convolved(x: Image, kernel: Float[Array, "H W C D"], strides: tuple[int, int]) -> Image:
    """A convolution that keeps the image, except for strides."""
    return jax.lax.conv_general_dilated(
        x, kernel, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def batch_norm(p: Tree, averages: Tree, x: Image, training: bool) -> tuple[Image, Tree]:
    """Each channel with mean 0 and variance 1 (arXiv:1502.03167), scaled and moved; in float32.

    In training these are of the batch, and move the averages by a tenth.
    """
    wide = x.astype(jnp.float32)
    mean, variance = averages["mean"], averages["variance"]
    if training:
        mean, variance = jnp.mean(wide, (0, 1, 2)), jnp.var(wide, (0, 1, 2))
        averages = {
            "mean": 0.9 * averages["mean"] + 0.1 * mean,
            "variance": 0.9 * averages["variance"] + 0.1 * variance,
        }
    y = (wide - mean[None, None, None]) * jax.lax.rsqrt(variance + 1e-5)[None, None, None]
    return (y * p["scale"][None, None, None] + p["bias"][None, None, None]).astype(
        x.dtype
    ), averages


def init_units(units: Mapping[str, Convolution], key: jax.Array) -> Tree:
    """Fresh parameters of convolutions by name."""
    return {
        name: unit.init(jax.random.fold_in(key, i)) for i, (name, unit) in enumerate(units.items())
    }


@dataclass(frozen=True)
class Head:
    """A linear map to classes of each channel's mean, after a ReLU."""

    channels: int
    classes: int

    def init(self, key: jax.Array) -> Tree:
        """Fresh parameters."""
        draw = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
        return {"kernel": draw(key, (self.channels, self.classes)), "bias": jnp.zeros(self.classes)}

    def __call__(self, p: Tree, x: Image) -> Float[Array, "B K"]:
        """Logits, in float32."""
        means = jnp.mean(jax.nn.relu(x).astype(jnp.float32), (1, 2))
        return means @ p["kernel"] + p["bias"][None]


def class_loss(
    logits: Float[Array, "B K"], batch: Mapping[str, Any]
) -> tuple[Weighted, dict[str, Weighted]]:
    """The loss of classes, and beside it how many are the likeliest ones (`top_1`).

    The batch holds `images` [B, Y, X, 3] float32, `targets` [B] int32 and `weights` [B] float32. `total` is the sum of
    the cross entropies in nats, `weight` their number.
    """
    right = (jnp.argmax(logits, 1) == batch["targets"]).astype(jnp.float32) * batch["weights"]
    return prediction_loss(logits, batch), {
        "top_1": Weighted(jnp.sum(right), jnp.sum(batch["weights"]))
    }


def abstract_images(config: ClassConfig, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and types of a batch of images."""
    shapes = {
        "images": (batch_size, config.side, config.side, 3),
        "targets": (batch_size,),
        "weights": (batch_size,),
    }
    dtypes = {"images": np.float32, "targets": np.int32, "weights": np.float32}
    return {name: jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in shapes.items()}


def open_data(
    config: ClassConfig, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> Data:
    """Images of classes."""
    from jvpipe.models.image_data import (
        open_images,
    )  # a plan needs no data, nor the libraries that read it

    return open_images(data_path, seed, batch_size, side=config.side, classes=config.classes)
