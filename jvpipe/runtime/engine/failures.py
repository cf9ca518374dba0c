"""The errors of a run: a stage has failed, or another process is gone."""

from collections.abc import Sequence
from typing import Any


class StageError(RuntimeError):
    """A program or a copy failed; the message names the stage, the task and the layer.

    Attributes:
        state: a complete state that can be saved or trained further, if a migration or a change of
            the model failed between two steps; else None.
        table: the arrays at the time of the failure, indexed by buffer number.
    """

    state: Any = None
    table: Sequence[Any] = ()


class HostLost(StageError):  # noqa: N818 - it names what has happened
    """Another process of the run is lost, with its arrays; resume from the last checkpoint."""
