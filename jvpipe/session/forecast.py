"""The answers of planners for absent hardware: plans with their seconds, bytes and reasons."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from glob import escape
from pathlib import Path
from typing import Any

from jvpipe.ir.buffers import HOST
from jvpipe.ir.outline import Outline
from jvpipe.ir.plan import Plan
from jvpipe.papers.asking import ask
from jvpipe.papers.registry import find_planner
from jvpipe.planners.answer import Answer, best_first, smallest_limit_bytes, why_not
from jvpipe.planners.answer_json import shapes_json, stages_json
from jvpipe.planners.cut_reasons import cut_reasons, device_reasons
from jvpipe.planners.joint.device_orders import least_bound
from jvpipe.planners.joint.shape_bound import least_step_s
from jvpipe.planners.model.accuracy import check_sums
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.shapes import Shapes
from jvpipe.planners.model.stage_cost import Evaluation
from jvpipe.planners.model.stage_simulation import forecast, simulated_bubble_fraction
from jvpipe.planners.planned_problem import Planned
from jvpipe.planners.shape_reasons import shape_reasons, shape_words
from jvpipe.planners.splitting import CutCandidate, Splitter, uneven
from jvpipe.programs.store import shared_store
from jvpipe.report import chrome_trace
from jvpipe.runtime.engine.tensors import MemoryLimitExceeded
from jvpipe.schedules.auto import GivenLists, lines_of
from jvpipe.session.arguments import check_chooser
from jvpipe.session.question import Question
from jvpipe.simulate.timeline import Timeline
from jvpipe.trace.graph import Traced
from jvpipe.util.extras import extra
from jvpipe.util.sizes import format_bytes


@dataclass(frozen=True)
class Forecast:
    """The answers of planners to a problem, the best answer first.

    `str` of a forecast is the text that `python -m jvpipe.plan` prints. If the planner also decided
    which devices each stage has (the shape), `shapes` holds the shapes among which it chose.

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

    @property
    def best(self) -> Answer:
        """The best answer."""
        return self.answers[0]

    @property
    def fits(self) -> bool:
        """Whether there is a plan that keeps the limit."""
        return self.best.fits(self.problem)

    @property
    def planned(self) -> Planned | None:
        """The best plan with its problem; None if the planner found no plan."""
        plan, decision = self.best.plan, self.best.decision
        if plan is None or decision is None:
            return None
        return Planned(plan, self.problem, decision)

    @property
    def simulated(self) -> bool:
        """Whether there is a plan to simulate; the plan may exceed the limit."""
        return self.best.decision is not None

    @property
    def plan(self) -> Plan:
        """The best plan.

        Raises:
            MemoryLimitExceeded: no plan keeps the limit; the error's `smallest_limit_bytes`
                is a limit that some plan keeps.
        """
        if not self.fits:
            raise MemoryLimitExceeded(self.why_not(), smallest_limit_bytes(self.answers))
        assert self.best.plan is not None
        return replace(self.best.plan, splits=self.best.splits, outline=self.outline)

    @property
    def outline(self) -> Outline | None:
        """The outline of the model, for the micro-batches of the best plan; None for a profile."""
        # If the planner chose the shape, the costs' outline is of another number of micro-batches.
        outline = self.problem.costs.outline
        return outline and replace(outline, microbatches=self.microbatches)

    @property
    def microbatches(self) -> int:
        """How many micro-batches the best plan splits a batch into."""
        return self.problem.microbatches

    @cached_property
    def held_bytes(self) -> list[int]:
        """Each device's peak bytes under the best plan, on devices like this machine's first.

        The programs are compiled for this machine's first device, so the bytes equal a run's on
        such devices. Programs take other bytes on other hardware: `plan_for(..., compile=True)`
        asks the compiler of that hardware for each stage's `compiled_bytes`. Without `compile`, the
        planner estimates temporaries by rules derived from compilers for GPUs and TPUs. The
        estimate for a stage may be a few percent too high or too low.

        Raises:
            ValueError: the problem was made from a profile, not from a model.
        """
        if self.question is None:
            raise ValueError(
                "what a run holds is known of a model, and this is a profile of one: plan "
                "the model itself"
            )
        question = replace(self.question, microbatches=self.microbatches, remembered={})
        return [peak.bytes for peak in question.compiled(self.plan, shared_store()).peaks[:HOST]]

    @cached_property
    def simulation(self) -> Timeline:
        """The simulated step of the best plan: the tasks and bytes of each device over time."""
        return forecast(self.problem, self._decision)

    @property
    def step_s(self) -> float:
        """Seconds of a simulated step; infinite without a plan."""
        return self.best.step_s(self.problem)

    @property
    def state_s(self) -> float:
        """Seconds per step of the copies of optimizer state under the best plan."""
        return self.best.state_s

    def state_s_of(self, plan: Plan) -> float:
        """Returns the seconds of copies per step if a plan has the same state on the host."""
        assert self.question is not None
        fates = dict[str, str]()
        for stage in self.plan.stages:
            fates |= {escape(name): fate for name, fate in stage.state_fates.items()}
        question = replace(self.question, state_fates=fates)
        return question.with_state(plan, self.problem, self.best.splits)[1]

    @property
    def reasons(self) -> list[str]:
        """How devices differ, and why each cut is where it is."""
        problem, decision, shapes = self.problem, self._decision, self.shapes
        lines = list[str]()
        if not shapes or shapes.apart:
            lines += device_reasons(problem)
        if shapes:
            lines += shape_reasons(shapes, problem, decision, self.best.kinds)
        lines += cut_reasons(problem, decision)
        if self.state_s:
            lines.append(
                "the optimizer's state that lies on the host is copied to the devices before "
                f"its update and back after it, which takes about {self.state_s:.3g} s per step"
            )
        return lines

    @cached_property
    def lower_bound_s(self) -> float:
        """A lower bound on the seconds of a step under any plan that keeps the limit."""
        if self.best.decision is None:
            return math.inf
        return least_step_s(self.shapes) if self.shapes else least_bound(self.problem)

    def why_not(self) -> str:
        """Explains why no plan keeps the limit, and names a limit that a plan would keep."""
        return why_not(self.problem, self.answers)

    def figure(self, path: str | Path) -> None:
        """Draws the simulated step, and the memory of devices below it, as png, svg or pdf."""
        with extra("figures"):
            from jvpipe.report.figures import check_format, timeline_figure
        check_format(path)
        names = (self.title, self.problem.schedule.name, self.best.planner)
        found = self.simulation
        limits: dict[str, int] = {}
        for place, name in enumerate(found.resources[: found.devices]):
            limit = self.problem.limit_of(place)
            if limit is not None:
                limits[name] = limit
        timeline_figure(found.picture(), path, limits, ", ".join(filter(None, names)))

    def timeline(self, path: str | Path) -> None:
        """Writes the simulated step as a trace file for Perfetto."""
        chrome_trace.write_trace(Path(path), self.simulation.picture())

    def to_json(self) -> Any:
        """Returns the JSON of `--json`: one answer, or a list of answers with the best first."""
        answers = list(map(self._answer_json, self.answers))
        return answers[0] if len(answers) == 1 else answers

    def show(self, console: Any) -> None:
        """Prints to a `rich.console.Console`: one answer in full, or several as rows of a table."""
        with extra("cli"):
            from rich.text import Text

            from jvpipe.report.tables import comparison, stage_table
        problem, best = self.problem, self.best
        if len(self.answers) > 1:
            console.print(comparison(map(self._row, self.answers)))
        elif self.simulated:
            stages = stages_json(best)
            names = list(map(problem.name_of, range(len(stages)))) if problem.groups else []
            console.print(stage_table(stages, names))
            compiled = [f"stage {s}: {stage}" for s, stage in enumerate(best.compiled)]
            for line in (self._summary(), *compiled, *self.reasons):
                console.print(Text(line))

    def __str__(self) -> str:
        with extra("cli"):
            from jvpipe.report.tables import printed
        return printed(self.show) + ("" if self.fits else f"no plan: {self.why_not()}\n")

    @property
    def _decision(self) -> Decision:
        decision = self.best.decision
        if decision is None:
            raise MemoryLimitExceeded(self.why_not(), smallest_limit_bytes(self.answers))
        return decision

    def _answer_json(self, answer: Answer) -> dict[str, Any]:
        """Returns an answer as `--json` writes it."""
        problem, evaluation, bound_s = self.problem, answer.evaluation, self.lower_bound_s
        head = {
            "planner": answer.planner,
            "schedule": problem.schedule.name,
            "feasible": answer.fits(problem),
        }
        if evaluation is None:
            assert answer.infeasible is not None
            return head | {
                "reason": str(answer.infeasible),
                "smallest_limit_bytes": answer.infeasible.smallest_limit_bytes,
                "stages": [],
                "planning_s": answer.planning_s,
            }
        stages = stages_json(answer)
        for stage in stages:
            del stage["host_bytes"]
        # The compiler's bytes are added to each stage. An answer that was not compiled has none.
        for stage, said in zip(stages, answer.compiled, strict=False):
            stage |= said.to_json()
        lists, shapes = problem.schedule.lists, self.shapes
        content = head | {
            "stages": stages,
            "bottleneck_s": evaluation.bottleneck_s,
            "step_s": answer.step_s(problem),
            "lower_bound_s": bound_s if math.isfinite(bound_s) else None,
            "bubble_fraction": self._idle(answer, evaluation),
            "planning_s": answer.planning_s,
            "splits": list(answer.splits),
            "tasks": list(lines_of(lists.lists)) if isinstance(lists, GivenLists) else [],
        }
        if shapes:
            content["devices"], content["microbatches"] = shapes.devices, problem.microbatches
            content["shapes"] = shapes_json(answer)
        return content

    def _idle(self, answer: Answer, evaluation: Evaluation) -> float:
        """Returns the share of a step in which devices are idle, as a mean over all devices."""
        devices = self.shapes and self.shapes.devices
        return simulated_bubble_fraction(self.problem, evaluation.stages, devices, answer.state_s)

    def _row(self, answer: Answer) -> tuple[str, ...]:
        """Returns the row of an answer in the table that compares planners."""
        planning, evaluation = f"{answer.planning_s:.2f}", answer.evaluation
        if evaluation is None or answer.plan is None:
            return answer.planner, "no plan fits", "", "", "", "", planning
        over = "" if answer.fits(self.problem) else " (over the limit)"
        return (
            answer.planner,
            " ".join(map(str, answer.plan.cuts)),
            f"{1e3 * evaluation.bottleneck_s:.2f}",
            f"{1e3 * answer.step_s(self.problem):.2f}",
            f"{self._idle(answer, evaluation):.1%}",
            format_bytes(evaluation.peak_bytes) + over,
            planning,
        )

    def _summary(self) -> str:
        """Returns a line about the best plan: a step's seconds, the slowest stage and idleness."""
        best, problem, shapes = self.best, self.problem, self.shapes
        evaluation, bound_s = best.evaluation, self.lower_bound_s
        assert evaluation is not None
        microbatches = problem.microbatches
        shape = size = ""
        if shapes:
            shape = f"on {shapes.devices} devices {shape_words(problem)}, "
            size = f" of {shapes.batch // microbatches}"
        several = "es" if microbatches > 1 else ""
        # A step waits for the slowest all-reduce.
        reduce_s = max(cost.reduce_s for cost in evaluation.stages)
        reduced = f"all-reduces of up to {1e3 * reduce_s:.2f} ms, " if reduce_s else ""
        update_s = max(cost.update_s for cost in evaluation.stages)
        updated = f"updates of up to {1e3 * update_s:.2f} ms, " if update_s else ""
        bound = "no plan keeps the limit"
        if math.isfinite(bound_s):
            bound = f"no plan is under {1e3 * bound_s:.2f}"
        split = f"; {len(best.splits)} layers are cut in two" if best.splits else ""
        return (
            f"planner {best.planner}, schedule {problem.schedule.name}, "
            f"{shape}{microbatches} micro-batch{several}{size}: "
            f"step {1e3 * self.step_s:.2f} ms simulated ({bound}), "
            f"slowest stage {1e3 * evaluation.bottleneck_s:.2f} ms, {reduced}{updated}"
            f"{self._idle(best, evaluation):.1%} idle, planned in {best.planning_s:.2f} s{split}"
        )


def asked(
    problem: Problem,
    names: Sequence[str],
    title: str = "",
    question: Question | None = None,
    splits: tuple[int, ...] = (),
) -> Forecast:
    """Asks planners to solve a problem, and returns their answers, the best first.

    Args:
        problem: the problem. If the planner chooses the order of tasks (schedule "auto"), the
            forecast's problem has the order of the best answer.
        names: the names of the planners.
        title: the title of a figure.
        question: the question from which the problem was made.
        splits: the cuts inside layers that the problem has.

    Raises:
        ValueError: seconds or bytes of the problem are too large for accurate sums.
    """
    check_sums(problem)
    for name in names:
        check_chooser(problem.schedule, name)
    # The sort of `best_first` is stable, so jvpipe's plan comes first among equally good plans.
    own_first = sorted(names, key=lambda name: find_planner(name).as_paper)
    by_planner = {
        name: timed(name, problem, partial(ask, name, problem), question, splits)
        for name in own_first
    }
    answers = best_first(problem, [answer for _, answer in by_planner.values()])
    return Forecast(by_planner[answers[0].planner][0], tuple(answers), title, question)


def timed(
    planner: str,
    problem: Problem,
    put: Callable[[], Planned],
    question: Question | None,
    splits: tuple[int, ...] = (),
) -> tuple[Problem, Answer]:
    """Asks a planner and measures how long it takes.

    Args:
        planner: the name of the planner.
        problem: the problem to solve.
        put: calls the planner.
        question: the question from which the problem was made.
        splits: the cuts inside layers that the problem has.

    Returns:
        The problem with the order of tasks that the planner chose, and the answer.
    """
    start_s = time.perf_counter()
    try:
        planned = put()
    except Infeasible as infeasible:
        passed_s = time.perf_counter() - start_s
        return problem, Answer(planner, passed_s, infeasible=infeasible, splits=splits)
    passed_s = time.perf_counter() - start_s
    return planned.problem, _answer(planner, planned, passed_s, question, splits)


def _answer(
    planner: str,
    planned: Planned,
    planning_s: float,
    question: Question | None,
    splits: tuple[int, ...],
) -> Answer:
    plan, state_s = planned.plan, 0.0
    if question is not None:
        plan, state_s = question.with_state(plan, planned.problem, splits)
    return Answer(
        planner,
        planning_s,
        planned.decision,
        planned.evaluation,
        splits=splits,
        plan=plan,
        kinds=planned.shapes,
        state_s=state_s,
    )


def with_splits(question: Question, whole: Forecast) -> Forecast:
    """Returns an answer with some layers cut in two if these cuts make the plan faster.

    The halves of a layer are assumed to give results that are bitwise identical to those of the
    whole layer. Without the hardware, this cannot be checked.

    Args:
        question: holds the model, which is traced again.
        whole: the answer in which no layer is cut.
    """
    first, planned, cluster = whole.best, whole.planned, whole.problem.cluster
    if planned is None or cluster is None or not uneven(planned):
        return whole
    start_s = time.perf_counter()
    model = question.trace()

    def plan(traced: Traced) -> CutCandidate:
        finer = question.problem_of(cluster, whole.problem.limits, replace(model, traced=traced))
        return CutCandidate(traced, ask(first.planner, finer))

    begin = CutCandidate(model.traced, planned)
    best = Splitter(cluster.device, lambda *_: True).better(begin, plan)
    planning_s = first.planning_s + time.perf_counter() - start_s
    finer = _answer(first.planner, best.planned, planning_s, question, best.traced.splits)
    return replace(whole, problem=best.planned.problem, answers=(finer,))
