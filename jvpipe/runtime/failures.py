"""Failures of a run: a stage's, or another process's."""

from collections.abc import Sequence
from typing import Any


class StageError(RuntimeError):
    """A program or a copy failed: says in which stage, task and layer.

    `state` is whole if what failed lay between two steps, a migration or a change of models: the run goes on from it,
    or it is saved. `table` are the arrays that there were.
    """

    state: Any = None
    table: Sequence[Any] = ()


class HostLost(StageError):  # noqa: N818 - what has happened, not what was wrong
    """Another process of the run is gone, and with it what lay on its devices: go on from the last checkpoint."""
