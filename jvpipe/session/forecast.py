"""What planners answer about hardware that is not here: a plan, what it takes, and why."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from jvpipe.ir.extras import extra
from jvpipe.ir.plan import Plan
from jvpipe.planners.joint.device_orders import least_bound
from jvpipe.planners.joint.shape_bound import least_step_s
from jvpipe.planners.model.forecast import forecast, simulated_step_s
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.shapes import Shapes
from jvpipe.report import timeline
from jvpipe.report.answers import (
    Answer,
    as_json,
    smallest_limit_bytes,
    summary,
    why_not,
)
from jvpipe.report.reasons import cut_reasons, device_reasons
from jvpipe.report.shapes import shape_reasons
from jvpipe.runtime.tensors import MemoryLimitExceeded
from jvpipe.session.question import Question
from jvpipe.simulate.timeline import Timeline


@dataclass(frozen=True)
class Forecast:
    """What planners answer to a problem, the best answer first; `str` of it is what `python -m jvpipe.plan` prints.

    Where the number of devices of each stage was decided too, `shapes` are those that there were.

    >>> import jax, jax.numpy as jnp, jvpipe
    >>> def loss_fn(params, batch, rng):
    ...     for w in params:
    ...         batch = jnp.tanh(batch @ w)
    ...     return jnp.mean(batch**2)
    >>> wide = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    >>> forecast = jvpipe.plan_for(loss_fn, [wide] * 8, wide, stages=4, hardware="h100", memory_limit="16GiB")
    >>> forecast.plan.cuts, forecast.plan.planner
    ((2, 2, 2, 2), 'jvpipe')
    """

    problem: Problem
    answers: tuple[Answer, ...]
    title: str = ""
    question: Question | None = None
    shapes: Shapes | None = None

    @property
    def fits(self) -> bool:
        """Whether there is a plan that keeps the limit."""
        return self.answers[0].fits(self.problem)

    @property
    def simulated(self) -> bool:
        """Whether there is a plan to be simulated, which may be over the limit."""
        return self.answers[0].decision is not None

    @property
    def plan(self) -> Plan:
        """The best plan.

        Raises:
            MemoryLimitExceeded: none keeps the limit; its `smallest_limit_bytes` is one that would do.
        """
        if not self.fits:
            raise MemoryLimitExceeded(self.why_not(), smallest_limit_bytes(self.answers))
        best = self.answers[0]
        assert best.plan is not None
        return replace(best.plan, splits=best.splits, outline=self.problem.costs.outline)

    @property
    def microbatches(self) -> int:
        """How many the best plan splits a batch into."""
        return self.problem.microbatches

    @cached_property
    def held_bytes(self) -> list[int]:
        """The most that devices like the first one at hand hold under the best plan, to the byte of a run's ledger.

        For this, and for nothing else here, programs are compiled for the device at hand. What other hardware makes of
        them is its own compiler's affair: `plan_for(..., compile=True)` asks it, and each stage's `compiled_bytes` are
        what it says. Without, temporaries are an estimate, which can be too low.

        Raises:
            ValueError: the problem is of no model.
        """
        if self.question is None:
            raise ValueError("what a run holds is known of a model, and this is a profile of one")
        return replace(self.question, microbatches=self.microbatches).held_bytes(self.plan)

    @cached_property
    def simulation(self) -> Timeline:
        """What each device of the best plan does when, and what it holds."""
        return forecast(self.problem, self._decision)

    @property
    def step_s(self) -> float:
        """Seconds of a simulated step; infinite without a plan."""
        best = self.answers[0].evaluation
        return math.inf if best is None else simulated_step_s(self.problem, best.stages)

    @property
    def reasons(self) -> list[str]:
        """How devices differ, and why each cut is where it is."""
        decision, shapes = self._decision, self.shapes
        unlike = [] if shapes and not shapes.apart else device_reasons(self.problem)
        kinds = self.answers[0].kinds
        shape = shape_reasons(shapes, self.problem, decision, kinds) if shapes else []
        return [*unlike, *shape, *cut_reasons(self.problem, decision)]

    @cached_property
    def lower_bound_s(self) -> float:
        """Seconds of a step that no plan under the limit is below."""
        if self.answers[0].decision is None:
            return math.inf
        return least_step_s(self.shapes) if self.shapes else least_bound(self.problem)

    def why_not(self) -> str:
        """Why no plan keeps the limit, and what would."""
        return why_not(self.problem, self.answers)

    def figure(self, path: str | Path) -> None:
        """Draws the simulation, with memory under it (png, svg or pdf)."""
        with extra("figures"):
            from jvpipe.report.figures import check_format, timeline_figure
        check_format(path)
        title = ", ".join(
            filter(None, (self.title, self.problem.schedule.name, self.answers[0].planner))
        )
        found = self.simulation
        limits = {
            name: self.problem.limit_of(d)
            for d, name in enumerate(found.resources[: found.devices])
        }
        told = {name: limit for name, limit in limits.items() if limit is not None}
        timeline_figure(found.picture(), Path(path), told, title)

    def timeline(self, path: str | Path) -> None:
        """Writes the simulation for Perfetto."""
        timeline.write(Path(path), self.simulation.picture())

    def to_json(self) -> Any:
        """The answer as `--json` holds it; of several planners a list, the best first."""
        bound_s, shapes = self.lower_bound_s, self.shapes
        answers = [as_json(self.problem, each, bound_s, shapes) for each in self.answers]
        return answers[0] if len(answers) == 1 else answers

    def show(self, console: Any) -> None:
        """Prints one answer whole, several side by side, to a `rich.console.Console`."""
        with extra("cli"):
            from jvpipe.report.tables import comparison, stage_table
        first = self.answers[0]
        if len(self.answers) > 1:
            console.print(comparison(self.problem, self.answers))
        elif first.decision is not None and first.evaluation is not None:
            console.print(stage_table(self.problem, first.decision, first.evaluation))
            told = summary(self.problem, first, self.lower_bound_s, self.shapes)
            console.print(told, highlight=False)
            for s, stage in enumerate(first.compiled):
                console.print(f"stage {s}: {stage}", highlight=False)
            for reason in self.reasons:
                console.print(reason, highlight=False)

    def __str__(self) -> str:
        with extra("cli"):
            from jvpipe.report.tables import printed
        return printed(self.show) + ("" if self.fits else f"no plan: {self.why_not()}\n")

    @property
    def _decision(self) -> Decision:
        decision = self.answers[0].decision
        if decision is None:
            raise MemoryLimitExceeded(self.why_not(), smallest_limit_bytes(self.answers))
        return decision
