"""Finds leaves among the parameters that must not be trained, such as keys of a Flax module."""

import logging
import sys
from collections.abc import Sequence
from typing import Any

import jax

from jvpipe.util.paths import path_name

Tree = Any
_STATISTICS = "batch_stats"
"""Linen's collection of the running statistics of batch norm."""
_log = logging.getLogger("jvpipe")


def check_modules(params: Tree) -> None:
    """Checks that no parameter is a statistic, a key or a cache of an NNX module.

    Raises:
        ValueError: a parameter is one of these; the message says how to split the module.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:  # flax.nnx was never imported, so no parameter belongs to an NNX module
        return
    kinds = (nnx.BatchStat, nnx.RngState, nnx.Cache, nnx.Intermediate)

    def is_variable(node: Any) -> bool:
        return isinstance(node, nnx.Variable)

    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_variable):
        if isinstance(node, kinds):
            raise ValueError(
                f"parameter '{path_name(path)}' is an nnx.{type(node).__name__}, which has no "
                "gradient: use jvpipe.nnx.loss(model_fn, loss_fn), which splits the module as "
                "`nnx.split(model, nnx.Param, ...)` does, and keeps its batch statistics as "
                "model state (has_state=True)"
            )


def warn_of_statistics(trained: Sequence[str]) -> None:
    """Warns if running statistics are trained, because a user gave all variables of a Linen model.

    Args:
        trained: the paths of the parameters that the optimizer trains.
    """
    named = [name for name in trained if name.split("/")[0] == _STATISTICS]
    if named:
        _log.warning(
            "parameter '%s' and %d others are running statistics of batch norm, and the optimizer "
            "trains them: give only variables['params'], and pass variables['batch_stats'] as "
            "model state (has_state=True); or freeze them, frozen=['batch_stats/*']",
            named[0],
            len(named) - 1,
        )
