"""Makes what micro-batches read from the host: slices of the batch, and seeds."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jvpipe._jax import Tracer
from jvpipe.ir.lazy_array import LazyArray
from jvpipe.trace.leaves import abstract, canonical
from jvpipe.util.devices import is_plain

Tree = Any


def feeds_of(
    batch: Tree, words: np.ndarray | None, step: int, microbatches: int
) -> dict[tuple[str, int], Sequence[np.ndarray | jax.Array]]:
    """Returns arrays, one per micro-batch, by ("batch", leaf's number) or ("seed", 0).

    Leaves without values (only shapes) are left out. Each micro-batch's seed consists of the key's
    words, the step and the micro-batch's number, so random values do not depend on the plan.

    Args:
        batch: the batch, before it is split.
        words: the words of the run's key, if it has one.
        step: the number of the step.
        microbatches: the number of micro-batches in the batch.
    """
    feeds: dict[tuple[str, int], Sequence[np.ndarray | jax.Array]] = {}
    for i, leaf in enumerate(jax.tree.leaves(batch)):
        if isinstance(leaf, jax.ShapeDtypeStruct) and not isinstance(leaf, LazyArray):
            continue
        if isinstance(leaf, Tracer):
            abstract(batch, "batch leaf")  # raises an error that names the traced leaf
        # The leaf gets the type that it has on a device.
        leaf = _feedable(leaf)
        size = leaf.shape[0] // microbatches
        feeds["batch", i] = [leaf[m * size : (m + 1) * size] for m in range(microbatches)]
    if words is not None:
        seeds = [[*words.ravel(), step, m] for m in range(microbatches)]
        feeds["seed", 0] = [np.array(seed, np.uint32) for seed in seeds]
    return feeds


def _feedable(leaf: Any) -> Any:
    """Returns a leaf of the batch as an array with the type that it has on a device.

    Random keys and types smaller than a byte become JAX arrays: NumPy has no keys, and programs
    that are compiled ahead of time take such small types only from JAX's own arrays.
    """
    if isinstance(leaf, LazyArray):
        return leaf.astype(canonical(leaf.dtype))
    if not is_plain(leaf.dtype):
        return jax.numpy.asarray(leaf)
    return np.asarray(leaf).astype(canonical(leaf.dtype), copy=False)
