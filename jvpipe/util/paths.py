"""Key paths of pytrees as text: `blocks/0/kernel`."""

from collections.abc import Sequence
from typing import Any

import jax


def path_name(path: Sequence[Any]) -> str:
    """A key path as text, `blocks/0/kernel`; the `value` of a Flax variable is not named.

    >>> [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path({"a": [1, 2]})]
    ['a/0', 'a/1']
    """
    return "/".join(_keys(path))


def path_names(paths: Sequence[Sequence[Any]], separator: str = "/") -> tuple[str, ...]:
    """The key paths of a tree as texts that differ: where two read alike, what is in their keys is escaped in all.

    Escapes are those of JSON pointers: ~1 is a separator inside a key, ~0 is ~.

    >>> tree = {"a/b": {"c": 1}, "a": {"b/c": 2}}
    >>> path_names([path for path, _ in jax.tree_util.tree_leaves_with_path(tree)])
    ('a/b~1c', 'a~1b/c')
    """
    names = tuple(separator.join(_keys(path)) for path in paths)
    if len(set(names)) == len(names):
        return names
    escaped = [
        [key.replace("~", "~0").replace(separator, "~1") for key in _keys(path)] for path in paths
    ]
    return tuple(map(separator.join, escaped))


def _keys(path: Sequence[Any]) -> list[str]:
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return [jax.tree_util.keystr((key,), simple=True) for key in path]
