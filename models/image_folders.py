"""Reads images from folders, with one folder for each class, as in ImageNet.

Axes: Y and X of an image.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from jvpipe.models.images import Images
from jvpipe.util.extras import extra

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


def class_folders(path: Path, side: int, classes: int) -> Images:
    """Opens the images in the subfolders of a folder. Each subfolder, by name, is a class.

    An image is decoded when it is used. It is scaled and center-cropped to `side` x `side` pixels,
    with values from -1 to 1.

    Raises:
        ValueError: the numbers of subfolders and of classes differ, a subfolder has no images, or
            an image cannot be decoded.
        MissingExtraError: Pillow is not installed.
    """
    visible = [file for file in path.iterdir() if file.name[0] != "."]
    folders = sorted(folder for folder in visible if folder.is_dir())
    if len(folders) != classes:
        names = [folder.name for folder in folders[:3]] + ["..."] * (len(folders) > 3)
        cure = "make a folder for the images of each class"
        if len(folders) > 1:
            cure = f"give --set classes={len(folders)}"
        raise ValueError(
            f"'{path}' has {len(folders)} folders ({', '.join(names)}), "
            f"but the model has {classes} classes: {cure}"
        )
    files = [image_files(folder) for folder in folders]
    counts = [len(some) for some in files]
    labels = np.repeat(np.arange(classes, dtype=np.int32), counts)
    flat = [file for some in files for file in some]
    # `sizes_of` checks the files now: few or none raise an error in the middle of an epoch.
    sizes_of(flat)
    return Images(labels, lambda i: decoded(flat[i], side), listing_digest(flat, path))


def image_files(folder: Path) -> list[Path]:
    """Returns the images of a folder, sorted by name.

    Raises:
        ValueError: the folder has no images.
    """
    visible = [file for file in folder.iterdir() if file.name[0] != "."]
    files = sorted(file for file in visible if file.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f"'{folder}' has no images: add some ({', '.join(SUFFIXES)})")
    return files


def sizes_of(files: list[Path], few: int = 4096) -> list[tuple[int, int]]:
    """Returns the (width, height) of each image, and thereby checks that it can be read.

    Up to `few` images are decoded completely. If there are more, only headers are read, to save
    time.

    Raises:
        ValueError: an image cannot be decoded.
    """
    return [_opened(file, whole=len(files) <= few).size for file in files]


def decoded(file: Path, side: int, *, mask: bool = False) -> Float32[np.ndarray, "Y X _C"]:
    """Decodes an image, scales it and crops it to its center.

    Args:
        file: an image in a format that Pillow reads.
        side: the side of the result, in pixels.
        mask: whether to return a mask.

    Returns:
        Three color channels from -1 to 1. For a mask, one channel: 0 where the image is black, else
            1.

    Raises:
        ValueError: the image cannot be decoded.
    """
    picture = _opened(file, whole=True).convert("L" if mask else "RGB")
    from PIL import Image, ImageOps

    # A mask's values are labels, which must not be interpolated.
    resampling = Image.Resampling.NEAREST if mask else Image.Resampling.BILINEAR
    fitted = ImageOps.fit(picture, (side, side), resampling)
    pixels = np.asarray(fitted, np.float32)
    if mask:
        return (pixels[..., None] > 0).astype(np.float32)
    return pixels / np.float32(127.5) - 1


def _opened(file: Path, *, whole: bool) -> Any:
    with extra("images"):
        from PIL import Image
    try:
        with Image.open(file) as picture:
            if whole:
                picture.load()
            return picture
    except Exception as problem:  # each format has its own exceptions
        raise ValueError(
            f"cannot decode '{file}' ({problem}): repair or remove the file"
        ) from problem


def listing_digest(files: Iterable[Path], root: Path) -> str:
    """Returns a digest of the names and sizes of files. To save time, it does not read contents."""
    lines = [f"{file.relative_to(root)} {file.stat().st_size}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
