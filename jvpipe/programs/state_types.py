"""The types of an optimizer's state, fixed so that one program can run all updates.

The first update may change the type that `init` gives to a leaf of the state. For example, a
hyperparameter may begin with a weak type, or a moment in bfloat16 may become float32. So updates
are traced until the types no longer change. Then `init` is traced again, and casts the state to
these types.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jvpipe._jax import ClosedJaxpr
from jvpipe.programs.straight_line import standard
from jvpipe.util.paths import path_name

Tree = Any
Path = tuple[Any, ...]


def traced_init(
    init: Callable[[list[Any]], Tree],
    leaves: list[jax.ShapeDtypeStruct],
    types: Tree | None = None,
) -> tuple[ClosedJaxpr, Tree]:
    """Traces `init`, and returns it with the shapes and types of the state that it makes.

    Args:
        init: takes the leaves of the parameters, and returns the state.
        leaves: the shapes and types of the parameters.
        types: the shapes and types to which `init` casts the state; None means no cast.
    """

    def cast_init(leaves: list[Any]) -> Tree:
        state = init(leaves)
        return state if types is None else jax.tree.map(_cast, state, types)

    traced = standard(partial(jax.make_jaxpr, return_shape=True))
    return traced(cast_init)(leaves)


def at_fixed_types(
    traced_at: Callable[[Tree], ClosedJaxpr],
    state: Tree,
    of_state: slice,
) -> tuple[ClosedJaxpr, Tree]:
    """Traces an update for types of the state that the update does not change.

    Args:
        traced_at: traces the update for the shapes and types of a state.
        state: the shapes and types that `init` gives the state.
        of_state: the positions of the state among the update's results.

    Returns:
        The update, and the shapes and types of the state. The latter are the object `state` itself
        if the first update changes no type.

    Raises:
        ValueError: an update changes a shape, or the types still change after three updates.
    """
    for _ in range(3):
        closed = traced_at(state)
        settled = _settled(state, closed.out_avals[of_state])
        if _types(settled) == _types(state):
            return closed, state
        state = settled
    raise ValueError(
        "the optimizer's update must return its state with the types that it got, but three "
        f"updates in a row changed them; after the third they are {state}"
    )


def _settled(old: Tree, new: Sequence[Any]) -> Tree:
    """Returns the types of the state after an update, by the rules for the carry of a scan.

    Args:
        old: the state before the update.
        new: the types of its leaves after the update.

    Raises:
        ValueError: the update changes a shape, or the number of leaves.
    """

    def settle(
        path: Path,
        before: Any,
        after: Any,
    ) -> jax.ShapeDtypeStruct:
        """Returns the type of a leaf after an update.

        Args:
            path: the leaf's path in the tree of the state, for the message.
            before: the leaf's shape and type before the update.
            after: its shape and type after the update.
        """
        if before.shape != after.shape:
            raise ValueError(
                f"the optimizer's update changes the shape of its state '{path_name(path)}' from "
                f"{before.shape} to {after.shape}; the shape must stay the same"
            )
        # A weak type may become strong, but a strong type never becomes weak.
        weak = _type(before)[1] and _type(after)[1]
        return jax.ShapeDtypeStruct(
            before.shape,
            after.dtype,
            weak_type=weak,
        )

    leaves, tree = jax.tree_util.tree_flatten_with_path(old)
    if len(leaves) != len(new):
        raise ValueError(
            f"the optimizer's state has {len(leaves)} arrays, but {len(new)} after an update; the "
            "number must stay the same"
        )
    pairs = zip(leaves, new, strict=True)
    return tree.unflatten(settle(path, before, after) for (path, before), after in pairs)


def _types(tree: Tree) -> list[tuple[Any, bool]]:
    return list(map(_type, jax.tree.leaves(tree)))


def _type(leaf: Any) -> tuple[Any, bool]:
    return leaf.dtype, bool(getattr(leaf, "weak_type", False))


def _cast(value: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    array = jnp.asarray(value)
    if array.dtype == like.dtype:
        return array
    return jax.lax.convert_element_type(array, like.dtype)
