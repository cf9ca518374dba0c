"""The shape of a pytree as JSON, so that a checkpoint alone says what model it is of."""

from typing import Any

import jax

Tree = Any


def dump(tree: Tree) -> Any:
    """A tree of dicts, lists and tuples as JSON, its leaves as shapes and types; None if it holds other containers.

    >>> import numpy as np
    >>> dump({"a": (np.zeros(2, "float32"),)})
    {'dict': {'a': {'tuple': [{'leaf': [[2], 'float32']}]}}}
    """
    try:
        return _dump(tree)
    except TypeError:
        return None


def load(found: Any) -> Tree:
    """The tree that `dump` wrote, its leaves as `ShapeDtypeStruct`."""
    ((kind, inside),) = found.items()
    match kind:
        case "dict":
            return {k: load(v) for k, v in inside.items()}
        case "list":
            return [load(v) for v in inside]
        case "tuple":
            return tuple(load(v) for v in inside)
        case "none":
            return None
        case _:
            return jax.ShapeDtypeStruct(tuple(inside[0]), inside[1])


def _dump(tree: Tree) -> Any:
    kind = type(tree)
    if tree is None:
        return {"none": 0}
    if kind is dict and all(isinstance(k, str) for k in tree):
        return {"dict": {k: _dump(v) for k, v in tree.items()}}
    if kind in (list, tuple):
        return {kind.__name__: [_dump(v) for v in tree]}
    if hasattr(tree, "shape") and hasattr(tree, "dtype") and not str(tree.dtype).startswith("key<"):
        return {"leaf": [list(tree.shape), str(tree.dtype)]}
    raise TypeError(kind)
