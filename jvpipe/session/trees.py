"""The caller's pytrees, taken apart into the leaves that layers own, and put together again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.runtime.value_shapes import shape
from jvpipe.trace.keys import is_key
from jvpipe.trace.leaves import abstract, canonical, path_name
from jvpipe.trace.stacks import Stacks

Tree = Any


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


def leaves_like(given: Tree, split: Tree, stacks: Stacks, what: str) -> list[Any]:
    """The leaves of a tree that is like one of the pipeline's, on the host, those of stacked layers apart.

    Args:
        given: arrays.
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
    wanted = stacks.join(
        split, lambda *parts: jax.ShapeDtypeStruct((len(parts), *parts[0].shape), parts[0].dtype)
    )
    there, here = map(_types, (abstract(given), wanted))
    for path, needed in here.items():
        if (own := there.get(path, "missing")) != needed:
            raise ValueError(f"{what}: '{path}' is {own}, it must be {needed}")
    if jax.tree.structure(given) != jax.tree.structure(wanted):
        more = next(
            (f"there is no '{path}'" for path in there if path not in here),
            "the containers are others",
        )
        raise ValueError(
            f"{what}: {more} in the tree of this pipeline: give one with the same leaves"
        )
    leaves = zip(
        jax.tree.leaves(stacks.split_like(split, given)), jax.tree.leaves(split), strict=True
    )
    return [leaf if is_key(shape) else np.asarray(leaf, shape.dtype) for leaf, shape in leaves]


def _types(tree: Tree) -> dict[str, str]:
    """The shape and type of each leaf, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): f"{canonical(x.dtype)}{list(x.shape)}" for path, x in leaves}
