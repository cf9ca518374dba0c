"""Splits the caller's pytrees into leaves of single layers, and joins the leaves again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jvpipe.ir.layers import Array
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.runtime.engine.value_shapes import shape
from jvpipe.trace.keys import is_key
from jvpipe.trace.leaves import abstract, canonical
from jvpipe.trace.stacks import Stacks, stacked_shape
from jvpipe.util.paths import path_name

Tree = Any


@dataclass(frozen=True)
class Trees:
    """The shapes of the caller's trees with which a model was traced.

    A split tree has, in place of each stacked array, one leaf for each layer.

    Args:
        params: the parameters.
        batch: the batch of a step.
        rng: the key of the run, if it has one.
        model_state: the model state, if the loss has one (`has_state`).
        stacks: says how stacked parameters are split into layers.
    """

    params: Tree
    batch: Tree
    rng: jax.Array | None
    model_state: Tree
    stacks: Stacks

    def join_params(self, leaves: Sequence[Any]) -> Tree:
        """Joins the leaves of parameters to a tree like the caller's."""
        return self.stacks.join(jax.tree.unflatten(jax.tree.structure(self._split_params), leaves))

    def split_params(self, params: Tree) -> list[Any]:
        """Splits a tree of parameters; a ValueError names the first leaf with a wrong shape."""
        return leaves_like(params, self._split_params, self.stacks, "params")

    def join_model_state(self, leaves: Sequence[Any]) -> Tree:
        """Joins the leaves of the model state, without those that `with_sums` added at the end."""
        tree = jax.tree.structure(self.model_state)
        return jax.tree.unflatten(tree, leaves[: tree.num_leaves])

    def join_optimizer_state(self, optimizer: OptimizerCut, leaves: Sequence[Any]) -> Tree:
        """Joins the leaves of the optimizer's state to the tree of `optimizer.init(params)`."""
        return self.stacks.join(jax.tree.unflatten(optimizer.state_tree, leaves))

    def split_optimizer_state(self, optimizer: OptimizerCut, tree: Tree) -> list[Any]:
        """Splits an optimizer state; a ValueError names the first leaf with a wrong shape."""
        of_leaves = [shape(leaf.array) for leaf in optimizer.state]
        shapes = jax.tree.unflatten(optimizer.state_tree, of_leaves)
        return leaves_like(tree, shapes, self.stacks, "the optimizer's state")

    @property
    def _split_params(self) -> Tree:
        return self.stacks.split(self.params)


def with_sums(leaves: Sequence[Any], state: Sequence[Array]) -> list[Any]:
    """Appends zeros for the sums of deferred batch norms to the user's leaves of a model state.

    Args:
        leaves: the user's leaves.
        state: the shapes of all leaves; the shapes of the sums come last.
    """
    sums = [np.zeros(array.shape, array.dtype) for array in state[len(leaves) :]]
    return [*leaves, *sums]


def leaves_like(tree: Tree, split: Tree, stacks: Stacks, what: str) -> list[Any]:
    """Returns the leaves of a user's tree on the host, with stacked arrays split into layers.

    Args:
        tree: a tree of arrays.
        split: the expected shapes, with stacks split.
        stacks: says how stacked arrays are split.
        what: the name of the tree in the error message.

    Raises:
        ValueError: the tree has other containers, paths, shapes or types than expected.

    >>> stacks = Stacks(jax.tree.structure({"w": 0}), (2,))
    >>> split = stacks.split({"w": jax.ShapeDtypeStruct((2, 3), np.float32)})
    >>> [leaf.shape for leaf in leaves_like({"w": np.zeros((2, 3))}, split, stacks, "params")]
    [(3,), (3,)]
    >>> leaves_like({"w": np.zeros(3)}, split, stacks, "params")
    Traceback (most recent call last):
    ...
    ValueError: params: 'w' is float32[3], it must be float32[2, 3]
    """
    # Stacks are joined before the comparison, so that messages name the caller's arrays.
    expected = stacks.join(split, stacked_shape)
    there, here = map(_types, (abstract(tree), expected))
    for path, needed in here.items():
        if (found_leaf := there.get(path, "missing")) != needed:
            raise ValueError(f"{what}: '{path}' is {found_leaf}, it must be {needed}")
    if jax.tree.structure(tree) != jax.tree.structure(expected):
        more = next(
            (f"there is no '{path}'" for path in there if path not in here),
            "the containers differ",
        )
        raise ValueError(
            f"{what}: {more} in the tree of this pipeline: give one with the same leaves"
        )
    arrays = jax.tree.leaves(stacks.split_like(split, tree))
    leaves = []
    for array, part in zip(arrays, jax.tree.leaves(split), strict=True):
        leaves.append(array if is_key(part) else np.asarray(array, part.dtype))
    return leaves


def _types(tree: Tree) -> dict[str, str]:
    """Returns the shape and type of each leaf, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    types: dict[str, str] = {}
    for path, leaf in leaves:
        types[path_name(path)] = f"{canonical(leaf.dtype)}{list(leaf.shape)}"
    return types
