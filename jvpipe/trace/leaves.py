"""The leaves of a user's pytrees: names for messages, and shapes and types on a device."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jvpipe import _jax
from jvpipe.util.brief import brief
from jvpipe.util.paths import path_name

Tree = Any
Role = Literal[
    "parameter",
    "batch leaf",
    "leaf of the model state",
    "leaf of the optimizer's state",
    "leaf of aux",
    "leaf of the prediction",
    "part of the loss",
    "result of the optimizer",
]

_CURES: dict[Role, str] = {
    "parameter": "keep it out of the parameters and let the loss capture it, as `params, static = "
    "eqx.partition(model, eqx.is_array)` and `eqx.combine(params, static)` do for a module",
    "batch leaf": "keep it out of the batch and let the loss capture it",
    "leaf of the model state": "keep it out of the model state and let the loss capture it",
    "leaf of the optimizer's state": "give a changed copy of the tree of pipe.optimizer_state",
}
_RETURN = "return only arrays and numbers"


def canonical(dtype: Any) -> Any:
    """Returns the type that an array of type `dtype` has on a device.

    Unless JAX runs with x64, types of 64 bits become types of 32 bits. A type that no device has is
    returned unchanged.

    >>> str(canonical(np.dtype("int64")))
    'int32'
    """
    try:
        return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    except TypeError:
        return dtype


def abstract(tree: Tree, role: Role = "parameter") -> Tree:
    """Returns the shapes of a tree's leaves, and the types that the leaves have on a device.

    Args:
        tree: a tree of arrays, numbers or shapes.
        role: what its leaves are, for messages.

    Raises:
        ValueError: no device can hold a leaf, or a leaf is being traced; the message names it.

    >>> abstract({"x": np.zeros(3)}, "batch leaf")
    {'x': ShapeDtypeStruct(shape=(3,), dtype=float32)}
    """

    def shape(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, _jax.Tracer):
            raise ValueError(
                f"{named_leaves(path, role)} is being traced: use jvpipe outside of jax.jit and "
                "other transformations"
            )
        aval = _type_of(path, leaf, role)
        return jax.ShapeDtypeStruct(
            aval.shape,
            aval.dtype,
            weak_type=aval.weak_type,
        )

    return jax.tree_util.tree_map_with_path(shape, tree)


def check_leaves(tree: Tree, role: Role) -> None:
    """Raises ValueError if no device can hold a leaf; arrays may be traced."""
    jax.tree_util.tree_map_with_path(lambda path, leaf: _type_of(path, leaf, role), tree)


def is_initializer(params: Any) -> bool:
    """Tells whether `params` is a function key -> parameters; False if it is a tree of arrays.

    A module counts as a tree of arrays even if it can be called.

    Raises:
        ValueError: `params` is a class, or a function that cannot be called with one argument.
    """
    if not callable(params) or not jax.tree_util.all_leaves([params]):
        return False
    takes_key = True
    try:
        inspect.signature(params).bind("key")
    except TypeError:
        takes_key = False
    except ValueError:  # Python does not know the function's signature: assume that it takes a key
        pass
    if not takes_key or isinstance(params, type):
        raise ValueError(
            f"parameters are {brief(params)}: give arrays, or a function key -> params that makes "
            "arrays"
        )
    return True


def made_shapes(initializer: Callable[[Any], Tree], rng: jax.Array) -> Tree:
    """Returns the shapes of the parameters that a function makes from a key.

    Raises:
        ValueError: no device can hold a leaf; the message names it by its role and path.
    """

    def checked(rng: jax.Array) -> Tree:
        params = initializer(rng)
        check_leaves(params, "parameter")
        return params

    return jax.eval_shape(checked, rng)


def _type_of(path: Sequence[Any], leaf: Any, role: Role) -> Any:
    try:
        return jax.typeof(leaf)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{named_leaves(path, role)} {_complaint(leaf, role)}") from error
    except OverflowError as error:
        raise ValueError(
            f"{named_leaves(path, role)} is the number {brief(leaf)}, which no device can hold"
        ) from error


def named_leaves(path: Sequence[Any], role: Role) -> str:
    """Returns the name of a leaf for messages: its role and path; a single array has no path.

    >>> named_leaves((jax.tree_util.DictKey("x"),), "batch leaf"), named_leaves((), "batch leaf")
    ("batch leaf 'x'", 'the only batch leaf')
    """
    return f"{role} '{path_name(path)}'" if path else f"the only {role}"


def _complaint(leaf: Any, role: Role) -> str:
    kind = type(leaf).__name__
    if isinstance(leaf, np.ndarray):
        return (
            f"is of type {kind} {leaf.dtype}, which no device has: give an np.ndarray of plain "
            "numbers"
        )
    return f"is of type {kind}, which is not an array: {_CURES.get(role, _RETURN)}"
