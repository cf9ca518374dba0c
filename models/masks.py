"""Images with masks: those of folders, or scikit-learn's digits before coloured waves.

Axes: Y and X of an image.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from jvpipe.models.image_folders import decoded, image_files, listing_digest, sizes_of
from jvpipe.models.images import digits, drawn_images

Canvas = Float32[np.ndarray, "Y X"]


@dataclass(frozen=True)
class Masked:
    """So many images; `image` maps the number of one to its [Y, X, 3], `mask` to its mask [Y, X] of 0 and 1."""

    count: int
    image: Callable[[int], np.ndarray]
    mask: Callable[[int], np.ndarray]
    digest: str


def masked_digits(side: int) -> Masked:
    """A digit somewhere, in some colour, before coloured waves; the mask is its ink.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    ink, _ = digits()
    times = max(1, side // 12)
    waves = drawn_images(side, 7)

    def placed(i: int) -> tuple[Canvas, Float32[np.ndarray, "3"]]:
        draw, across = np.random.default_rng((3, i)), 8 * times
        y, x = draw.integers(0, side - across + 1, 2)
        canvas = np.zeros((side, side), np.float32)
        block = np.ones((times, times), np.float32)
        canvas[y : y + across, x : x + across] = np.kron(
            ink[i], block
        )  # each pixel becomes a block
        return canvas, draw.normal(size=3).astype(np.float32)

    def image(i: int) -> Float32[np.ndarray, "Y X 3"]:
        canvas, colour = placed(i)
        ink_share = canvas[..., None]  # [Y, X, 1]
        return ink_share * colour + (1 - ink_share) * waves.image(i)

    def mask(i: int) -> Canvas:
        # Drawn again from the same seed, so image and mask agree without being kept.
        return (placed(i)[0] >= 0.5).astype(np.float32)

    digest = hashlib.sha256(f"digits {side} {waves.digest}".encode() + ink.tobytes()).hexdigest()
    return Masked(len(ink), image, mask, digest)


def mask_folders(path: Path, side: int) -> Masked:
    """Images of the folder `images` with those of the folder `masks` that are called alike except for their suffixes.

    Both are scaled and cropped in their middle to `side` x `side` pixels; a mask is where an image is not black.

    Raises:
        ValueError: a folder is missing or empty, an image has no mask or one of another size, or one of them cannot be
            decoded.
        MissingExtraError: Pillow is not installed.
    """
    for name in ("images", "masks"):
        if not (path / name).is_dir():
            raise ValueError(
                f"'{path}' has no folder '{name}': give one with images and masks, called alike"
            )
    files = image_files(path / "images")
    masks = {mask.stem: mask for mask in image_files(path / "masks")}
    if missing := [file for file in files if file.stem not in masks]:
        raise ValueError(
            f"'{missing[0]}' has no mask: '{path / 'masks'}' has none called {missing[0].stem}"
        )
    if len(files) < 2:
        raise ValueError(
            f"'{path / 'images'}' has one image: give at least two, as one is held out"
        )
    pairs = [(file, masks[file.stem]) for file in files]
    of_images = sizes_of([file for file, _ in pairs])
    of_masks = sizes_of([mask for _, mask in pairs])
    for (file, mask), size, other in zip(pairs, of_images, of_masks, strict=True):
        # Cropped alike, images and masks of different sizes would no longer lie above each other.
        if size != other:
            raise ValueError(
                f"'{mask}' has {other[0]} x {other[1]} pixels, '{file}' {size[0]} x {size[1]}: "
                "give a mask of the same size"
            )

    def image(i: int) -> np.ndarray:
        return decoded(pairs[i][0], side)

    def mask_of(i: int) -> np.ndarray:
        return decoded(pairs[i][1], side, mask=True)[..., 0]

    digest = listing_digest((file for pair in pairs for file in pair), path)
    return Masked(len(pairs), image, mask_of, digest)
