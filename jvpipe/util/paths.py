"""Writes key paths of pytrees as text, such as `blocks/0/kernel`.

Plans, checkpoints and users' patterns name parameters by these texts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def path_name(path: Sequence[Any]) -> str:
    """Writes a key path as text, such as `blocks/0/kernel`.

    Flax variables add a last key `value` to their paths. The text omits this key.

    >>> [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path({"a": [1, 2]})]
    ['a/0', 'a/1']
    """
    return "/".join(_keys(path))


def path_names(
    tree: Any,
    separator: str = "/",
    is_leaf: Callable[[Any], bool] | None = None,
) -> tuple[str, ...]:
    """Writes the key paths of a tree's leaves as texts, all of them different.

    If a key contains the separator, two paths may have the same text. In that case, the keys of
    all paths are escaped as in JSON pointers: ~1 stands for a separator inside a key, and ~0 for
    a tilde.

    Args:
        tree: the tree.
        separator: the text between two keys.
        is_leaf: tells what is a leaf besides JAX's own leaves.

    >>> path_names({"a/b": {"c": 1}, "a": {"b/c": 2}})
    ('a/b~1c', 'a~1b/c')
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf)]
    names = tuple(separator.join(_keys(path)) for path in paths)
    if len(set(names)) == len(names):
        return names
    # Tildes come first, because the tilde of an escaped separator must not be escaped again.
    escaped: list[str] = []
    for path in paths:
        keys = [key.replace("~", "~0") for key in _keys(path)]
        keys = [key.replace(separator, "~1") for key in keys]
        escaped.append(separator.join(keys))
    return tuple(escaped)


def _keys(path: Sequence[Any]) -> list[str]:
    """Lists the keys of a path as texts, without the last key `value` of a Flax variable."""
    last = jax.tree_util.GetAttrKey("value")
    if path and path[-1] == last:
        path = path[:-1]
    return [jax.tree_util.keystr((key,), simple=True) for key in path]
