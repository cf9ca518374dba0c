"""Losses that are no numbers: seen as early as can be without holding the pipeline up."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jvpipe.ir.plan import Plan
from jvpipe.runtime.controller import Controller


@dataclass(frozen=True)
class LossWatch:
    """Looks at losses once they are there, and says where they went astray."""

    controller: Controller
    microbatches: int

    def check_first(self, loss: jax.Array, step: int) -> None:
        """Raises ValueError if the first loss of a run is not finite."""
        value = self._value(loss)
        if not np.isfinite(value):
            raise ValueError(
                f"the loss of step {step} is {value}: check the batch, the learning rate and the initial parameters"
            )

    def check(self, losses: Sequence[jax.Array], step: int, plan: Plan) -> None:
        """Raises ValueError if a micro-batch of a step of a stream had a loss that is not finite."""
        for i, value in enumerate(map(self._value, losses)):
            if not np.isfinite(value):
                m, versions = step * self.microbatches + i, self.controller.ledger.versions
                read = [versions[stage.layers[0], m].forward for stage in plan.stages]
                raise ValueError(
                    f"the loss of micro-batch {m} (step {step}) is {value} at stage {len(read) - 1}, read with "
                    f"versions {read} of the stages' weights. States since then are not worth saving; the last "
                    "checkpoint is whole. A lower learning rate may help, or a schedule with less staleness"
                )

    def _value(self, loss: jax.Array) -> float:
        try:
            return float(loss)
        except Exception as error:
            raise self.controller.failure(error) from error
