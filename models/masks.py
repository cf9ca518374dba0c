"""Images with masks: a user's folders, or scikit-learn's digits drawn on colored waves.

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
    """`count` images with masks.

    `image` maps an index to an image [Y, X, 3], and `mask` maps it to the image's mask [Y, X] of 0
    and 1. `digest` identifies the data.
    """

    count: int
    image: Callable[[int], np.ndarray]
    mask: Callable[[int], np.ndarray]
    digest: str


def masked_digits(side: int) -> Masked:
    """Draws digits at random places in random colors on colored waves.

    A mask is 1 where the ink of its digit is at least 0.5.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    ink, _ = digits()
    times = max(1, side // 12)
    waves = drawn_images(side, 7)

    def placed(i: int) -> tuple[Canvas, Float32[np.ndarray, "3"]]:
        draw = np.random.default_rng((3, i))
        across = 8 * times
        y, x = draw.integers(0, side - across + 1, 2)
        canvas = np.zeros((side, side), np.float32)
        block = np.ones((times, times), np.float32)
        # Each pixel of the digit becomes a block of pixels.
        rows = slice(y, y + across)
        columns = slice(x, x + across)
        canvas[rows, columns] = np.kron(ink[i], block)
        return canvas, draw.normal(size=3).astype(np.float32)

    def image(i: int) -> Float32[np.ndarray, "Y X 3"]:
        canvas, color = placed(i)
        ink_share = canvas[..., None]  # [Y, X, 1]
        return ink_share * color + (1 - ink_share) * waves.image(i)

    def mask(i: int) -> Canvas:
        # The digit is drawn again from the same seed, so the mask fits its image.
        return (placed(i)[0] >= 0.5).astype(np.float32)

    name = f"digits {side} {waves.digest}"
    digest = hashlib.sha256(name.encode() + ink.tobytes())
    return Masked(len(ink), image, mask, digest.hexdigest())


def mask_folders(path: Path, side: int) -> Masked:
    """Pairs the files of the folders `images` and `masks`, by their names without suffixes.

    Images and masks are scaled and center-cropped to `side` x `side` pixels. A mask is 1 where its
    file is not black.

    Raises:
        ValueError: a folder is missing or empty, an image has no mask or a mask of another size, or
            a file cannot be decoded.
        MissingExtraError: Pillow is not installed.
    """
    for name in ("images", "masks"):
        if not (path / name).is_dir():
            raise ValueError(
                f"'{path}' has no folder '{name}': give a folder with the subfolders images and "
                "masks"
            )
    files = image_files(path / "images")
    masks = {mask.stem: mask for mask in image_files(path / "masks")}
    if missing := [file for file in files if file.stem not in masks]:
        raise ValueError(
            f"'{missing[0]}' has no mask: '{path / 'masks'}' needs an image called "
            f"{missing[0].stem}"
        )
    if len(files) < 2:
        raise ValueError(
            f"'{path / 'images'}' has one image: give at least two, because one is held out"
        )
    pairs = [(file, masks[file.stem]) for file in files]
    of_images = sizes_of([file for file, _ in pairs])
    of_masks = sizes_of([mask for _, mask in pairs])
    for (file, mask), size, other in zip(pairs, of_images, of_masks, strict=True):
        # The crop depends on the size, so a mask of another size would no longer fit its image.
        if size != other:
            raise ValueError(
                f"'{mask}' has {other[0]} x {other[1]} pixels, but '{file}' has {size[0]} x "
                f"{size[1]}: give a mask of the same size"
            )

    def image(i: int) -> np.ndarray:
        return decoded(pairs[i][0], side)

    def mask_of(i: int) -> np.ndarray:
        return decoded(pairs[i][1], side, mask=True)[..., 0]

    digest = listing_digest((file for pair in pairs for file in pair), path)
    return Masked(len(pairs), image, mask_of, digest)
