"""Losses that are no numbers: seen as early as can be without holding the pipeline up.

An optimizer may keep them from the parameters (`optax.apply_if_finite`, `optax.zero_nans`). Then training goes on, and
they are told once, until the loss is a number again. From parameters that are NaN it cannot go on.
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
from jvpipe.runtime.controller import Controller
from jvpipe.trace.loss import path_name

Tree = Any
_log = logging.getLogger("jvpipe")


class Losses(NamedTuple):
    """The losses of a step under a plan: those of its micro-batches if they are known `apart`, else that of all."""

    step: int
    plan: Plan
    values: Sequence[jax.Array]
    apart: bool


class LossWatch:
    """Looks at the losses of a run once they are there; of a step that was looked at nothing is kept."""

    def __init__(self, controller: Controller, microbatches: int) -> None:
        self._controller, self._microbatches = controller, microbatches
        self._steps: deque[Losses] = deque()
        self._told = False

    def begin(self) -> None:
        """A run begins: nothing is left of another one."""
        self._steps.clear()
        self._told = False

    def add(self, losses: Losses) -> None:
        """A step has been dispatched."""
        self._steps.append(losses)

    def check(self, params: Callable[[], Tree], *, wait: bool = False, last: bool = True) -> None:
        """Warns of losses that are not finite, or raises if training cannot go on from them.

        Args:
            params: gives the newest parameters; called only if a loss is not finite.
            wait: for losses that are not there yet.
            last: look at those of the last step too.

        Raises:
            ValueError: a loss is not finite, and a parameter is NaN.
        """
        lost = cache(lambda: next(nan_leaves(params()), None))
        while len(self._steps) > (0 if last else 1):
            losses = self._steps[0]
            if not (wait or all(map(_jax.is_ready, losses.values))):
                return
            self._steps.popleft()
            for i, value in enumerate(map(self._value, losses.values)):
                if np.isfinite(value):
                    self._told = False
                else:
                    self._tell(losses, i, value, lost())

    def _tell(self, losses: Losses, i: int, value: float, lost: str | None) -> None:
        if lost is not None:
            raise ValueError(
                f"{self._described(losses, i, value)}, and parameter '{lost}' is NaN. States since then are not worth "
                "saving; the last checkpoint is whole. Check the batch and the initial parameters; a lower learning "
                "rate may help, or a schedule with less staleness"
            )
        if not self._told:
            _log.warning(
                "%s; no parameter is NaN, so training goes on", self._described(losses, i, value)
            )
        self._told = True

    def _described(self, losses: Losses, i: int, value: float) -> str:
        step, plan, _, apart = losses
        stage, number = len(plan.stages) - 1, self._controller.first_step + step
        if not apart:
            return f"the loss of step {number} is {value} at stage {stage}"
        m, versions = step * self._microbatches + i, self._controller.ledger.versions
        read = [versions[stage.layers[0], m].forward for stage in plan.stages]
        return (
            f"the loss of micro-batch {m} (step {number}) is {value} at stage {stage}, read with versions {read} of "
            "the stages' weights"
        )

    def _value(self, loss: jax.Array) -> float:
        try:
            return float(loss)
        except Exception as error:
            raise self._controller.failure(error) from error


def nan_leaves(tree: Tree) -> Iterator[str]:
    """The names of the leaves that hold a NaN.

    >>> list(nan_leaves({"a": np.zeros(2), "b": np.array([1, np.nan])}))
    ['b']
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jax.numpy.issubdtype(leaf.dtype, np.inexact) and np.isnan(leaf).any():
            yield path_name(path)
