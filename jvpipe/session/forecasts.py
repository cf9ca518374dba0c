"""Plans for hardware that is not here, from shapes alone: what planners answer, what it takes, and why."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.hardware import Cluster
from jvpipe.ir.brief import brief
from jvpipe.ir.extras import extra
from jvpipe.ir.given import several
from jvpipe.ir.optimizer import Optimizer
from jvpipe.ir.plan import Plan
from jvpipe.papers.registry import PLANNERS, find_planner
from jvpipe.planners.joint.device_orders import least_bound
from jvpipe.planners.joint.shape_bound import least_step_s
from jvpipe.planners.model.forecast import forecast, simulated_step_s
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.shapes import Shapes
from jvpipe.planners.model.stage_cost import evaluate
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.report import timeline
from jvpipe.report.answers import (
    Answer,
    as_json,
    best_first,
    smallest_limit_bytes,
    summary,
    why_not,
)
from jvpipe.report.reasons import cut_reasons, device_reasons
from jvpipe.report.shapes import shape_reasons
from jvpipe.runtime.tensors import MemoryLimitExceeded
from jvpipe.schedules import Schedule
from jvpipe.session.arguments import (
    USUAL_MICROBATCHES,
    USUAL_STAGES,
    check_chooser,
    check_functions,
    checked_name,
)
from jvpipe.session.asking import Planned, ask, ask_shapes
from jvpipe.session.options import PLAN_FOR, checked
from jvpipe.session.planning import CutCandidate, Splitter, crowded
from jvpipe.session.question import Question, check_shape_planner, check_sums, given_pins
from jvpipe.simulate.timeline import Timeline
from jvpipe.trace.graph import Traced

Tree = Any
USUAL_HARDWARE = "a100-40gb"


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
        """The most that each device holds under the best plan: what the ledger of a run tells, to the byte.

        For this, and for nothing else here, programs are compiled: for the device at hand, whose compiler alone knows
        the temporary arrays. What planners count (`to_json()["stages"]`) is never much less, and often a little more.

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


def plan_for(
    loss_fn: Callable[..., Any],
    params: Tree,
    batch: Tree,
    stages: int | None = None,
    *,
    devices: int | None = None,
    replicas: Sequence[int] | str | None = None,
    cuts: Sequence[int] | str | None = None,
    hardware: str | Cluster | None = None,
    memory_limit: int | str | Sequence[int | str] | None = None,
    microbatches: int | None = None,
    schedule: str | Schedule = "1f1b",
    planner: str | Sequence[str] = "jvpipe",
    optimizer: Optimizer | None = None,
    model_state: Tree = None,
    has_aux: bool = False,
    has_state: bool = False,
    stacked: str | None = None,
    frozen: Sequence[str] | None = None,
    title: str = "",
) -> Forecast:
    """Plans a model from its shapes, for hardware that is not here; nothing is allocated, compiled or run.

    With `devices`, `replicas` or `cuts` stages may have several devices each, and what is not given is decided.

    Args:
        loss_fn: as `jvpipe.Pipeline` takes it.
        params: arrays, or their shapes, or a function `key -> params`.
        batch: a whole one: arrays, or their shapes.
        stages: how many; 2 unless given or decided.
        devices: how many all stages share; all of the hardware's unless given or told by `replicas`.
        replicas: devices of each stage, such as (3, 1) or "3:1"; decided with "auto".
        cuts: layers of each stage.
        hardware: a cluster, by name such as "h100", as a TOML file, or as it is; its first devices are used.
            "a100-40gb" unless given.
        memory_limit: bytes or "16GiB" for all devices, or a sequence with one for each; what they have unless given.
        microbatches: how many a batch is split into; 4 unless given or decided.
        schedule: by name, or one with options; replicas are planned for synchronous ones.
        planner: by name; several are compared, "all" of them if that is said. Replicas are planned by "jvpipe",
            "pipedream" or "dapple".
        optimizer: whose state is counted; AdamW unless given.
        model_state: with `has_state`: arrays, or their shapes.
        has_aux: the loss returns something beside.
        has_state: the loss carries a model state.
        stacked: what the optimizer sees of stacked layers, as `jvpipe.Pipeline` takes it.
        frozen: patterns of parameters that nothing updates, likewise.
        title: of the figure.

    Raises:
        ValueError: for what cannot be used, with the values and the cure.
    """
    names, told = planner_names("planner", planner), checked(PLAN_FOR, locals())
    check_functions(loss_fn, optimizer := _usual(optimizer), has_state=told["has_state"])
    pins = {name: told.pop(name) for name in ("stages", "replicas", "cuts", "microbatches")}
    there, limit = told.pop("devices"), told.pop("memory_limit")
    cluster = told.pop("hardware") or find_cluster(USUAL_HARDWARE)
    question_of = partial(
        Question,
        loss_fn=loss_fn,
        params=params,
        batch=batch,
        optimizer=optimizer,
        model_state=model_state,
        **told,
    )
    if there is None and pins["replicas"] is None and pins["cuts"] is None:
        stages, microbatches = pins["stages"] or USUAL_STAGES, pins["microbatches"]
        question = question_of(stages=stages, microbatches=microbatches or USUAL_MICROBATCHES)
        return _straight(question, cluster, limit, names, title)
    whole = question_of(stages=1, microbatches=1)
    check_shape_planner(names, whole.schedule)
    there, given = given_pins(whole, cluster, there, **pins)
    return _shaped(whole, whole.shapes(cluster, there, given, limit)[0], names[0], title)


def _usual(optimizer: Any) -> Any:
    """The optimizer; AdamW unless given."""
    if optimizer is not None:
        return optimizer
    import optax

    return optax.adamw(1e-3)


def _shaped(question: Question, shapes: Shapes, planner: str, title: str) -> Forecast:
    """Asks a planner that decides how many devices each stage has.

    Args:
        question: has the model.
        shapes: those that there are.
        planner: its name.
        title: of a figure.
    """
    start_s = time.perf_counter()
    try:
        planned = ask_shapes(planner, shapes)
    except Infeasible as infeasible:
        refused = Answer(planner, time.perf_counter() - start_s, infeasible=infeasible)
        return Forecast(shapes.model, (refused,), title, question, shapes)
    best = _told(planner, planned, time.perf_counter() - start_s)
    return Forecast(planned.problem, (best,), title, question, shapes)


def _straight(
    question: Question,
    cluster: Cluster,
    limit: int | tuple[int, ...] | None,
    names: Sequence[str],
    title: str,
) -> Forecast:
    """Asks planners about stages of one device each."""
    forecast = asked(question.problem(cluster, limit), names, title, question)
    splits = not any(find_planner(name).as_paper for name in names)
    return with_splits(question, forecast) if splits else forecast


def planner_names(option: str, planner: Any) -> list[str]:
    """The names of planners that there are: of all, of some with commas between, or as a list; an `option` gives them.

    >>> planner_names("planner", "even,dapple")
    ['even', 'dapple']
    """
    given = planner.split(",") if isinstance(planner, str) else several(planner)
    if not given:
        raise ValueError(
            f"{option} must be a name, or several, such as ['even', 'jvpipe'], not {brief(planner)}"
        )
    given = [checked_name(option, name, "jvpipe") for name in given]
    names = [p.name for p in PLANNERS] if given == ["all"] else given
    for name in names:
        find_planner(name)
    return names


def asked(
    problem: Problem, names: Sequence[str], title: str = "", question: Question | None = None
) -> Forecast:
    """Puts a problem to planners.

    Args:
        problem: whose order of tasks may be open; the best answer's then takes its place.
        names: of the planners.
        title: of a figure.
        question: that the problem comes of.

    Raises:
        ValueError: the seconds or bytes of the problem are such that no sums can be made of them.
    """
    check_sums(problem)
    for name in names:
        check_chooser(problem.schedule, name)
    own_first = sorted(names, key=lambda name: find_planner(name).as_paper)  # of equals it is told
    given_by = {name: _answered(problem, name) for name in own_first}
    answers = best_first(problem, [given for _, given in given_by.values()])
    return Forecast(given_by[answers[0].planner][0], tuple(answers), title, question)


def answer(problem: Problem, planner: str) -> Answer:
    """Asks a planner, and looks at the clock."""
    return _answered(problem, planner)[1]


def _answered(problem: Problem, planner: str) -> tuple[Problem, Answer]:
    """A planner's answer, and the problem with the order of tasks that it is an answer to."""
    start_s = time.perf_counter()
    try:
        planned = ask(planner, problem)
    except Infeasible as infeasible:
        return problem, Answer(planner, time.perf_counter() - start_s, infeasible=infeasible)
    return planned.problem, _told(planner, planned, time.perf_counter() - start_s)


def _told(
    planner: str, planned: Planned, planning_s: float, splits: tuple[int, ...] = ()
) -> Answer:
    evaluation = evaluate(planned.problem, planned.decision)
    return Answer(
        planner,
        planning_s,
        planned.decision,
        evaluation,
        splits=splits,
        plan=planned.plan,
        kinds=planned.shapes,
    )


def with_splits(question: Question, whole: Forecast) -> Forecast:
    """Cuts layers in two where that makes the plan faster. Nothing runs: that it keeps the bits is assumed.

    Args:
        question: names the model, which is traced again.
        whole: the answer with whole layers.
    """
    first = whole.answers[0]
    cluster, decision, given = whole.problem.cluster, first.decision, first.plan
    if cluster is None or decision is None or given is None:
        return whole
    planned = Planned(given, whole.problem, decision)
    if not crowded(planned):
        return whole
    start_s = time.perf_counter()
    model = question.trace()

    def cut(traced: Traced) -> OptimizerCut:
        return question.cut(model, traced)

    def plan(traced: Traced) -> CutCandidate:
        optimizer = cut(traced)
        finer = question.problem_of(cluster, whole.problem.limits, traced, optimizer)
        return CutCandidate(traced, optimizer, ask(first.planner, finer))

    begin = CutCandidate(model.traced, cut(model.traced), planned)
    best = Splitter(cluster.device, lambda *_: True).better(begin, plan)
    planning_s = first.planning_s + time.perf_counter() - start_s
    finer = _told(first.planner, best.planned, planning_s, best.traced.splits)
    return replace(whole, problem=best.planned.problem, answers=(finer,))
