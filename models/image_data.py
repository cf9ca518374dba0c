"""Images as training data: reshuffled in each epoch, with some images held out."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from jvpipe.models.batches import Transform, fixed_batches, train_batches
from jvpipe.models.image_folders import class_folders
from jvpipe.models.images import DIGITS, Images, digit_images, drawn_images, read_images
from jvpipe.models.masks import mask_folders, masked_digits
from jvpipe.models.text import frequency_loss
from jvpipe.models.workload import Batch, Batches, Data


class Parts(NamedTuple):
    """The images to train on and the held-out images.

    Attributes:
        records: the indices of the images to train on.
        train: batches of the images to train on.
        held_out: batches of the held-out images.
    """

    records: Int32[np.ndarray, "N 1"]
    train: Batches
    held_out: Sequence[Batch]


def parted(
    count: int, example: Transform, seed: int, batch_size: int, one_in: int = 16, limit: int = 512
) -> Parts:
    """Splits `count` images into some to train on and some to hold out.

    Args:
        count: the number of images.
        example: makes an example from a record, which holds the index of an image.
        seed: determines the order of training, but not which images are held out.
        batch_size: the number of examples in a batch.
        one_in: one image in `one_in` is held out.
        limit: how many images to hold out at most; they stay in memory.
    """
    # The permutation does not depend on `seed`, so every run holds out the same images.
    order = np.random.default_rng(0).permutation(count).astype(np.int32)[:, None]  # [count, 1]
    aside = min(limit, max(1, count // one_in))
    held_out, records = np.split(order, [aside])
    train = train_batches(records, example, seed, batch_size)
    return Parts(records, train, fixed_batches(held_out, example, batch_size))


def open_images(
    data_path: Path | None, seed: int, batch_size: int, *, side: int, classes: int
) -> Data:
    """Opens images of `side` x `side` pixels: batches of `images`, `targets`, and `weights` of 1.

    `data_path` is an .npz file, or a folder with a subfolder for each class. If it is None, the
    images are scikit-learn's digits for ten classes, and generated images for any other number of
    classes.

    Raises:
        ValueError: as in `read_images`, `class_folders` and `digit_images`.
    """
    pictures = _pictures(data_path, side, classes)

    def example(record: np.ndarray, generator: np.random.Generator) -> Batch:
        i = int(record[0])
        return {
            "images": pictures.image(i),
            "targets": pictures.labels[i],
            "weights": np.ones((), np.float32),
        }

    parts = parted(len(pictures.labels), example, seed, batch_size)
    labels = pictures.labels[parts.records]
    return Data(
        train=parts.train,
        example=parts.held_out[0],
        held_out=parts.held_out,
        digest=pictures.digest,
        baseline_loss=frequency_loss(labels, parts.held_out, classes, 0),
    )


def open_masks(data_path: Path | None, seed: int, batch_size: int, *, side: int) -> Data:
    """Opens images of `side` x `side` pixels: batches of `images`, `masks`, and `weights` of 1.

    `data_path` is a folder with the subfolders `images` and `masks`. If it is None, the images show
    scikit-learn's digits.

    Raises:
        ValueError: as in `mask_folders` and `masked_digits`.
    """
    pictures = masked_digits(side) if data_path is None else mask_folders(data_path, side)

    def example(record: np.ndarray, generator: np.random.Generator) -> Batch:
        i = int(record[0])
        return {
            "images": pictures.image(i),
            "masks": pictures.mask(i),
            "weights": np.ones((), np.float32),
        }

    parts = parted(pictures.count, example, seed, batch_size)
    # A few hundred masks suffice to estimate the fraction of masked pixels.
    shares = [pictures.mask(int(i)).mean() for (i,) in parts.records[:512]]
    return Data(
        train=parts.train,
        example=parts.held_out[0],
        held_out=parts.held_out,
        digest=pictures.digest,
        baseline_loss=_share_loss(float(np.mean(shares)), parts.held_out),
    )


def _share_loss(share: float, held_out: Sequence[Batch]) -> float:
    """Returns the mean loss, in nats, if each pixel is 1 with the predicted probability `share`."""
    weights = np.concatenate([batch["weights"] for batch in held_out])
    masked = np.concatenate([batch["masks"].mean((1, 2)) for batch in held_out])
    share = min(max(share, 1e-6), 1 - 1e-6)  # log 0 is not finite
    inside = -masked * np.log(share)
    outside = (1 - masked) * np.log(1 - share)
    nats = inside - outside
    return float(nats @ weights / weights.sum())


def _pictures(data_path: Path | None, side: int, classes: int) -> Images:
    if data_path is None:
        return digit_images(side) if classes == DIGITS else drawn_images(side, classes)
    if data_path.is_dir():
        return class_folders(data_path, side, classes)
    return read_images(data_path, side, classes)
