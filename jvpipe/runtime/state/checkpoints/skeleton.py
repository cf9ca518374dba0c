"""Pytrees of shapes as JSON, so that a checkpoint has the shapes and containers of its model.

A state can then be restored before `init` was called: the loss is traced with these shapes. Dicts
with string keys, lists and tuples are written as such. Any other container is written as the
name of its class, its children and its node data. Node data are what JAX keeps of a container
besides its children, such as keys and static fields. If they are not plain values, the tree is not
written. Reading imports no modules, because importing runs code, and a checkpoint must not choose
which code runs. So the class of a container must have been imported before.
"""

import sys
from operator import attrgetter
from typing import Any

import jax
from jax.tree_util import PyTreeDef, default_registry

from jvpipe.trace.keys import dtype_of
from jvpipe.util.brief import brief
from jvpipe.util.pattern import anything, compare, whole_in

Tree = Any


def dump(tree: Tree) -> Any:
    """Returns a tree as JSON, with shapes and types as leaves; None if it cannot be written.

    >>> import numpy as np
    >>> dump({"a": (np.zeros(2, "float32"),)})
    {'dict': {'a': {'tuple': [{'leaf': [[2], 'float32']}]}}}
    """
    try:
        return _dump(tree)
    except TypeError:
        return None


def tree(where: str, dumped: Any) -> None:
    """Raises ValueError unless data have the form that `dump` writes.

    This function is a pattern of `jvpipe.util.pattern`.
    """
    compare(where, dumped, {str: anything})
    if len(dumped) != 1 or (kind := next(iter(dumped))) not in _INSIDE:
        raise ValueError(f"{where} must be one of {', '.join(_INSIDE)}, not {brief(dumped)}")
    inside = dumped[kind]
    if kind == "leaf" and isinstance(inside, list) and inside[2:] == ["weak"]:
        inside = inside[:2]
    compare(f"{where}.{kind}", inside, _INSIDE[kind])


def dtype(where: str, name: Any) -> None:
    """Raises ValueError unless a text names a type of numbers; a pattern, as `tree` is."""
    compare(where, name, str)
    try:
        dtype_of(name)
    except (TypeError, ValueError, StopIteration) as problem:
        raise ValueError(f"{where} must be a type, not {brief(name)}") from problem


_INSIDE = {
    "dict": {str: tree},
    "list": [tree],
    "tuple": [tree],
    "none": anything,
    "node": (str, anything, [tree]),
    "leaf": ([whole_in()], dtype),
}
"""For each kind of node, the pattern of its content."""


def load_container(dumped: Any) -> Tree:
    """Returns the tree that `dump` wrote; its leaves are `jax.ShapeDtypeStruct` objects.

    Args:
        dumped: the tree as JSON, which the pattern `tree` has checked.

    Raises:
        ValueError: the class of a container has not been imported, or cannot make a container from
            the saved data.
    """
    ((kind, inside),) = dumped.items()
    match kind:
        case "dict":
            return {k: load_container(v) for k, v in inside.items()}
        case "list":
            return [load_container(v) for v in inside]
        case "tuple":
            return tuple(load_container(v) for v in inside)
        case "none":
            return None
        case "node":
            return _container(*inside)
        case _:
            shape, dtype, *weak = inside
            return jax.ShapeDtypeStruct(tuple(shape), dtype_of(dtype), weak_type=bool(weak))


def _container(name: str, kept: Any, children: list[Any]) -> Tree:
    """Returns a container of a user's class.

    Args:
        name: the name of the class.
        kept: the node data of the container.
        children: the children, as `dump` writes them.
    """
    container, trees = _class(name), list(map(load_container, children))
    try:
        leaves = [jax.tree.structure(0)] * len(children)
        node_data = container, _plain(kept)
        node = PyTreeDef.from_node_data_and_children(default_registry, node_data, leaves)
        return jax.tree.unflatten(node, trees)
    except Exception as problem:  # a user's class may raise any kind of error
        parts = f"{brief(kept)} and {len(children)} parts"
        raise ValueError(f"the container {name} cannot be made of {parts}") from problem


def _dump(tree: Tree) -> Any:
    """Returns a tree as JSON; raises TypeError if it cannot be written."""
    kind = type(tree)
    if tree is None:
        return {"none": 0}
    if kind is dict and all(isinstance(k, str) for k in tree):
        return {"dict": {k: _dump(v) for k, v in tree.items()}}
    if kind in (list, tuple):
        return {kind.__name__: [_dump(v) for v in tree]}
    # `is_leaf` is true for all but the tree itself, so only the top level is flattened. If the tree
    # is a leaf, there are no node data.
    children, structure = jax.tree.flatten(tree, is_leaf=lambda x: x is not tree)
    node_data = structure.node_data()
    if node_data is not None:
        name = f"{kind.__module__}:{kind.__qualname__}"
        return {"node": [name, _as_json(node_data[1]), [_dump(x) for x in children]]}
    if not hasattr(tree, "dtype"):
        raise TypeError(kind)
    weak = ["weak"] if getattr(tree, "weak_type", False) else []
    return {"leaf": [list(tree.shape), str(tree.dtype), *weak]}


def _as_json(kept: Any) -> Any:
    """Returns node data as JSON, in which a tuple becomes `{"tuple": [...]}`.

    Raises TypeError for data that are not plain.
    """
    if isinstance(kept, tuple):
        return {"tuple": [_as_json(x) for x in kept]}
    if isinstance(kept, list):
        return [_as_json(x) for x in kept]
    if kept is None or type(kept) in (bool, int, float, str):
        return kept
    raise TypeError(type(kept))


def _plain(dumped: Any) -> Any:
    """Returns the node data that `_as_json` wrote."""
    match dumped:
        case {"tuple": inside}:
            return tuple(map(_plain, inside))
        case list():
            return [_plain(x) for x in dumped]
        case _:
            return dumped


def _class(name: str) -> type:
    """Returns the class with a name, `module:class`, from the modules that were imported before.

    Raises ValueError if no such class is found.
    """
    module, _, inside = name.partition(":")
    try:
        container = attrgetter(inside)(sys.modules[module])
    except (KeyError, AttributeError) as problem:
        raise ValueError(
            f"the containers are of class {inside} of {module}: import that before restore"
        ) from problem
    if not isinstance(container, type):
        raise ValueError(f"{brief(name)} is not a class of containers")
    return container
