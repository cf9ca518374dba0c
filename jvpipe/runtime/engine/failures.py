"""The failures of a run: of a stage, or of another process."""

from collections.abc import Sequence
from typing import Any


class StageError(RuntimeError):
    """A program or a copy failed: the message says in which stage, task and layer.

    Attributes:
        state: if a migration or a change of the model has failed between two steps, a whole state
            that can be saved or trained further.
        table: the arrays at the failure, by their numbers in the buffer table.
    """

    state: Any = None
    table: Sequence[Any] = ()


class HostLost(StageError):  # noqa: N818 - it names what has happened
    """Another process of the run is gone, with its arrays: go on from the last checkpoint."""
