"""The caller's pytrees: parameters in the leaves that layers own, batches in the slices that micro-batches read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jvpipe._jax import Tracer, is_plain
from jvpipe.ir.lazy_array import LazyArray
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.runtime.engine.value_shapes import shape
from jvpipe.trace.keys import is_key
from jvpipe.trace.leaves import abstract, canonical, named_leaves
from jvpipe.trace.stacks import Stacks
from jvpipe.util.paths import path_name

Tree = Any


def shapes_of(tree: Tree) -> Any:
    """Returns what tells traced trees apart: containers, and the shapes and types of leaves on a device."""
    leaves, containers = jax.tree.flatten(tree)
    return containers, tuple(
        (np.shape(leaf), canonical(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves
    )


_UNEVEN = (
    ". Leave out the rest of an odd last batch (drop_remainder=True in most loaders), or pad it with examples that "
    "count with weight 0, and return jvpipe.Weighted(total, weight)"
)


def micro_batch_shapes(batch: Tree, microbatches: int) -> Tree:
    """Returns the shapes of one micro-batch."""

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
        if isinstance(leaf, jax.ShapeDtypeStruct) and not isinstance(leaf, LazyArray):
            continue
        if isinstance(leaf, Tracer):
            abstract(batch, "batch leaf")  # raises, and names the leaf that is being traced
        # In the type of the device, so that no copy converts it there.
        leaf = _feedable(leaf)
        size = leaf.shape[0] // microbatches
        feeds["batch", i] = [leaf[m * size : (m + 1) * size] for m in range(microbatches)]
    if words is not None:
        feeds["seed", 0] = [
            np.array([*words.ravel(), step, m], np.uint32) for m in range(microbatches)
        ]
    return feeds


def _feedable(leaf: Any) -> Any:
    """Returns a leaf of the batch as an array of the type that it has on a device.

    The host knows no keys; of types smaller than a byte, whoever compiles ahead takes no array but JAX's own.
    """
    if isinstance(leaf, LazyArray):
        return leaf.astype(canonical(leaf.dtype))
    if not is_plain(leaf.dtype):
        return jax.numpy.asarray(leaf)
    return np.asarray(leaf).astype(canonical(leaf.dtype), copy=False)


def _nearest_divisors(size: int, target: int) -> str:
    # Divisors come in pairs, n and size / n.
    small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
    divisors = sorted({*small, *(size // n for n in small)})
    below, above = [n for n in divisors if n < target], [n for n in divisors if n > target]
    return " and ".join(map(str, below[-1:] + above[:1])) or "none: the batch is empty"


# The caller's pytrees, taken apart into the leaves that layers own, and put together again.


@dataclass(frozen=True)
class Trees:
    """The trees that a model was traced with, as shapes; layers that the caller stacks are leaves of their own below.

    Args:
        params: the parameters.
        batch: a whole batch.
        rng: the key of the run, if it has one.
        model_state: with `has_state`.
        stacks: how stacked parameters are split into layers.
    """

    params: Tree
    batch: Tree
    rng: jax.Array | None
    model_state: Tree
    stacks: Stacks

    def join_params(self, leaves: Sequence[Any]) -> Tree:
        """Puts the parameters' leaves together as the caller gave them."""
        return self.stacks.join(jax.tree.unflatten(jax.tree.structure(self._split_params), leaves))

    def split_params(self, params: Tree) -> list[Any]:
        """Takes parameters apart that are like the caller's; ValueError names the first leaf that is not."""
        return leaves_like(params, self._split_params, self.stacks, "params")

    def join_model_state(self, leaves: Sequence[Any]) -> Tree:
        """Puts the leaves of the model state together."""
        return jax.tree.unflatten(jax.tree.structure(self.model_state), leaves)

    def join_optimizer_state(self, optimizer: OptimizerCut, leaves: Sequence[Any]) -> Tree:
        """Puts the leaves of the optimizer's state together as `optimizer.init(params)` gives it."""
        return self.stacks.join(jax.tree.unflatten(optimizer.state_tree, leaves))

    def split_optimizer_state(self, optimizer: OptimizerCut, tree: Tree) -> list[Any]:
        """Takes a state of the optimizer apart; ValueError names the first leaf that is none of this optimizer's."""
        shapes = jax.tree.unflatten(
            optimizer.state_tree, [shape(leaf.array) for leaf in optimizer.state]
        )
        return leaves_like(tree, shapes, self.stacks, "the optimizer's state")

    @property
    def _split_params(self) -> Tree:
        return self.stacks.split(self.params)


def leaves_like(tree: Tree, split: Tree, stacks: Stacks, what: str) -> list[Any]:
    """Returns the leaves of a tree that is like one of the pipeline's, on the host, those of stacked layers apart.

    Args:
        tree: arrays.
        split: the shapes of the pipeline's own tree, its stacks split.
        stacks: these.
        what: what the tree is, for the message.

    Raises:
        ValueError: its containers, paths, shapes or types are others.

    >>> stacks = Stacks(jax.tree.structure({"w": 0}), (2,))
    >>> split = stacks.split({"w": jax.ShapeDtypeStruct((2, 3), np.float32)})
    >>> [leaf.shape for leaf in leaves_like({"w": np.zeros((2, 3))}, split, stacks, "params")]
    [(3,), (3,)]
    >>> leaves_like({"w": np.zeros(3)}, split, stacks, "params")
    Traceback (most recent call last):
    ...
    ValueError: params: 'w' is float32[3], it must be float32[2, 3]
    """
    # Compared as the caller knows the tree: with stacks whole, not in slices.
    expected = stacks.join(
        split, lambda *parts: jax.ShapeDtypeStruct((len(parts), *parts[0].shape), parts[0].dtype)
    )
    there, here = map(_types, (abstract(tree), expected))
    for path, needed in here.items():
        if (found_leaf := there.get(path, "missing")) != needed:
            raise ValueError(f"{what}: '{path}' is {found_leaf}, it must be {needed}")
    if jax.tree.structure(tree) != jax.tree.structure(expected):
        more = next(
            (f"there is no '{path}'" for path in there if path not in here),
            "the containers are others",
        )
        raise ValueError(
            f"{what}: {more} in the tree of this pipeline: give one with the same leaves"
        )
    leaves = zip(
        jax.tree.leaves(stacks.split_like(split, tree)), jax.tree.leaves(split), strict=True
    )
    return [leaf if is_key(shape) else np.asarray(leaf, shape.dtype) for leaf, shape in leaves]


def _types(tree: Tree) -> dict[str, str]:
    """Returns the shape and type of each leaf, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): f"{canonical(x.dtype)}{list(x.shape)}" for path, x in leaves}
