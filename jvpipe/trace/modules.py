"""NNX modules that are passed whole as parameters: what of them cannot be trained is named in an error."""

import sys
from typing import Any

import jax

from jvpipe.util.paths import path_name

Tree = Any


def check_modules(params: Tree) -> None:
    """Checks that no parameter is a statistic, a key or a cache of a module: an update would spoil it.

    Raises:
        ValueError: one is; the message says how a module is taken apart.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:  # nobody has imported it, so nothing is a module
        return
    kinds = (nnx.BatchStat, nnx.RngState, nnx.Cache, nnx.Intermediate)

    def is_variable(node: Any) -> bool:
        return isinstance(node, nnx.Variable)

    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_variable):
        if isinstance(node, kinds):
            raise ValueError(
                f"parameter '{path_name(path)}' is an nnx.{type(node).__name__}, which has no gradient: "
                "jvpipe.nnx.loss(model_fn, loss_fn) takes a module apart, as `nnx.split(model, nnx.Param, ...)` does, "
                "and keeps its batch statistics as model state (has_state=True)"
            )
