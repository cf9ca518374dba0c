"""Finds the parameter that a loss reads although the user's tree lacks it."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

Tree = Any


class _MissingError(KeyError):
    """A parameter that a loss reads is missing; the loss may catch this like any KeyError."""


class _Watched(dict[Any, Any]):
    """A dict in the tree of parameters that raises an error with the path of a missing key."""

    path: tuple[Any, ...] = ()

    def __missing__(self, key: Any) -> Any:
        raise _MissingError("/".join(map(str, (*self.path, key))))


def missing_parameter(loss_fn: Callable[..., Any], params: Tree, *rest: Any) -> str | None:
    """Returns the path of the first parameter that a loss does not find; None if it finds all.

    The result is also None if the loss raises any other error.

    Args:
        loss_fn: the loss.
        params: the tree of parameters in which the loss looks, as arrays or shapes.
        rest: the other arguments of the loss.
    """

    def watched(tree: Tree, path: tuple[Any, ...]) -> Tree:
        if not isinstance(tree, Mapping):
            return tree
        entries = {key: watched(value, (*path, key)) for key, value in tree.items()}
        watching = _Watched(entries)
        watching.path = path
        return watching

    def loss(params: Tree, *rest: Any) -> Any:
        return loss_fn(watched(params, ()), *rest)

    try:
        jax.eval_shape(loss, params, *rest)
    except _MissingError as missing:
        return missing.args[0]
    except Exception:
        return None
    return None
