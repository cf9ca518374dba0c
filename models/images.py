"""Labeled images: read from a file, generated, or scikit-learn's digits.

Digits and generated images need no download. Axes: N images, Y and X of an image.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int32

from jvpipe.util.brief import first_line
from jvpipe.util.extras import extra

DIGITS = 10
"""The number of classes of handwritten digits."""
Picture = Float32[np.ndarray, "Y X 3"]
Labels = Int32[np.ndarray, "N"]


@dataclass(frozen=True)
class Images:
    """Labeled images. `image` maps an index to an image [Y, X, 3]. `digest` identifies the data."""

    labels: Labels
    image: Callable[[int], np.ndarray]
    digest: str


def digit_images(side: int) -> Images:
    """Opens scikit-learn's handwritten digits, 1797 gray images of 8 x 8 pixels, scaled to `side`.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    gray, labels = digits()
    nearest = np.arange(side) * gray.shape[1] // side

    def image(i: int) -> Picture:
        ink = gray[i][np.ix_(nearest, nearest)]  # [Y, X], from 0 to 1
        return np.repeat(2 * ink[..., None] - 1, 3, axis=2)

    content = gray.tobytes() + labels.tobytes()
    return Images(labels, image, hashlib.sha256(content).hexdigest())


@cache
def digits() -> tuple[Float32[np.ndarray, "N 8 8"], Labels]:
    """Returns the ink of scikit-learn's digits (from 0 to 1), and their labels."""
    with extra("images"):
        digits = import_module("sklearn.datasets").load_digits()
    return (digits.images / 16).astype(np.float32), digits.target.astype(np.int32)


def drawn_images(side: int, classes: int, count: int = 4096) -> Images:
    """Generates images of colored waves. An image shows the four waves of its class, shifted.

    >>> drawn_images(8, 3).labels[:5].tolist()
    [0, 1, 2, 0, 1]
    """
    labels = np.arange(count, dtype=np.int32) % classes

    def image(i: int) -> Float32[np.ndarray, "Y X 3"]:
        # `waves` draws what all images of a class share; `view` draws what differs between images.
        waves = np.random.default_rng((1, labels[i]))
        view = np.random.default_rng((2, i))
        cycles = waves.integers(-3, 4, (2, 4))
        colors = waves.normal(size=(4, 3))
        steps = np.arange(side) / side + view.random((2, 1))  # [2, side]: along Y and along X
        down, across = cycles[:, :, None, None]  # [4, 1, 1] each
        phases = down * steps[0][:, None] + across * steps[1]  # [4, Y, X]
        seen = np.einsum("wyx,wc->yxc", np.cos(2 * np.pi * phases), colors)
        noise = view.normal(size=seen.shape)
        return (0.5 * seen + 0.2 * noise).astype(np.float32)

    digest = hashlib.sha256(f"waves {count} {side} {classes}".encode()).hexdigest()
    return Images(labels, image, digest)


def read_images(path: Path, side: int, classes: int) -> Images:
    """Reads the arrays `images` [N, side, side, 3] and `labels` [N] from an .npz file.

    Images of type uint8 are scaled to the range -1 to 1. Images of other types are not scaled.

    Raises:
        ValueError: the file cannot be read, or its arrays have wrong shapes, types or values.
    """
    try:
        with path.open("rb") as opened, np.lib.npyio.NpzFile(opened) as file:  # no pickles
            images, labels = file["images"], file["labels"]
    except Exception as problem:  # damaged files raise exceptions of several packages
        raise ValueError(
            f"'{path}' is not an .npz file of `images` and `labels` ({first_line(problem)}): "
            "write it with numpy.savez"
        ) from problem
    is_square = images.shape[1:] == (side, side, 3)
    if not is_square or labels.shape != images.shape[:1] or len(labels) < 2:
        shapes = f"[N, {side}, {side}, 3] and [N]"
        raise ValueError(
            f"'{path}': images {images.shape} and labels {labels.shape} should be {shapes}"
        )
    kinds = ("images", images, "biuf", "real numbers"), ("labels", labels, "biu", "integers")
    for name, array, allowed, what in kinds:
        if array.dtype.kind not in allowed:
            raise ValueError(
                f"'{path}': {name} such as {array.flat[0]} must be {what}, not {array.dtype}"
            )
    greatest_pixel = float(np.abs(images).max())
    if not greatest_pixel <= float(np.finfo(np.float32).max):  # also if it is not a number
        raise ValueError(
            f"'{path}': the largest magnitude in images is {greatest_pixel}: "
            "it must be finite in float32"
        )
    least, greatest = labels.min(), labels.max()
    if least < 0 or greatest >= classes:
        raise ValueError(
            f"'{path}': labels {least} to {greatest} are not among {classes} classes: "
            "number classes from 0, or give --set classes=N"
        )
    labels = labels.astype(np.int32)

    def image(i: int) -> Float32[np.ndarray, "Y X 3"]:
        pixels = images[i].astype(np.float32)
        return pixels / np.float32(127.5) - 1 if images.dtype == np.uint8 else pixels

    content = images.tobytes() + labels.tobytes()
    return Images(labels, image, hashlib.sha256(content).hexdigest())
