from pathlib import Path

import numpy as np
import pytest

from jvpipe.models.image_data import open_images
from jvpipe.models.images import digit_images, drawn_images, read_images


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


def test_labels_of_small_types_and_bools_are_classes(tmp_path: Path) -> None:
    path = tmp_path / "images.npz"
    for dtype in (np.uint8, np.uint64, bool):
        np.savez(path, images=np.zeros((4, 8, 8, 3)), labels=np.array([0, 1, 1, 0], dtype))
        assert read_images(path, 8, 2).labels.tolist() == [0, 1, 1, 0]


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


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": np.array([0, 2**32 + 1])}, "labels 0 to 4294967297 are not among"),
        ({"labels": np.array([0.7, 1])}, "labels such as 0.7 must be integers, not float64"),
        ({"labels": np.array([1j, 0])}, "labels such as 1j must be integers, not complex"),
        ({"labels": np.array(["1", "0"])}, "labels such as 1 must be integers, not <U1"),
        ({"images": np.full((2, 8, 8, 3), "1")}, "images such as 1 must be real numbers, not <U1"),
        ({"images": np.full((2, 8, 8, 3), 1j)}, "images such as 1j must be real numbers"),
        (
            {"images": np.full((2, 8, 8, 3), np.nan)},
            "the largest magnitude in images is nan: it must be",
        ),
        (
            {"images": np.full((2, 8, 8, 3), -1e39)},
            "the largest magnitude in images is .*e.39: it must be",
        ),
    ],
)
def test_values_that_the_arrays_cannot_hold_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    path = tmp_path / "images.npz"
    images, labels = (
        arrays.get("images", np.zeros((2, 8, 8, 3))),
        arrays.get("labels", np.arange(2)),
    )
    np.savez(path, images=images, labels=labels)
    with pytest.raises(ValueError, match=f"images.npz': {message}"):
        read_images(path, 8, 2)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "images.npz"
    np.savez(path, images=np.ones((4, 8, 8, 3)), labels=np.arange(4) % 2)
    whole = path.read_bytes()
    flipped = whole[:500] + bytes([whole[500] ^ 255]) + whole[501:]
    np.save(tmp_path / "images.npy", np.ones(3))
    for content in (b"", whole[:-200], flipped, (tmp_path / "images.npy").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"images.npz' is not an .npz file .*numpy.savez$"):
            read_images(path, 8, 2)


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
