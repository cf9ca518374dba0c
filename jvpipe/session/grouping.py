"""Groups compiled beside a run: layers that have moved run by programs of their own until those of groups are there."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.session.adapt import beside_training
from jvpipe.session.compiled_plans import CompiledPlans

_log = logging.getLogger("jvpipe")


class Grouping:
    """Has a plan of layers apart compiled in groups, by a thread beside the training, and then run so."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._apart: CompiledPlan | None = None
        self._grouped: Future[CompiledPlan] | None = None

    def pass_step(self, compiled_plans: CompiledPlans) -> None:
        """Begins to compile the groups of a plan that has none, or takes over what has been compiled.

        Args:
            compiled_plans: those of the model, between two steps, with no change of plan to come.
        """
        current = compiled_plans.current
        if current.grouped or not compiled_plans.settings.group:
            return
        if self._apart is not current:
            self._pool = self._pool or ThreadPoolExecutor(1, "jvpipe-groups")
            self._apart = current
            self._grouped = self._pool.submit(_compiled, compiled_plans, current)
        elif self._grouped and self._grouped.done():
            grouped, self._grouped = self._grouped, None
            if error := grouped.exception():
                _log.warning("layers stay apart, for their groups cannot be compiled: %s", error)
            elif grouped.result() is not current:  # else there is no room for groups
                compiled_plans.adopt(grouped.result())

    def wait(self) -> None:
        """Waits until what is being compiled is there; the next step runs it."""
        if self._grouped:
            self._grouped.exception()


def _compiled(compiled_plans: CompiledPlans, apart: CompiledPlan) -> CompiledPlan:
    with beside_training():
        return compiled_plans.in_groups(apart)
