"""Images of one color: a class for the red, one for the green."""

from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jvpipe.models.image_data import open_images
from jvpipe.models.image_folders import class_folders, decoded, sizes_of
from tests.commands import finished

COLORS = {"green": (0, 255, 0), "red": (255, 0, 0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, color in COLORS.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(8):
            ending = ("png", "JPEG", "gif", "bmp")[i % 4]
            Image.new("RGB", (12 + i, 10), color).save(tmp_path / "data" / name / f"{i}.{ending}")
    (tmp_path / "data" / "about.txt").write_text("colors")
    return tmp_path / "data"


def test_classes_are_folders_in_order(folder: Path) -> None:
    found = class_folders(folder, 8, 2)
    assert found.labels.tolist() == [0] * 8 + [1] * 8
    for i, label in enumerate(found.labels):
        color = np.array([[-1, 1, -1], [1, -1, -1]][label], np.float32)
        np.testing.assert_allclose(
            found.image(i), np.broadcast_to(color, (8, 8, 3)), atol=0.02
        )  # JPEG is near


def test_batches_resume_where_they_were(folder: Path) -> None:
    first, again = (open_images(folder, 0, 4, side=8, classes=2) for _ in range(2))
    next(first.train)
    place = first.train.get_state()
    expected = next(first.train)
    again.train.set_state(place)
    for name, leaf in next(again.train).items():
        np.testing.assert_array_equal(leaf, expected[name])
    assert first.digest == again.digest
    (folder / "red" / "0.png").unlink()
    assert open_images(folder, 0, 4, side=8, classes=2).digest != first.digest


def test_an_image_is_scaled_and_cropped_in_its_middle(tmp_path: Path) -> None:
    pixels = np.zeros((4, 12), np.uint8)
    pixels[:, 4:8] = 255  # white in the middle third
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    np.testing.assert_array_less(0.7, decoded(tmp_path / "wide.png", 2))
    np.testing.assert_array_equal(
        decoded(tmp_path / "wide.png", 4, mask=True), np.ones((4, 4, 1), np.float32)
    )


def test_folders_that_cannot_be_used(folder: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"has 2 folders \(green, red\), but the model has 3 classes: give --set classes=2",
    ):
        class_folders(folder, 8, 3)
    with pytest.raises(
        ValueError, match=r"has 0 folders \(\), .* make a folder for the images of each class"
    ):
        class_folders(folder / "red", 8, 3)
    whole = (folder / "red" / "0.png").read_bytes()
    for content in (b"no image", whole[: len(whole) // 2]):
        (folder / "red" / "bad.png").write_bytes(content)
        with pytest.raises(
            ValueError, match=r"cannot decode '.*/red/bad\.png' \(.*\): repair or remove the file"
        ):
            class_folders(folder, 8, 2)
    (folder / "blue").mkdir()
    with pytest.raises(ValueError, match=r"blue' has no images: add some \(\.jpg, "):
        class_folders(folder, 8, 3)


def test_of_many_images_one_may_break_later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jvpipe.models.image_folders.sizes_of", partial(sizes_of, few=4))
    data = open_images(folder, 0, 5, side=8, classes=2)
    for file in folder.rglob("*.*"):
        file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"cannot decode '.*"):
        list(islice(data.train, 20))


def test_a_command_says_it_in_a_line_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / "red" / "bad.png").write_bytes(b"no image")
    model = (
        "--model",
        "resnet",
        "--size",
        "tiny",
        "--set",
        "classes=2",
        "--batch-size",
        "4",
        "--microbatches",
        "2",
    )
    ended = finished(
        *model, "--data", str(folder), "--run-dir", str(tmp_path / "run"), "--stages", "1"
    )
    assert ended.returncode == 2
    assert [("bad.png" in line) for line in ended.stderr.splitlines()] == [True]
    assert not (tmp_path / "run").exists()
