"""The shapes of batches and of their micro-batches."""

import math
from typing import Any

import jax
import numpy as np

from jvpipe.trace.leaves import abstract, canonical, named_leaves
from jvpipe.util.paths import path_name

Tree = Any


def shown(batch: Tree) -> str:
    """Returns a text with the path, type and shape of each leaf of a batch."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract(batch, "batch leaf"))
    texts = []
    for path, leaf in leaves:
        text = f"{path_name(path)} {leaf.dtype}{list(leaf.shape)}"
        texts.append(text.strip())  # a batch that is a single array has an empty path
    return ", ".join(texts)


def shapes_of(tree: Tree) -> Any:
    """Returns the containers of a tree, and the shapes and types that its leaves have on a device.

    If two trees have the same containers, shapes and types, a loss is traced to the same program
    for both. So the result is the key of the traced program in caches.
    """
    leaves, containers = jax.tree.flatten(tree)
    shapes = []
    for leaf in leaves:
        dtype = getattr(leaf, "dtype", type(leaf))
        shapes.append((np.shape(leaf), canonical(dtype)))
    return containers, tuple(shapes)


def resized(batch: Tree, examples: int) -> Tree:
    """Returns the shapes of a batch with another number of examples."""

    def shape(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((examples, *leaf.shape[1:]), leaf.dtype)

    return jax.tree.map(shape, batch)


_UNEVEN = (
    ". Drop an incomplete last batch (drop_remainder=True in most "
    "loaders), or pad it with examples of weight 0, and return "
    "jvpipe.Weighted(total, weight)"
)


def micro_batch_shapes(batch: Tree, microbatches: int) -> Tree:
    """Returns the shapes of a micro-batch.

    Args:
        batch: a whole batch, as arrays or shapes.
        microbatches: how many it is split into.

    Raises:
        ValueError: the batch cannot be split evenly along the first axis of its leaves.
    """

    def part(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        shape = np.shape(leaf)
        size = shape[0]
        if size % microbatches or not size:
            near = _nearest_divisors(size, microbatches)
            raise ValueError(
                f"{microbatches} micro-batches do not divide the {size} examples of "
                f"{named_leaves(path, 'batch leaf')}: "
                f"the nearest that do are {near}{_UNEVEN if size else ''}"
            )
        return jax.ShapeDtypeStruct((size // microbatches, *shape[1:]), leaf.dtype)

    batch = abstract(batch, "batch leaf")
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ValueError(f"the batch holds no arrays, it is {batch!r}: give a tree of arrays")
    sizes = {path_name(path): np.shape(leaf)[:1] for path, leaf in leaves}
    if scalars := [name for name, size in sizes.items() if not size]:
        raise ValueError(
            f"batch leaf '{scalars[0]}' is a scalar: every leaf needs a leading batch "
            "axis, so let the loss capture it, or repeat it for every example; convert "
            "a list of numbers to one array, np.asarray(numbers)"
        )
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the leaves of the batch differ in their leading axis: {sizes}; give each leaf one "
            "entry per example, and let the loss capture arrays without a batch axis"
        )
    return jax.tree_util.tree_map_with_path(part, batch)


def _nearest_divisors(size: int, target: int) -> str:
    """Writes the divisors of `size` that are nearest to `target`, below it and above it."""
    # If n divides size, size / n does as well, so it suffices to try n up to the square root.
    root = math.isqrt(size)
    small = [n for n in range(1, root + 1) if size % n == 0]
    divisors = sorted({*small, *(size // n for n in small)})
    below = [n for n in divisors if n < target]
    above = [n for n in divisors if n > target]
    nearest = below[-1:] + above[:1]
    return " and ".join(map(str, nearest)) or "none: the batch is empty"
