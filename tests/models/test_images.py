from pathlib import Path

import numpy as np
import pytest

from jvpipe.models import Batches, Model, load
from jvpipe.models.images import drawn_images, open_images


def test_data_fits_the_plan(tmp_path: Path) -> None:
    workload = load("amoebanet", "tiny")
    data = workload.open_data(None, tmp_path, 0, 8)
    assert isinstance(data.train, Batches)
    shapes = {name: (x.shape, x.dtype) for name, x in workload.abstract_batch(8).items()}
    for batch in [next(data.train), *data.held_out]:
        assert {name: (x.shape, x.dtype) for name, x in batch.items()} == shapes
    assert data.baseline_loss == pytest.approx(np.log(4), abs=0.01)
    assert len(data.held_out) == 4096 // 16 // 8


def test_a_model_of_jvpipe_gives_its_batches_as_a_users_does(tmp_path: Path) -> None:
    model: Model = load("amoebanet", "tiny")
    data = load("amoebanet", "tiny").open_data(None, tmp_path, 3, 8)
    for ours, theirs in zip(model.batches(3, 8), [next(data.train) for _ in range(2)], strict=False):
        np.testing.assert_array_equal(ours["images"], theirs["images"])
    assert len(load("amoebanet", "tiny").held_out()[0]["images"]) == load("amoebanet", "tiny").batch_size


def test_a_seed_changes_the_order_and_nothing_else() -> None:
    zero, again, one = (open_images(None, seed, 4, side=8, classes=3) for seed in (0, 0, 1))
    first, same, other = (next(data.train)["images"] for data in (zero, again, one))
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()
    for a, b in zip(zero.held_out, one.held_out, strict=True):
        np.testing.assert_array_equal(a["images"], b["images"])
    assert zero.digest == one.digest


def test_images_of_a_class_have_its_spectrum() -> None:
    found = drawn_images(16, 5)
    spectra = [np.abs(np.fft.fft2(found.image(i), axes=(0, 1))).ravel() for i in range(15)]
    distance = np.array([[np.linalg.norm(a - b) for b in spectra] for a in spectra]) + 1e9 * np.eye(15)
    assert (found.labels[distance.argmin(1)] == found.labels[:15]).mean() > 0.9


def test_a_file_of_images(tmp_path: Path) -> None:
    rng, path = np.random.default_rng(0), tmp_path / "images.npz"
    images = rng.integers(0, 256, (32, 8, 8, 3)).astype(np.uint8)
    np.savez(path, images=images, labels=np.arange(32) % 2)
    data = open_images(path, 0, 2, side=8, classes=2)
    seen = [next(data.train)["images"] for _ in range(15)] + [data.held_out[0]["images"]]
    back = np.concatenate(seen)
    assert back.dtype == np.float32
    assert sorted(map(tuple, back.reshape(32, -1))) == sorted(
        map(tuple, (images / np.float32(127.5) - 1).reshape(32, -1))
    )


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (None, "is no .npz file"),
        ({"images": np.zeros((4, 8, 8, 3))}, "is no .npz file of `images` and `labels`"),
        ({"images": np.zeros((4, 9, 8, 3)), "labels": np.zeros(4)}, r"\(4, 9, 8, 3\).* are not \[N, 8, 8, 3\]"),
        ({"images": np.zeros((4, 8, 8, 3)), "labels": np.zeros(3)}, r"labels \(3,\) are not"),
        ({"images": np.zeros((4, 8, 8, 3)), "labels": np.arange(4)}, "labels 0 to 3 are not among 2 classes"),
        ({"images": np.array([{}], object), "labels": np.arange(1)}, "is no .npz file"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, arrays: dict | None, message: str) -> None:
    path = tmp_path / "images.npz"
    if arrays is not None:
        np.savez(path, **arrays)
    with pytest.raises(ValueError, match=message):
        open_images(path, 0, 2, side=8, classes=2)
