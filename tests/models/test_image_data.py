from pathlib import Path

import numpy as np
import pytest

from jvpipe.models import Batches, Model, load
from jvpipe.models.image_data import open_images


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
    for ours, theirs in zip(
        model.batches(3, 8), [next(data.train) for _ in range(2)], strict=False
    ):
        np.testing.assert_array_equal(ours["images"], theirs["images"])
    assert (
        len(load("amoebanet", "tiny").held_out()[0]["images"])
        == load("amoebanet", "tiny").batch_size
    )


def test_a_seed_changes_the_order_and_nothing_else() -> None:
    zero, again, one = (open_images(None, seed, 4, side=8, classes=3) for seed in (0, 0, 1))
    first, same, other = (next(data.train)["images"] for data in (zero, again, one))
    np.testing.assert_array_equal(first, same)
    assert (first != other).any()
    for a, b in zip(zero.held_out, one.held_out, strict=True):
        np.testing.assert_array_equal(a["images"], b["images"])
    assert zero.digest == one.digest


def test_ten_classes_are_the_digits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    data = load("resnet").open_data(None, tmp_path, 0, 32)
    assert len(data.held_out) == 1797 // 16 // 32
    batch = next(data.train)
    assert (batch["images"].shape, set(batch["targets"])) == ((32, 16, 16, 3), set(range(10)))
    assert data.baseline_loss == pytest.approx(np.log(10), abs=0.1)
