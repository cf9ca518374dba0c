"""What planners answer about hardware that is not here: a plan, what it takes, and why."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from jvpipe.ir.plan import Plan
from jvpipe.planners.answer import Answer, smallest_limit_bytes, why_not
from jvpipe.planners.cut_reasons import cut_reasons, device_reasons
from jvpipe.planners.joint.device_orders import least_bound
from jvpipe.planners.joint.shape_bound import least_step_s
from jvpipe.planners.model.forecast import bubble_fraction, forecast, simulated_step_s
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.shapes import Shapes
from jvpipe.planners.model.stage_cost import StageCost
from jvpipe.planners.shape_reasons import shape_reasons, shape_words
from jvpipe.report import timeline
from jvpipe.report.answers import AnsweredPlan, AnsweredShape
from jvpipe.runtime.engine.tensors import MemoryLimitExceeded
from jvpipe.schedules.auto import GivenLists
from jvpipe.session.question import Question
from jvpipe.simulate.timeline import Timeline
from jvpipe.util.extras import extra


@dataclass(frozen=True)
class Forecast:
    """What planners answer to a problem, the best answer first; `str` of it is what `python -m jvpipe.plan` prints.

    Where the number of devices of each stage was decided too, `shapes` are those that there were. The optimizer's state
    that lies on the host comes and goes in `state_s` seconds a step, which nothing hides.

    >>> import jax, jax.numpy as jnp, jvpipe
    >>> def loss_fn(params, batch, rng):
    ...     for w in params:
    ...         batch = jnp.tanh(batch @ w)
    ...     return jnp.mean(batch**2)
    >>> wide = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    >>> forecast = jvpipe.plan_for(loss_fn, [wide] * 8, wide, stages=4, hardware="h100", microbatches=8)
    >>> forecast.plan.cuts, forecast.plan.planner
    ((2, 2, 2, 2), 'jvpipe')
    """

    problem: Problem
    answers: tuple[Answer, ...]
    title: str = ""
    question: Question | None = None
    shapes: Shapes | None = None
    state_s: float = 0.0

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
        what it says. Without, temporaries are counted by rules that GPUs' and
        TPUs' compilers were seen to follow: a few percent of a stage too high or too low.

        Raises:
            ValueError: the problem is of no model.
        """
        if self.question is None:
            raise ValueError("what a run holds is known of a model, and this is a profile of one")
        return replace(self.question, microbatches=self.microbatches).held_bytes(self.plan)

    @cached_property
    def answered(self) -> tuple[AnsweredPlan, ...]:
        """The answers as plain numbers, which tables and JSON are made of."""
        return tuple(_answered_plan(self.problem, each, self.shapes) for each in self.answers)

    @cached_property
    def simulation(self) -> Timeline:
        """What each device of the best plan does when, and what it holds."""
        return forecast(self.problem, self._decision)

    @property
    def step_s(self) -> float:
        """Seconds of a simulated step; infinite without a plan."""
        best = self.answers[0].evaluation
        own_s = math.inf if best is None else simulated_step_s(self.problem, best.stages)
        return own_s + self.state_s

    @property
    def reasons(self) -> list[str]:
        """How devices differ, and why each cut is where it is."""
        decision, shapes = self._decision, self.shapes
        unlike = [] if shapes and not shapes.apart else device_reasons(self.problem)
        kinds = self.answers[0].kinds
        shape = shape_reasons(shapes, self.problem, decision, kinds) if shapes else []
        state = (
            "the optimizer's state that lies on the host comes before its update and goes back after it: "
            f"{self.state_s:.3g} s a step more, at most"
        )
        away = [state] if self.state_s else []
        return [*unlike, *shape, *cut_reasons(self.problem, decision), *away]

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
        answers = [plan.as_json(self.lower_bound_s) for plan in self.answered]
        return answers[0] if len(answers) == 1 else answers

    def show(self, console: Any) -> None:
        """Prints one answer whole, several side by side, to a `rich.console.Console`."""
        with extra("cli"):
            from jvpipe.report.tables import comparison, stage_table
        if len(self.answers) > 1:
            console.print(comparison(self.answered))
        elif self.simulated:
            best = self.answered[0]
            console.print(stage_table(best))
            compiled = [f"stage {s}: {stage}" for s, stage in enumerate(best.compiled)]
            for line in (best.summary(self.lower_bound_s), *compiled, *self.reasons):
                console.print(line, highlight=False)

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


def _answered_plan(problem: Problem, answer: Answer, shapes: Shapes | None) -> AnsweredPlan:
    """Returns an answer as plain numbers.

    Args:
        problem: what was asked.
        answer: a planner's.
        shapes: those of which the problem is one, where the shape was decided too.
    """
    schedule, lists = problem.schedule.name, problem.schedule.lists
    if answer.decision is None or answer.evaluation is None:
        assert answer.infeasible is not None
        return AnsweredPlan(
            answer.planner,
            schedule,
            answer.planning_s,
            feasible=False,
            reason=str(answer.infeasible),
            smallest_limit_bytes=answer.infeasible.smallest_limit_bytes,
        )
    stages = answer.evaluation.stages
    plan = answer.plan or answer.decision.plan(problem, answer.planner)
    tasks = lists.lines if isinstance(lists, GivenLists) else ()
    return AnsweredPlan(
        answer.planner,
        schedule,
        answer.planning_s,
        feasible=answer.fits(problem),
        plan=replace(plan, splits=answer.splits, tasks=tasks),
        names=tuple(map(problem.name_of, range(len(stages)))) if problem.groups else (),
        costs=tuple(map(_numbers, stages)),
        compiled=answer.compiled,
        microbatches=problem.microbatches,
        bottleneck_s=answer.evaluation.bottleneck_s,
        peak_bytes=answer.evaluation.peak_bytes,
        step_s=simulated_step_s(problem, stages),
        bubble_fraction=bubble_fraction(problem, stages, shapes and shapes.devices),
        shape=shape_words(problem) if shapes else "",
        shapes=_answered_shapes(answer) if shapes else (),
        devices=shapes.devices if shapes else 0,
        batch=shapes.batch if shapes else 0,
    )


def _numbers(cost: StageCost) -> dict[str, float]:
    """Returns what a stage takes and holds, by the names of `--json`."""
    input_s, weight_s = cost.halves_s
    return {
        "forward_s": cost.forward_s,
        "backward_s": cost.backward_s,
        "recompute_s": cost.recompute_s,
        "swap_s": cost.swap_s,
        "comm_s": cost.comm_s,
        "peak_bytes": cost.peak_bytes,
        "in_flight": cost.in_flight,
        "input_s": input_s,
        "weight_s": weight_s,
        "reduce_s": cost.reduce_s,
        "update_s": cost.update_s,
        "host_bytes": cost.host_bytes,
    }


def _answered_shapes(answer: Answer) -> tuple[AnsweredShape, ...]:
    """Returns the best plan of each kind of shape that was looked at, the fastest first."""
    kinds = sorted(answer.kinds.items(), key=lambda item: item[1].step_s)
    return tuple(
        AnsweredShape(
            kind,
            plan.shape.replicas,
            tuple(j - i for i, j in pairwise(plan.decision.bounds)),
            plan.problem.microbatches,
            plan.step_s,
        )
        for kind, plan in kinds
    )
