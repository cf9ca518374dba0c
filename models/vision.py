"""The parts that image models share: convolutions with batch norm, classification, and data.

The parts are in plain JAX. Axes: B batch, Y and X of an image, C and D channels, H and W of a
kernel, K classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jvpipe.ir.weighted import Weighted
from jvpipe.models.blocks import Key
from jvpipe.models.losses import prediction_loss
from jvpipe.models.workload import Data
from jvpipe.util.names import did_you_mean

Tree = Any
Image = Float[Array, "B _Y _X _C"]
LossWithAux = Callable[[Tree, Tree, Key], tuple[Weighted, Tree]]
"""A function from parameters, a batch and a key to the loss and to more values for the log."""


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """The shape of a model that reads square images of `side` x `side` pixels.

    Attributes:
        side: the number of pixels of a side.
        dtype: the type of the computation, float32 or bfloat16. Parameters are float32.
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
    """The shape of a model that assigns an image to one of `classes` classes."""

    classes: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes < 2:
            raise ValueError(f"classes={self.classes} is too small: there must be at least 2")


@dataclass(frozen=True)
class Convolution:
    """A ReLU (unless `linear`), then a convolution, then a batch norm.

    If `shifted`, half of the output channels read the image shifted by one pixel in Y and X.
    """

    inputs: int
    outputs: int
    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    shifted: bool = False
    linear: bool = False

    def init(self, key: jax.Array) -> Tree:
        """Makes fresh parameters (He's initialization)."""
        draw = nnx.initializers.variance_scaling(2.0, "fan_in", "truncated_normal")
        kernel = draw(key, (*self.kernel, self.inputs, self.outputs))
        return {"kernel": kernel, "scale": jnp.ones(self.outputs), "bias": jnp.zeros(self.outputs)}

    def averages(self) -> Tree:
        """Makes the initial running averages."""
        mean = np.zeros(self.outputs, np.float32)
        variance = np.ones(self.outputs, np.float32)
        return {"mean": mean, "variance": variance}

    def __call__(self, p: Tree, averages: Tree, x: Image, training: bool) -> tuple[Image, Tree]:
        """Returns the new image and the new averages."""
        x = x if self.linear else jax.nn.relu(x)
        kernel = p["kernel"].astype(x.dtype)
        if self.shifted:
            # With strides of 2, the two halves of the channels read different pixels ("factorized
            # reduction").
            padding = ((0, 0), (0, 1), (0, 1), (0, 0))
            moved = jnp.pad(x[:, 1:, 1:], padding)
            one, other = jnp.split(kernel, 2, axis=3)  # [H, W, C, D / 2] each
            first = convolved(x, one, self.strides)
            second = convolved(moved, other, self.strides)
            y = jnp.concatenate([first, second], axis=3)
        else:
            y = convolved(x, kernel, self.strides)
        return batch_norm(p, averages, y, training)


def convolved(x: Image, kernel: Float[Array, "H W C D"], strides: tuple[int, int]) -> Image:
    """Convolves a padded image, so that only strides make it smaller."""
    return jax.lax.conv_general_dilated(
        x, kernel, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def batch_norm(p: Tree, averages: Tree, x: Image, training: bool) -> tuple[Image, Tree]:
    """Gives each channel mean 0 and variance 1 (arXiv:1502.03167), then scales and shifts it.

    In training, mean and variance are those of the batch, and the running averages move towards
    them by a tenth of the difference. Otherwise, the running averages serve as mean and variance.
    Everything is computed in float32.
    """
    wide = x.astype(jnp.float32)
    mean, variance = averages["mean"], averages["variance"]
    if training:
        # Here the batch is a micro-batch. So with more micro-batches, the statistics are those of
        # fewer images.
        mean = jnp.mean(wide, (0, 1, 2))
        variance = jnp.var(wide, (0, 1, 2))
        averages = {
            "mean": 0.9 * averages["mean"] + 0.1 * mean,
            "variance": 0.9 * averages["variance"] + 0.1 * variance,
        }
    channels = (None, None, None)  # as an index, it turns [C] into [1, 1, 1, C]
    y = (wide - mean[channels]) * jax.lax.rsqrt(variance + 1e-5)[channels]
    y = y * p["scale"][channels] + p["bias"][channels]
    return y.astype(x.dtype), averages


def init_units(units: Mapping[str, Convolution], key: jax.Array) -> Tree:
    """Makes fresh parameters of convolutions, by name."""
    params = {}
    for i, (name, unit) in enumerate(units.items()):
        params[name] = unit.init(jax.random.fold_in(key, i))
    return params


@dataclass(frozen=True)
class Head:
    """A ReLU, the mean of each channel, then a linear map to classes."""

    channels: int
    classes: int

    def init(self, key: jax.Array) -> Tree:
        """Makes fresh parameters."""
        draw = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
        kernel = draw(key, (self.channels, self.classes))
        return {"kernel": kernel, "bias": jnp.zeros(self.classes)}

    def __call__(self, p: Tree, x: Image) -> Float[Array, "B K"]:
        """Returns logits in float32."""
        means = jnp.mean(jax.nn.relu(x).astype(jnp.float32), (1, 2))
        return means @ p["kernel"] + p["bias"][None]


def class_loss(
    logits: Float[Array, "B K"], batch: Mapping[str, Any]
) -> tuple[Weighted, dict[str, Weighted]]:
    """Computes the loss of classes, and the fraction of correctly classified images (`top_1`).

    The batch holds `targets` [B] int32 and `weights` [B] float32. The loss has the `total` of the
    cross entropies in nats and the sum of the weights.
    """
    is_right = jnp.argmax(logits, 1) == batch["targets"]
    right = is_right.astype(jnp.float32) * batch["weights"]
    loss = prediction_loss(logits, batch)
    return loss, {"top_1": Weighted(jnp.sum(right), jnp.sum(batch["weights"]))}


def abstract_images(config: ClassConfig, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and types of a batch of images."""
    images = (batch_size, config.side, config.side, 3)
    return {
        "images": jax.ShapeDtypeStruct(images, np.float32),
        "targets": jax.ShapeDtypeStruct((batch_size,), np.int32),
        "weights": jax.ShapeDtypeStruct((batch_size,), np.float32),
    }


def open_data(
    config: ClassConfig, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> Data:
    """Opens images with classes."""
    # Imported here because a plan needs neither data nor the libraries that read it.
    from jvpipe.models.image_data import open_images

    return open_images(data_path, seed, batch_size, side=config.side, classes=config.classes)
