"""What is trained: BERT mini on the prose that Python carries, and a small convolutional net on
scikit-learn's digits.

Axes: B batch, C channels. A batch is cut into `MICRO_BATCHES`; whoever updates once per micro-batch
has the rate that was best for that on one device, whoever updates once per batch the one that was
best for this (see `rates`).
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jvpipe.models import load

MICRO_BATCHES = 8
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Subject:
    """A model and its data.

    `data` maps a seed to batches without end; `held_out` are batches that no seed trains on.
    `rates` are the learning rates for one update per batch and for one per micro-batch, chosen by
    `tune` from their `grids`.
    """

    name: str
    loss_fn: Callable[..., Any]
    init: Callable[[jax.Array], Any]
    data: Callable[[int], Iterator[Batch]]
    held_out: Sequence[Batch]
    optimizer: Callable[[float], optax.GradientTransformation]
    batch_size: int
    steps: int
    rates: tuple[float, float]
    grids: tuple[tuple[float, ...], tuple[float, ...]]

    def rate(self, per_micro_batch: bool) -> float:
        return self.rates[per_micro_batch]


def bert() -> Subject:
    """BERT mini on records of 32 tokens (not 64), 2 to a micro-batch; AdamW without clipping, at a
    constant rate.
    """
    workload, batch_size, folder = (
        load("bert", "mini", tokens=32),
        2 * MICRO_BATCHES,
        Path(tempfile.mkdtemp()),
    )
    return Subject(
        name="BERT mini",
        loss_fn=workload.loss_fn,
        init=workload.init,
        data=lambda seed: workload.open_data(None, folder, seed, batch_size).train,
        held_out=workload.open_data(None, folder, 0, batch_size).held_out[:4],
        optimizer=lambda rate: optax.adamw(rate, b2=0.98, weight_decay=0.01),
        batch_size=batch_size,
        steps=24,
        rates=(1e-3, 1e-4),
        grids=((3e-4, 1e-3, 3e-3), (1e-4, 3e-4, 1e-3)),
    )


def digits() -> Subject:
    """Eight convolutions and a dense layer on images of 8 x 8, 8 to a micro-batch; SGD with
    momentum 0.9.
    """
    found = import_module(
        "sklearn.datasets"
    ).load_digits()  # of the extra "experiments": not there for type checks
    images = (found.images[..., None] / 16 - 0.5).astype(np.float32)
    whole = {"images": images, "labels": found.target.astype(np.int32)}
    shuffled = np.random.default_rng(2026).permutation(len(images))
    held_out, train = np.split(shuffled, [256])
    batch_size = 8 * MICRO_BATCHES

    def rows(chosen: np.ndarray) -> Batch:
        return {name: leaf[chosen] for name, leaf in whole.items()}

    def data(seed: int) -> Iterator[Batch]:
        draw = np.random.default_rng(seed)
        while True:
            order = draw.permutation(train)[: len(train) // batch_size * batch_size]
            yield from map(rows, order.reshape(-1, batch_size))

    return Subject(
        name="digits",
        loss_fn=digits_loss,
        init=digits_params,
        data=data,
        held_out=[rows(part) for part in held_out.reshape(-1, batch_size)],
        optimizer=lambda rate: optax.sgd(rate, momentum=0.9),
        batch_size=batch_size,
        steps=80,
        rates=(3e-2, 3e-3),
        grids=((1e-2, 3e-2, 1e-1), (3e-3, 1e-2, 3e-2)),
    )


CHANNELS = (1, 16, 16, 16, 32, 32, 32, 32, 32)
POOLED = (2, 5)  # after these convolutions the image is halved


def digits_params(key: jax.Array) -> Any:
    """He's normal distribution; biases start at 0."""
    shapes = [(3, 3, a, b) for a, b in pairwise(CHANNELS)] + [(4 * CHANNELS[-1], 10)]
    found = []
    for k, shape in zip(jax.random.split(key, len(shapes)), shapes, strict=True):
        scale = np.float32(np.sqrt(2 / np.prod(shape[:-1])))
        found.append({"w": scale * jax.random.normal(k, shape), "b": jnp.zeros(shape[-1])})
    return found


def digits_loss(params: Any, batch: Any, rng: Any) -> jax.Array:
    """Mean cross entropy of the digit, in nats."""
    x = jnp.asarray(batch["images"])  # B 8 8 1
    for i, layer in enumerate(params[:-1]):
        x = jax.lax.conv_general_dilated(
            x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + layer["b"][None, None, None])
        if i in POOLED:
            x = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2, x.shape[3]).mean(
                (2, 4)
            )
    logits = x.reshape(x.shape[0], -1) @ params[-1]["w"] + params[-1]["b"][None]
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, jnp.asarray(batch["labels"])
    ).mean()
