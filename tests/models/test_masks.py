from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jvpipe.models.image_data import open_masks
from jvpipe.models.masks import mask_folders, masked_digits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for i in range(6):
        left = np.zeros((8, 8), np.uint8)
        left[:, : i + 1] = 255
        Image.fromarray(np.stack([left] * 3, 2)).save(tmp_path / "images" / f"{i}.png")
        Image.fromarray(left).save(tmp_path / "masks" / f"{i}.gif")
    return tmp_path


def test_masks_lie_over_their_images(folder: Path) -> None:
    found = mask_folders(folder, 8)
    for i in range(6):
        assert found.mask(i).sum() == 8 * (i + 1)
        np.testing.assert_array_equal(found.image(i)[..., 0] > 0, found.mask(i) > 0)
    data, again = (open_masks(folder, 0, 2, side=8) for _ in range(2))
    first = next(data.train)
    assert {name: leaf.shape for name, leaf in first.items()} == {
        "images": (2, 8, 8, 3),
        "masks": (2, 8, 8),
        "weights": (2,),
    }
    np.testing.assert_array_equal(first["masks"], next(again.train)["masks"])
    share = np.mean([mask.mean() for batch in (next(data.train), first) for mask in batch["masks"]])
    assert 0 < share < 1
    assert 0 < data.baseline_loss < 2


def test_digits_stand_before_waves() -> None:
    pytest.importorskip("sklearn")
    found = masked_digits(32)
    masks = np.stack([found.mask(i) for i in range(50)])
    assert found.count == 1797
    assert 0.03 < masks.mean() < 0.15
    assert masks.any(0).mean() > 0.5  # anywhere
    inside, outside = (
        np.stack([found.image(i)[masks[i] == m].mean(0) for i in range(50)]) for m in (1, 0)
    )
    assert inside.std() > 2 * outside.std()
    data = open_masks(None, 0, 8, side=8)
    assert next(data.train)["images"].shape == (8, 8, 8, 3)


def test_folders_that_cannot_be_used(folder: Path) -> None:
    with pytest.raises(ValueError, match="has no folder 'images'"):
        mask_folders(folder / "images", 8)
    Image.new("L", (8, 9)).save(folder / "masks" / "3.gif")
    with pytest.raises(
        ValueError, match=r"masks/3\.gif' has 8 x 9 pixels, but '.*images/3\.png' has 8 x 8"
    ):
        mask_folders(folder, 8)
    (folder / "masks" / "3.gif").write_bytes(b"GIF")
    with pytest.raises(ValueError, match=r"cannot decode '.*masks/3\.gif'"):
        mask_folders(folder, 8)
    (folder / "masks" / "3.gif").unlink()
    with pytest.raises(
        ValueError, match=r"images/3\.png' has no mask: '.*masks' needs an image called 3"
    ):
        mask_folders(folder, 8)
