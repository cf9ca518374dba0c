from pathlib import Path

import numpy as np
import pytest

from jvpipe.models.image_data import open_images
from jvpipe.models.images import digit_images, drawn_images


def test_images_of_a_class_have_its_spectrum() -> None:
    found = drawn_images(16, 5)
    spectra = [np.abs(np.fft.fft2(found.image(i), axes=(0, 1))).ravel() for i in range(15)]
    distance = np.array([[np.linalg.norm(a - b) for b in spectra] for a in spectra]) + 1e9 * np.eye(
        15
    )
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
        (None, "is not an .npz file"),
        ({"images": np.zeros((4, 8, 8, 3))}, "is not an .npz file of `images` and `labels`"),
        (
            {"images": np.zeros((4, 9, 8, 3)), "labels": np.zeros(4)},
            r"\(4, 9, 8, 3\).* should be \[N, 8, 8, 3\]",
        ),
        ({"images": np.zeros((4, 8, 8, 3)), "labels": np.zeros(3)}, r"labels \(3,\) should be"),
        (
            {"images": np.zeros((4, 8, 8, 3)), "labels": np.arange(4)},
            "labels 0 to 3 are not among 2 classes",
        ),
        ({"images": np.array([{}], object), "labels": np.arange(1)}, "is not an .npz file"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, arrays: dict | None, message: str) -> None:
    path = tmp_path / "images.npz"
    if arrays is not None:
        np.savez(path, **arrays)
    with pytest.raises(ValueError, match=message):
        open_images(path, 0, 2, side=8, classes=2)


def test_digits_are_enlarged() -> None:
    pytest.importorskip("sklearn")
    found = digit_images(16)
    assert found.labels[:3].tolist() == [0, 1, 2]
    assert (found.image(0)[::2, ::2] == found.image(0)[1::2, 1::2]).all()
    assert (found.image(0).min(), found.image(0).max(), found.image(0).shape) == (
        -1,
        7 / 8,
        (16, 16, 3),
    )
