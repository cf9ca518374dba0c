"""Plans for hardware that is not here, from shapes alone: planners are asked, and the hardware's compiler."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.hardware import Cluster
from jvpipe.cost.said import Said
from jvpipe.cost.targets import Target
from jvpipe.ir.optimizer import Optimizer
from jvpipe.papers.registry import PLANNERS, find_planner
from jvpipe.planners.answer import Answer, best_first
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.pins import Pins
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_cost import evaluate
from jvpipe.schedules import Schedule
from jvpipe.session.arguments import (
    USUAL_MICROBATCHES,
    USUAL_STAGES,
    check_chooser,
    check_functions,
    checked_name,
)
from jvpipe.session.asking import Planned, ask, ask_shapes
from jvpipe.session.forecast import Forecast
from jvpipe.session.model_planner import (
    ALL_AWAY,
    away_s,
    brought_back,
    pays_for_room,
    state_bytes,
)
from jvpipe.session.options import PLAN_FOR, checked
from jvpipe.session.question import Question, check_shape_planner, check_sums, given_pins
from jvpipe.session.signing import Signer, signed
from jvpipe.session.splitting import CutCandidate, Splitter, uneven
from jvpipe.trace.graph import Traced
from jvpipe.trace.layer_split import split_as_planned
from jvpipe.util.brief import brief
from jvpipe.util.given import several
from jvpipe.util.sizes import limits_of_each

Tree = Any
USUAL_HARDWARE = "a100-40gb"
Limits = int | tuple[int, ...] | None
"""One limit for all devices, or one for each; None: what they have."""


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
    state_fates: Mapping[str, str] | None = None,
    compile: bool | str = False,
    title: str = "",
) -> Forecast:
    """Plans a model from its shapes, for hardware that is not here; nothing is allocated or run.

    With `compile` the compiler of that hardware says what the programs of the plan take, each once: another plan is
    made where one takes more than the limit. What it said is kept in JAX's compilation cache.

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
        planner: by name; several are compared, all of them with "all". Replicas are planned by "jvpipe",
            "pipedream" or "dapple".
        optimizer: whose state is counted; AdamW unless given.
        model_state: with `has_state`: arrays, or their shapes.
        has_aux: the loss returns something beside.
        has_state: the loss carries a model state.
        stacked: what the optimizer sees of stacked layers, as `jvpipe.Pipeline` takes it.
        frozen: patterns of parameters that nothing updates, as `jvpipe.Pipeline` takes them.
        state_fates: where the optimizer's state of parameters lies between updates. Unless given, one
            planner that chooses fates decides: on the host where else nothing fits, or where its way there takes less
            than what is computed again to make room for it.
        compile: for the devices of the hardware; or the name of a compile target, such as "v5e:4x4".
        title: of the figure.

    Raises:
        ValueError: for what cannot be used, with the values and the cure.
    """
    names, options = planner_names("planner", planner), checked(PLAN_FOR, locals())
    if optimizer is None:
        import optax

        optimizer = optax.adamw(1e-3)
    check_functions(loss_fn, optimizer, has_state=options["has_state"])
    model = partial(Question, loss_fn=loss_fn, params=params, batch=batch, optimizer=optimizer)
    return _planned(partial(model, model_state=model_state), names, options, title)


def _planned(
    model: Callable[..., Question], names: Sequence[str], options: dict[str, Any], title: str
) -> Forecast:
    """Asks planners about a model.

    Args:
        model: makes the question of it, of what else that has.
        names: of the planners.
        options: what the options of `plan_for` mean, by name.
        title: of the figure.
    """
    pins = {name: options.pop(name) for name in ("stages", "replicas", "cuts", "microbatches")}
    count, limit, target = (
        options.pop("devices"),
        options.pop("memory_limit"),
        options.pop("compile"),
    )
    cluster = options.pop("hardware") or find_cluster(USUAL_HARDWARE)
    options["state_fates"] = options["state_fates"] or {}
    pinned = None
    # Stages of one device each, unless an option asks for several.
    if count is None and pins["replicas"] is None and pins["cuts"] is None:
        count = pins["stages"] or USUAL_STAGES
        microbatches = pins["microbatches"] or USUAL_MICROBATCHES
        question = model(stages=count, microbatches=microbatches, **options)
    else:
        question = model(stages=1, microbatches=1, **options)
        check_shape_planner(names, question.schedule)
        count, pinned = given_pins(question, cluster, count, **pins)
    asking = _Asking(question, cluster, names, count, pinned, title)
    return asking({}, limit) if target is False else asking.signed(limit, target)


@dataclass(frozen=True)
class _Asking:
    """Asks planners about a model, as often as more is known; with `pins` about shapes over the devices, too."""

    question: Question
    cluster: Cluster
    names: Sequence[str]
    devices: int
    pins: Pins | None
    title: str

    def __call__(self, said: Said, limits: Limits) -> Forecast:
        """Returns what they answer.

        Args:
            said: what the hardware's compiler has said.
            limits: of the devices.
        """
        asking = replace(self, question=replace(self.question, said=said))
        kept = asking._answer(limits)
        if not self._chooses_state(kept):
            return kept
        away = asking._state_away(limits)
        if not kept.fits or (away.fits and away.step_s < kept.step_s):
            return away
        return kept

    def _answer(self, limits: Limits) -> Forecast:
        """Returns the answer with the optimizer's state where the question says."""
        question, cluster = self.question, self.cluster
        if self.pins is not None:
            shapes, _ = question.shapes(cluster, self.devices, self.pins, limits)
            (planner, *_) = self.names
            problem, best = _timed(planner, shapes.model, partial(ask_shapes, planner, shapes))
            return _with_state(Forecast(problem, (best,), self.title, question, shapes))
        problem = question.problem(cluster, limits)
        forecast = asked(problem, self.names, self.title, question)
        cuts_layers = not any(find_planner(name).as_paper for name in self.names)
        return _with_state(with_splits(question, forecast) if cuts_layers else forecast)

    def _chooses_state(self, kept: Forecast) -> bool:
        """Tells whether the optimizer's state may go to the host, and whether that may bring something.

        Args:
            kept: the answer with all of it on the devices.
        """
        chooses = [find_planner(name).chooses_fates for name in self.names]
        if self.question.state_fates or chooses != [True]:
            return False
        best = kept.answers[0]
        if best.decision is None or best.plan is None:
            return True
        return not kept.fits or pays_for_room(Planned(best.plan, kept.problem, best.decision))

    def _state_away(self, limits: Limits) -> Forecast:
        """Returns the answer with the state on the host, except what the devices then have room for."""
        question, cluster = replace(self.question, state_fates=ALL_AWAY), self.cluster
        model = question.trace()
        sizes = state_bytes(model.traced.graph, question.cut(model, model.traced))
        if cluster.host_memory_bytes is not None:
            rest = max(0, cluster.host_memory_bytes - sum(sizes.values()))
            cluster = replace(cluster, host_memory_bytes=rest)
        away = replace(self, question=question, cluster=cluster)._answer(limits)
        if not away.fits:
            return away
        best = away.answers[0]
        assert best.plan is not None
        assert best.evaluation is not None
        problem, schedule = away.problem, away.problem.schedule
        places = [schedule.device_of(s, problem.devices) for s in range(problem.stages)]
        room = {
            device: (problem.limit_of(place) or 0) - best.evaluation.device_bytes[place]
            for stage, place in zip(best.plan.stages, places, strict=True)
            for device in stage.devices
        }
        nearer = replace(best, plan=brought_back(best.plan, sizes, room))
        return _with_seconds(replace(away, answers=(nearer, *away.answers[1:])))

    def signed(self, limit: Limits, target: Target | bool) -> Forecast:
        """Returns the plan that the compiler of the hardware signs.

        Args:
            limit: as it was given.
            target: another one than the hardware; True: that.
        """
        if len(self.names) > 1:
            names = ", ".join(self.names)
            raise ValueError(f"compile is for one planner, not for {names}: name one")
        signer = Signer.of(self.cluster, None if isinstance(target, bool) else target)
        used = self.cluster.accelerators[: self.devices]
        limits = limits_of_each(limit, self.devices) or tuple(x.memory_bytes for x in used)
        # The model is the same each time, so what was traced is remembered.
        again = replace(self, question=replace(self.question, models={}))
        return signed(
            lambda said, more: again(said, tuple(max(1, x + more) for x in limits)), signer
        )


def _with_state(forecast: Forecast) -> Forecast:
    """Puts into the plans where the optimizer's state lies; with the seconds of its way to the host and back."""
    question, cluster, best = forecast.question, forecast.problem.cluster, forecast.answers[0].plan
    if question is None or not question.state_fates or best is None or cluster is None:
        return forecast
    model = question.trace()

    def placed(answer: Answer) -> Answer:
        if answer.plan is None:
            return answer
        traced = split_as_planned(model.traced, answer.splits)
        return replace(answer, plan=question.with_state_fates(traced, answer.plan))

    return _with_seconds(replace(forecast, answers=tuple(map(placed, forecast.answers))))


def _with_seconds(forecast: Forecast) -> Forecast:
    """Counts the seconds that the optimizer's state of the best plan is on its way to the host and back."""
    question, cluster, best = forecast.question, forecast.problem.cluster, forecast.answers[0].plan
    assert question is not None
    assert cluster is not None
    assert best is not None
    model = question.trace()
    sizes = state_bytes(model.traced.graph, question.cut(model, model.traced))
    # Without a flush each micro-batch is an update.
    updates = 1 if question.schedule.synchronous else forecast.problem.microbatches
    return replace(forecast, state_s=updates * away_s(best, sizes, cluster.host))


def planner_names(option: str, planner: Any) -> list[str]:
    """Reads names of planners: all of them, some with commas between, or a list; an `option` gives them.

    >>> planner_names("planner", "even,dapple")
    ['even', 'dapple']
    """
    names = planner.split(",") if isinstance(planner, str) else several(planner)
    if not names:
        raise ValueError(
            f"{option} must be a name, or several, such as ['even', 'jvpipe'], not {brief(planner)}"
        )
    names = [checked_name(option, name, "jvpipe") for name in names]
    chosen = [p.name for p in PLANNERS] if names == ["all"] else names
    for name in chosen:
        find_planner(name)
    return chosen


def asked(
    problem: Problem, names: Sequence[str], title: str = "", question: Question | None = None
) -> Forecast:
    """Puts a problem to planners.

    Args:
        problem: whose order of tasks may be open; the best answer's then takes its place.
        names: of the planners.
        title: of a figure.
        question: from which the problem was made.

    Raises:
        ValueError: the seconds or bytes of the problem are such that no sums can be made of them.
    """
    check_sums(problem)
    for name in names:
        check_chooser(problem.schedule, name)
    own_first = sorted(names, key=lambda name: find_planner(name).as_paper)  # of equals it is told
    by_planner = {name: _timed(name, problem, partial(ask, name, problem)) for name in own_first}
    answers = best_first(problem, [answer for _, answer in by_planner.values()])
    return Forecast(by_planner[answers[0].planner][0], tuple(answers), title, question)


def _timed(planner: str, problem: Problem, put: Callable[[], Planned]) -> tuple[Problem, Answer]:
    """Asks a planner, and looks at the clock.

    Args:
        planner: its name.
        problem: what it is asked.
        put: asks it.

    Returns:
        The problem with the order of tasks that the answer is for, and the answer.
    """
    start_s = time.perf_counter()
    try:
        planned = put()
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
    """Cuts layers in two where that makes the plan faster; results are assumed to stay bitwise identical.

    Args:
        question: names the model, which is traced again.
        whole: the answer with whole layers.
    """
    first = whole.answers[0]
    cluster, decision, plan_of_whole = whole.problem.cluster, first.decision, first.plan
    if cluster is None or decision is None or plan_of_whole is None:
        return whole
    planned = Planned(plan_of_whole, whole.problem, decision)
    if not uneven(planned):
        return whole
    start_s = time.perf_counter()
    model = question.trace()

    def plan(traced: Traced) -> CutCandidate:
        optimizer = question.cut(model, traced)
        finer = question.problem_of(cluster, whole.problem.limits, traced, optimizer)
        return CutCandidate(traced, ask(first.planner, finer))

    begin = CutCandidate(model.traced, planned)
    best = Splitter(cluster.device, lambda *_: True).better(begin, plan)
    planning_s = first.planning_s + time.perf_counter() - start_s
    finer = _told(first.planner, best.planned, planning_s, best.traced.splits)
    return replace(whole, problem=best.planned.problem, answers=(finer,))
