"""What plain references of transformers share: written out for one vector, in numpy."""

import jax
import numpy as np

from jvpipe.models.workload import Workload


def shaken(workload: Workload) -> dict:
    """Parameters in which every bias and scale tells."""
    rng = np.random.default_rng(1)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        return rng.normal(path[-1].key == "scale", 0.1 + 0.1 * len(leaf.shape), leaf.shape).astype(
            np.float32
        )

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(workload.init, jax.random.key(0)))


def norm(x: np.ndarray, p: dict) -> np.ndarray:
    centered = x - x.mean()
    return centered / np.sqrt((centered * centered).mean() + 1e-6) * p["scale"] + p["bias"]


def linear(x: np.ndarray, p: dict) -> np.ndarray:
    return x @ p["kernel"] + p["bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
