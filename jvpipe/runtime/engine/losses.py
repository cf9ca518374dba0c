"""Checks that losses are finite, as early as possible without delaying the pipeline.

Unless the caller waits, a loss is read only when its computation has ended, so that no check delays
the dispatch. If a loss is not finite, an optimizer may still keep the parameters finite
(`optax.apply_if_finite`, `optax.zero_nans`). Training then goes on, and there is only one warning
until a loss is finite again. If a parameter is NaN, training cannot go on, and an error is raised.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np

from jvpipe import _jax
from jvpipe.ir.plan import Plan
from jvpipe.runtime.engine.controller import Controller
from jvpipe.util.paths import path_name

Tree = Any
_log = logging.getLogger("jvpipe")


class Losses(NamedTuple):
    """The losses of a step under a plan.

    If `apart` is true, `values` has a loss for each micro-batch. Otherwise it has only the loss of
    the step.
    """

    step: int
    plan: Plan
    values: Sequence[jax.Array]
    apart: bool


class LossWatch:
    """A checker of a run's losses, in the order of the steps.

    Args:
        controller: runs the steps; it makes the error for a loss whose computation has failed.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._steps: deque[Losses] = deque()  # the steps that have not been checked yet
        self._has_warned = False

    def begin(self) -> None:
        """Forgets the losses of the last run, for a new one."""
        self._steps.clear()
        self._has_warned = False

    def add(self, losses: Losses) -> None:
        """Adds the losses of a step that has been dispatched."""
        self._steps.append(losses)

    def check(
        self,
        params: Callable[[], Tree],
        *,
        wait: bool = False,
        last: bool = True,
    ) -> None:
        """Warns of losses that are not finite, or raises an error if training cannot go on.

        Args:
            params: returns the newest parameters; called only if a loss is not finite.
            wait: whether to wait for losses that have not been computed yet.
            last: whether to check the losses of the last step as well. A caller that waits between
                the steps of a stream leaves them out, so that the devices have the last step to
                work on during the wait.

        Raises:
            ValueError: a loss is not finite, and a parameter is NaN.
        """
        nan_parameter = cache(lambda: next(nan_leaves(params()), None))
        while len(self._steps) > (0 if last else 1):
            losses = self._steps[0]
            have_come = all(map(_jax.is_ready, losses.values))
            # Steps are checked in order, because a bad loss may cause later bad losses.
            if not (wait or have_come):
                return
            self._steps.popleft()
            for i, value in enumerate(map(self._value, losses.values)):
                if np.isfinite(value):
                    self._has_warned = False
                else:
                    self._warn(self._described(losses, i, value), nan_parameter())

    def _warn(self, loss: str, nan_parameter: str | None) -> None:
        """Warns of a loss that is not finite, but only once until a loss is finite again.

        Raises ValueError if a parameter is NaN.
        """
        if nan_parameter is not None:
            raise ValueError(
                f"{loss}, and parameter '{nan_parameter}' is NaN. "
                "States since then are not worth saving; the last checkpoint is whole. "
                "Check the batch and the initial parameters; "
                "a lower learning rate may help, or a schedule with less staleness"
            )
        if not self._has_warned:
            _log.warning("%s; no parameter is NaN, so training goes on", loss)
        self._has_warned = True

    def _described(self, losses: Losses, i: int, value: float) -> str:
        """Describes a loss, for messages.

        Args:
            losses: the losses of the step.
            i: the number of the loss among them.
            value: the loss.
        """
        stages = losses.plan.stages
        last = len(stages) - 1
        number = self._controller.first_step + losses.step
        if not losses.apart:
            return f"the loss of step {number} is {value} at stage {last}"
        m = losses.step * self._controller.microbatches + i
        versions = self._controller.ledger.versions
        read = [versions[stage.layers[0], m].forward for stage in stages]
        return (
            f"the loss of micro-batch {m} (step {number}) is {value} at stage {last}, "
            f"read with versions {read} of the stages' weights"
        )

    def _value(self, loss: jax.Array) -> float:
        """Reads a loss; raises the controller's error if its computation has failed."""
        try:
            return float(loss)
        except Exception as error:
            raise self._controller.failure(error) from error


def nan_leaves(tree: Tree) -> Iterator[str]:
    """Yields the names of the leaves that hold a NaN.

    >>> list(nan_leaves({"a": np.zeros(2), "b": np.array([1, np.nan])}))
    ['b']
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jax.numpy.issubdtype(leaf.dtype, np.inexact) and np.isnan(leaf).any():
            yield path_name(path)
