"""What plain references of image models share: written out in numpy."""

from typing import Any

import jax
import numpy as np

from jvpipe.models.workload import Batch


def fake_images(side: int = 8, size: int = 4) -> Batch:
    """Images of four classes, the first of which does not count."""
    images = np.random.default_rng(0).normal(size=(size, side, side, 3)).astype(np.float32)
    order = np.arange(size, dtype=np.int32)
    return {"images": images, "targets": order % 4, "weights": (order % 4 > 0).astype(np.float32)}


def shaken(shapes: Any) -> Any:
    """Parameters or averages in which every leaf tells."""
    rng = np.random.default_rng(1)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        drawn = rng.normal(size=leaf.shape) * (
            0.2 if len(leaf.shape) == 1 else np.prod(leaf.shape[:-1]) ** -0.5
        )
        return (np.abs(drawn + 1) if path[-1].key in ("scale", "variance") else drawn).astype(
            np.float32
        )

    return jax.tree_util.tree_map_with_path(draw, shapes)


def windows(x: np.ndarray, size: int, stride: int, fill: float) -> np.ndarray:
    """[size, size, B, Y, X, C]: what each output sees at each offset, padded to keep the side but
    for strides.
    """
    pads = [(0, 0)]
    for n in x.shape[1:3]:
        total = max((-(-n // stride) - 1) * stride + size - n, 0)
        pads.append((total // 2, total - total // 2))
    x = np.pad(x, [*pads, (0, 0)], constant_values=fill)
    views = np.lib.stride_tricks.sliding_window_view(x, (size, size), (1, 2))[:, ::stride, ::stride]
    return views.transpose(4, 5, 0, 1, 2, 3)


def class_nats(logits: np.ndarray, batch: Batch) -> float:
    """The cross entropies of the targets, weighted and summed."""
    nats = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), batch["targets"]]
    return float(nats @ batch["weights"])
