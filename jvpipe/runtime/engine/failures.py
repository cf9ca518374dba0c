"""The errors of a run: a stage has failed, or another process is gone."""

from collections.abc import Sequence
from typing import Any


class StageError(RuntimeError):
    """A program or a copy failed: the message says in which stage, task and layer.

    Attributes:
        state: after a failed migration or change of the model between two steps, a whole state that
            can be saved or trained further; else None.
        table: the arrays at the failure, by the numbers of their buffers.
    """

    state: Any = None
    table: Sequence[Any] = ()


class HostLost(StageError):  # noqa: N818 - it names what has happened
    """Another process of the run is gone, with its arrays: go on from the last checkpoint."""
