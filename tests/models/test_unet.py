"""Sizes after torchgpipe's table, the loss of an image written out in numpy, and what its long
skips cost.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jvpipe
from jvpipe.ir.layers import Layer
from jvpipe.ir.values import ValueKind
from jvpipe.models import Workload, load
from jvpipe.trace.model import trace_model
from tests.models.plain_images import windows
from tests.zoo import quick_key

# of the paper's table: (B, C), and what is told of it
PAPER = {
    "362m": ((6, 72), 362.2e6, 0.05e6),
    "2.2b": ((11, 128), 2.21e9, 5e6),
    "5b": ((24, 128), 4.99e9, 5e6),
    "7.8b": ((24, 160), 7.80e9, 5e6),
    "15.8b": ((48, 160), 15.82e9, 5e6),
}


def shapes(size: str) -> Any:
    return jax.eval_shape(load("unet", size).init, jax.eval_shape(lambda: jax.random.key(0)))


@pytest.mark.parametrize("size", PAPER)
def test_parameters_are_as_many_as_torchgpipe_says(size: str) -> None:
    (B, C), told, rounding = PAPER[size]
    count = C // 2  # the last one, of 1 x 1
    for i in range(5):
        down, up = C * 2**i, C * 2**i // 2
        count += 9 * ((down // 2 if i else 3) * down + (B - 1) * down**2)
        count += 9 * (4 * up * up + (B - 1) * up**2)
    wide = C * 32
    count += 9 * (2 * wide * wide // 2 + (B - 2) * wide**2)
    leaves = jax.tree.leaves(shapes(size))
    assert sum(leaf.size for leaf in leaves) == count == pytest.approx(told, abs=rounding)
    assert len(leaves) == 11 * B + 1


def fake_masks(size: int = 4) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "images": draw.normal(size=(size, 8, 8, 3)).astype(np.float32),
        "masks": draw.integers(0, 2, (size, 8, 8)).astype(np.float32),
        "weights": (np.arange(size) % 4 > 0).astype(np.float32),
    }


def params_of(size: str = "tiny") -> Any:
    draw = np.random.default_rng(1)
    scaled = lambda leaf: draw.normal(size=leaf.shape) * np.prod(leaf.shape[:-1]) ** -0.5  # noqa: E731
    return jax.tree.map(lambda leaf: scaled(leaf).astype(np.float32), shapes(size))


def test_loss_is_that_of_a_plain_reference() -> None:
    p, batch = params_of(), fake_masks()

    def unit(name: str, x: np.ndarray) -> np.ndarray:
        y = np.einsum("hwbyxc,hwcd->byxd", windows(x, 3, 1, 0), p[name]["000"].astype(np.float64))
        y = (y - y.mean((1, 2), keepdims=True)) / np.sqrt(y.var((1, 2), keepdims=True) + 1e-5)
        return np.where(y > 0, y, 0.01 * y)

    halved = lambda x: x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).max((2, 4))  # noqa: E731
    doubled = lambda x: np.kron(x, np.ones((1, 2, 2, 1)))  # noqa: E731
    first = unit("down_0", batch["images"])
    second = unit("down_1", halved(first))
    x = unit("bottom", halved(second))
    x = unit("up_1", np.concatenate([doubled(x), second], 3))
    x = unit("up_0", np.concatenate([doubled(x), first], 3)) @ p["segment"][0, 0, :, 0]
    nats = np.where(batch["masks"] > 0, np.log1p(np.exp(-x)), np.log1p(np.exp(x))).mean((1, 2))
    loss, aux = jax.jit(load("unet", "tiny").loss_fn)(p, batch, None)
    np.testing.assert_allclose(loss.total, nats @ batch["weights"], rtol=1e-4)
    told, meant = (x[1:] > 0), batch["masks"][1:] > 0
    assert aux["dice"].total / aux["dice"].weight == pytest.approx(
        2 * (told & meant).sum() / (told.sum() + meant.sum())
    )


def test_long_skips_go_straight() -> None:
    """Four stages: down, down and bottom, up, up. Each sends what it made to whoever reads it, and
    nothing else.
    """
    workload, batch, micro = load("unet", "tiny"), fake_masks(), 2
    names = [layer.name for layer in traced_layers(workload)]
    ends = [
        next(i for i, name in enumerate(names) if name.startswith(part))
        for part in ("down_1", "up_1", "up_0")
    ]
    bounds = [0, *ends, len(names)]
    plan = jvpipe.Plan.from_cuts([b - a for a, b in pairwise(bounds)])
    pipe = jvpipe.Pipeline(
        workload.loss_fn, optax.sgd(0.1), plan, micro, devices=jax.devices()[:4], has_aux=True
    )
    pipe.init(params_of(), batch, quick_key(0))
    step = pipe.session.compiled.lowered
    sent: dict[tuple[int, int], int] = defaultdict(int)
    for row in step.rows:
        if row.kind == "SEND" and step.buffers[row.writes[0]].value.kind is ValueKind.TENSOR:
            source, target = step.buffers[row.reads[0]], step.buffers[row.writes[0]]
            sent[source.memory, target.memory] += target.bytes
    image = 4 * len(batch["images"])  # bytes of one channel's pixel, of all images
    skips = {(0, 3): 64 * 4 * image, (1, 2): 16 * 8 * image}
    chain = {
        (0, 1): 64 * 4 * image,
        (1, 2): 16 * 8 * image,
        (2, 3): 16 * 4 * image,
    }  # not halved yet, doubled, not yet
    assert sent == {pair: skips.get(pair, 0) + chain.get(pair, 0) for pair in {*skips, *chain}}


def traced_layers(workload: Workload) -> Sequence[Layer]:
    batch = workload.abstract_batch(2)
    return trace_model(
        workload.loss_fn, params_of(), batch, quick_key(0), has_aux=True
    ).traced.graph.layers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"convolutions": 0}, "convolutions=0 and levels=3 must be at least 1"),
        ({"channels": 3}, "channels=3 must be a multiple of 2"),
        ({"side": 40, "levels": 4}, "side=40 is halved 4 times: give a multiple of 32"),
        ({"dropout": 1.0}, r"dropout=1.0 must lie in \[0, 1\)"),
    ],
)
def test_what_load_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("unet", **arguments)
