"""Failures of a run: a stage's, or another process's."""

from collections.abc import Sequence
from typing import Any


class StageError(RuntimeError):
    """A program or a copy failed: the message says in which stage, task and layer.

    Attributes:
        state: if a migration or a change of models failed between two steps, a whole state to go on
            from, or to save.
        table: the arrays that there were when the run failed, by their numbers in the buffer table.
    """

    state: Any = None
    table: Sequence[Any] = ()


class HostLost(StageError):  # noqa: N818 - it names what has happened
    """Another process of the run is gone, and with it the arrays on its devices: go on from the last checkpoint."""
