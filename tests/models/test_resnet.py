"""Shapes after table 1 of arXiv:1512.03385, and the loss of an image written out in numpy."""

from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

from jvpipe.models import load
from jvpipe.models.workload import Batch
from tests.models.plain_images import class_nats, fake_images, shaken, windows

TABLE = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3)}
COUNTS = {"50": 25_557_032, "101": 44_549_160, "152": 60_192_808}


@pytest.mark.parametrize("size", TABLE)
def test_shapes_are_those_of_the_papers_table(size: str) -> None:
    params = jax.eval_shape(load("resnet", size).init, jax.eval_shape(lambda: jax.random.key(0)))
    kernels, width = Counter([(7, 7, 3, 64), (2048, 1000)]), 64
    for row, repeats in enumerate(TABLE[size]):
        thin, wide = 64 * 2**row, 256 * 2**row
        kernels[1, 1, width, wide] += 1
        for _ in range(repeats):
            kernels.update([(1, 1, width, thin), (3, 3, thin, thin), (1, 1, thin, wide)])
            width = wide
    leaves = jax.tree.leaves(params)
    assert Counter(leaf.shape for leaf in leaves if leaf.ndim > 1) == kernels
    assert sum(leaf.size for leaf in leaves) == COUNTS[size]


def plain_loss(p: Any, batch: Batch) -> float:
    """The loss of the tiny one, whose two blocks are on 4 and on 8 channels."""

    def unit(p: Any, x: np.ndarray, stride: int = 1) -> np.ndarray:
        size = p["kernel"].shape[0]
        y = np.einsum("hwbyxc,hwcd->byxd", windows(x, size, stride, 0), p["kernel"])
        return (y - y.mean((0, 1, 2))) / np.sqrt(y.var((0, 1, 2)) + 1e-5) * p["scale"] + p["bias"]

    x = np.maximum(unit(p["stem"], batch["images"]), 0)
    for name, stride in (("000", 1), ("001", 2)):
        q = p["blocks"][name]
        y = np.maximum(unit(q["reduce"], x), 0)
        y = np.maximum(unit(q["middle"], y, stride), 0)
        x = np.maximum(unit(q["expand"], y) + unit(q["shortcut"], x, stride), 0)
    return class_nats(x.mean((1, 2)) @ p["head"]["kernel"] + p["head"]["bias"], batch)


def test_loss_is_that_of_a_plain_reference() -> None:
    workload, batch = load("resnet", "tiny"), fake_images()
    params = shaken(jax.eval_shape(workload.init, jax.random.key(0)))
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    loss, averages, aux = jax.jit(workload.loss_fn)(
        params, workload.initial_state(), batch, jax.random.key(0)
    )
    np.testing.assert_allclose(loss.total, plain_loss(wide, batch), rtol=1e-4)
    assert aux["top_1"].weight == batch["weights"].sum()
    assert jax.tree.structure(averages) == jax.tree.structure(workload.initial_state())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 34}, "depth=34 must be one of 8, 11, 50, 101, 152"),
        ({"filters": 0}, "filters=0 must be at least 1"),
        ({"stem_reductions": 1}, "stem_reductions=1 must be 0 for small images, else 2"),
        ({"size": "51"}, "unknown size of resnet '51'"),
    ],
)
def test_what_load_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("resnet", **arguments)
