"""Batches: what tells their shapes apart, and the slices of them that micro-batches read."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from jvpipe._jax import Tracer, is_plain
from jvpipe.trace.leaves import abstract, canonical, named, path_name

Tree = Any


def shapes_of(tree: Tree) -> Any:
    """The key of a tree that was traced: its containers, and the shapes and types of its leaves on a device."""
    leaves, containers = jax.tree.flatten(tree)
    return containers, tuple(
        (np.shape(leaf), canonical(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves
    )


_UNEVEN = (
    ". Of an odd last batch leave out the rest (drop_remainder=True in most loaders), or pad it with examples that "
    "count with weight 0, and return jvpipe.Weighted(total, weight)"
)


def micro_batch_shapes(batch: Tree, microbatches: int) -> Tree:
    """The shapes of one micro-batch."""

    def part(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        shape = np.shape(leaf)
        size = shape[0]
        if size % microbatches or not size:
            near = _nearest_divisors(size, microbatches)
            raise ValueError(
                f"{microbatches} micro-batches do not divide the {size} examples of {named(path, 'batch leaf')}: "
                f"the nearest that do are {near}{_UNEVEN if size else ''}"
            )
        return jax.ShapeDtypeStruct((size // microbatches, *shape[1:]), leaf.dtype)

    batch = abstract(batch, "batch leaf")
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ValueError("the batch holds no arrays")
    sizes = {path_name(path): np.shape(leaf)[:1] for path, leaf in leaves}
    if scalars := [name for name, size in sizes.items() if not size]:
        raise ValueError(
            f"batch leaf '{scalars[0]}' is a scalar: every leaf needs a leading batch axis, so let the loss capture "
            "it, or repeat it for every example; make one array of a list of numbers, np.asarray(numbers)"
        )
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"the leaves of the batch differ in their leading axis: {sizes}; give each an entry per example, and let "
            "the loss capture what is none of examples"
        )
    return jax.tree_util.tree_map_with_path(part, batch)


def feeds_of(
    batch: Tree, words: np.ndarray | None, step: int, microbatches: int
) -> dict[tuple[str, int], Sequence[np.ndarray | jax.Array]]:
    """Slices what the micro-batches of a step read from the host, by (kind, index); of shapes there is nothing to read.

    Args:
        batch: a whole one.
        words: those of the run's key, if it has one.
        step: the number of the step.
        microbatches: how many the batch is split into.
    """
    feeds: dict[tuple[str, int], Sequence[np.ndarray | jax.Array]] = {}
    for i, leaf in enumerate(jax.tree.leaves(batch)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            continue
        if isinstance(leaf, Tracer):
            abstract(batch, "batch leaf")  # raises, and names the leaf that is being traced
        leaf = _feedable(leaf)
        size = len(leaf) // microbatches
        feeds["batch", i] = [leaf[m * size : (m + 1) * size] for m in range(microbatches)]
    if words is not None:
        feeds["seed", 0] = [
            np.array([*words.ravel(), step, m], np.uint32) for m in range(microbatches)
        ]
    return feeds


def check_fed(
    feeds: Collection[tuple[str, int]], needed: Collection[tuple[str, int]], names: Sequence[str]
) -> None:
    """Raises ValueError if a leaf of the batch that is read is a shape alone.

    Args:
        feeds: what there is, by (kind, index).
        needed: what the rows of a step read.
        names: of the batch's leaves.
    """
    if lacking := sorted(set(needed) - set(feeds)):
        raise ValueError(
            f"batch leaf '{names[lacking[0][1]]}' is a shape, and a stage of this process reads it: give an array; "
            "pipe.needs() names all that it reads"
        )


def _feedable(leaf: Any) -> Any:
    """A leaf of the batch as an array of the type that it has on a device.

    The host knows no keys; of types smaller than a byte, whoever compiles ahead takes no array but JAX's own.
    """
    if not is_plain(leaf.dtype):
        return jax.numpy.asarray(leaf)
    return np.asarray(leaf).astype(canonical(leaf.dtype), copy=False)


def _nearest_divisors(size: int, wanted: int) -> str:
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    divisors = sorted({*small, *(size // n for n in small)})
    below, above = [n for n in divisors if n < wanted], [n for n in divisors if n > wanted]
    return " and ".join(map(str, below[-1:] + above[:1])) or "none: the batch is empty"
