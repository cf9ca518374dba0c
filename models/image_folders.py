"""Images in folders: a folder for each class, as ImageNet has them.

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
    """The images of a folder's folders; the names of these, in order, are the classes.

    An image is scaled and cropped in its middle to `side` x `side` pixels when it is read; numbers are from -1 to 1.

    Raises:
        ValueError: there are no classes or others than the model's, one is without images, or an image cannot be
            decoded.
        MissingExtraError: Pillow is not installed.
    """
    visible = [file for file in path.iterdir() if file.name[0] != "."]
    folders = sorted(folder for folder in visible if folder.is_dir())
    if len(folders) != classes:
        names = [folder.name for folder in folders[:3]] + ["..."] * (len(folders) > 3)
        cure = "each is to hold the images of one class"
        if len(folders) > 1:
            cure = f"give --set classes={len(folders)}"
        raise ValueError(
            f"'{path}' has {len(folders)} folders ({', '.join(names)}), "
            f"the model has {classes} classes: {cure}"
        )
    files = [image_files(folder) for folder in folders]
    counts = [len(some) for some in files]
    labels = np.repeat(np.arange(classes, dtype=np.int32), counts)
    flat = [file for some in files for file in some]
    sizes_of(flat)  # a file that cannot be decoded is found now, not in the middle of an epoch
    return Images(labels, lambda i: decoded(flat[i], side), listing_digest(flat, path))


def image_files(folder: Path) -> list[Path]:
    """The images of a folder, in the order of their names; ValueError if there is none."""
    visible = [file for file in folder.iterdir() if file.name[0] != "."]
    files = sorted(file for file in visible if file.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f"'{folder}' has no images ({', '.join(SUFFIXES)})")
    return files


def sizes_of(files: list[Path], few: int = 4096) -> list[tuple[int, int]]:
    """The sizes of images, looked at before anything is begun: if they are few they are decoded, else headers are read.

    Raises:
        ValueError: one cannot be decoded.
    """
    return [_opened(file, whole=len(files) <= few).size for file in files]


def decoded(file: Path, side: int, *, mask: bool = False) -> Float32[np.ndarray, "Y X _C"]:
    """An image scaled and cropped in its middle: three colours from -1 to 1; or where it is not black, 0 or 1.

    Args:
        file: of a format that Pillow reads.
        side: in pixels, of what is returned.
        mask: one channel is returned, whose pixels are never mixed.

    Raises:
        ValueError: it cannot be decoded.
    """
    picture = _opened(file, whole=True).convert("L" if mask else "RGB")
    from PIL import Image, ImageOps

    # Between a mask and what is around it there is nothing to interpolate.
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
    except Exception as problem:  # each format raises what it likes
        raise ValueError(
            f"cannot decode '{file}' ({problem}): repair it, or take it away"
        ) from problem


def listing_digest(files: Iterable[Path], root: Path) -> str:
    """What tells these files from others: their names and sizes."""
    lines = [f"{file.relative_to(root)} {file.stat().st_size}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
