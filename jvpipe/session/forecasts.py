"""Plans from shapes only, for hardware that is not here; its compiler can check the plans.

A compiled plan may hold more bytes than the planner counted. The planner is then asked again until
a plan, as compiled, keeps the limits; the compiler is said to sign that plan. Each time, the bytes
that the compiler has reported so far replace estimates of the planner. The planner may still give
the same plan again: the bytes over the limit then have a cause that the reports do not show. In
this case, the limits that the planner sees are lowered by these bytes.
"""

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jvpipe.cost.archive import Archive
from jvpipe.cost.cluster_file import find_cluster
from jvpipe.cost.compiling import Sizes, compiler_of
from jvpipe.cost.hardware import Cluster
from jvpipe.cost.said import Said
from jvpipe.cost.target_store import RefusedProgram, TargetStore
from jvpipe.cost.targets import Target, target_of
from jvpipe.ir.buffers import Peak, peaks
from jvpipe.ir.compiled_stage import CompiledStage
from jvpipe.ir.optimizer import Optimizer
from jvpipe.ir.plan import FATES, Plan
from jvpipe.ir.values import Owner
from jvpipe.papers.registry import PLANNERS, find_planner
from jvpipe.planners.answer import Answer, smallest_limit_bytes
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.pins import Pins
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.stage_bytes import layers_bytes
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.user_fates import with_state_fates
from jvpipe.programs.model import backward_program, forward_program, input_program, weight_program
from jvpipe.programs.store import Program, shared_store
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.schedules import Schedule
from jvpipe.session.arguments import (
    USUAL_MICROBATCHES,
    USUAL_STAGES,
    Limits,
    check_functions,
    checked_name,
)
from jvpipe.session.forecast import Forecast, asked, timed, with_splits
from jvpipe.session.model_planner import (
    ALL_AWAY,
    away_s,
    brought_back,
    pays_for_room,
    room_left,
    state_bytes,
)
from jvpipe.session.options import PLAN_FOR, checked
from jvpipe.session.planning import ASKING, Planned, ask_shapes
from jvpipe.session.question import Question, check_shape_planner, given_pins, limits_on
from jvpipe.util.brief import brief
from jvpipe.util.given import several

Tree = Any
_log = logging.getLogger("jvpipe")
USUAL_HARDWARE = "a100-40gb"


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

    With `compile`, the compiler of that hardware reports the bytes of the plan's programs. It
    compiles each program once and keeps the report in JAX's compilation cache. If the plan takes
    more than the limit, another plan is made.

    With `devices`, `replicas` or `cuts`, a stage may have several devices. The planner then decides
    whichever of stages, replicas, cuts and micro-batches are not given.

    Args:
        loss_fn: as `jvpipe.Pipeline` takes it.
        params: arrays, or their shapes, or a function `key -> params`.
        batch: a whole batch, as arrays or their shapes.
        stages: how many stages; 2, unless it is given or the planner decides.
        devices: how many devices all stages have together; unless given, as many as `replicas`
            take, or else all of the hardware.
        replicas: how many devices each stage has, such as (3, 1) or "3:1"; "auto" leaves it open.
        cuts: how many layers each stage has.
        hardware: a cluster: a name such as "h100", a TOML file, or a `Cluster`. Its first devices
            are used. "a100-40gb" unless given.
        memory_limit: bytes, or a text such as "16GiB", for all devices; or a sequence with a limit
            for each. Unless given, all the memory that the devices have.
        microbatches: how many a batch is split into; 4, unless it is given or the planner decides.
        schedule: the name of a schedule, or one with options; replicas need a synchronous one.
        planner: the name of a planner, or several to compare; "all" compares all planners. Replicas
            are planned by "jvpipe", "pipedream" or "dapple".
        optimizer: the optimizer whose state is counted; AdamW unless given.
        model_state: arrays, or their shapes, if the loss has a model state (`has_state`).
        has_aux: whether the loss returns auxiliary values as well.
        has_state: whether the loss takes and returns a model state.
        stacked: how the optimizer sees stacked layers, as `jvpipe.Pipeline` takes it.
        frozen: patterns of parameters that nothing updates, as `jvpipe.Pipeline` takes them.
        state_fates: where the optimizer's state lies between updates, by patterns of parameters.
            Unless given, a single planner that chooses fates decides it. This planner puts state on
            the host if no other plan fits, or if copying the state takes less time than recomputing
            values to make room for it.
        compile: True for the compiler of the hardware, or the name of a compile target, such as
            "v5e:4x4".
        title: the title of the figure.

    Raises:
        ValueError: an argument cannot be used; the message has its value and the cure.
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
        model: makes the question about the model, given the other fields of a question.
        names: the names of the planners.
        options: the checked options of `plan_for`, by name; some are taken out of the mapping.
        title: the title of the figure.
    """
    pins = {name: options.pop(name) for name in ("stages", "replicas", "cuts", "microbatches")}
    named = ("devices", "memory_limit", "compile", "hardware")
    count, limit, target, hardware = map(options.pop, named)
    cluster = hardware or find_cluster(USUAL_HARDWARE)
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
    found = asking({}, limit) if target is False else asking.signed(limit, target)
    # The answer keeps the question, but not the traces: they hold arrays, such as constants.
    question.remembered.clear()
    return found


@dataclass(frozen=True)
class _Asking:
    """A question with the hardware and the planners, to be asked again when more is known.

    A shape says which devices each stage has. `pins` are the parts of the shape that the
    user gives; the planner chooses the rest. If `pins` is None, each stage has one device.
    """

    question: Question
    cluster: Cluster
    names: Sequence[str]
    devices: int
    pins: Pins | None
    title: str

    def __call__(self, said: Said, limits: Limits) -> Forecast:
        """Returns the planners' answers.

        Args:
            said: the bytes of programs that the hardware's compiler has reported so far.
            limits: the limits of the devices.
        """
        asking = replace(self, question=replace(self.question, said=said))
        kept = asking._answer(limits)
        chooses = [find_planner(name).chooses_fates for name in self.names]
        if self.question.state_fates or chooses != [True]:
            return kept
        if kept.fits:
            assert kept.best.plan is not None
            assert kept.best.decision is not None
            if not pays_for_room(Planned(kept.best.plan, kept.problem, kept.best.decision)):
                return kept
        away = asking._state_away(limits, kept.best.splits)
        return away if not kept.fits or (away.fits and away.step_s < kept.step_s) else kept

    def _answer(self, limits: Limits, splits: tuple[int, ...] = ()) -> Forecast:
        """Returns the answers with layers cut at `splits`; if empty, wherever a cut saves time."""
        question, cluster = self.question, self.cluster
        if self.pins is not None:
            shapes = question.shapes(cluster, self.devices, self.pins, limits)
            (planner, *_) = self.names
            problem, best = timed(planner, shapes.model, partial(ask_shapes, planner, shapes))
            return self._with_state(Forecast(problem, (best,), self.title, question, shapes))
        problem = question.problem(cluster, limits, splits)
        forecast = asked(problem, self.names, self.title, question, splits)
        of_paper = any(find_planner(name).as_paper for name in self.names)
        cuts_layers = not splits and not of_paper
        return self._with_state(with_splits(question, forecast) if cuts_layers else forecast)

    def _state_away(self, limits: Limits, splits: tuple[int, ...]) -> Forecast:
        """Returns the answer with the optimizer's state on the host, except the part that fits.

        Layers are cut at `splits`, which were found with all state on the devices. If `splits` is
        empty, cuts are sought again.
        """
        sizes, cluster = self._state_bytes(), self.cluster
        if cluster.host_memory_bytes is not None:
            # Host memory that the state takes is not available for swapped residuals.
            rest = max(0, cluster.host_memory_bytes - sum(sizes.values()))
            cluster = replace(cluster, host_memory_bytes=rest)
        question = replace(self.question, state_fates=ALL_AWAY)
        away = replace(self, question=question, cluster=cluster)._answer(limits, splits)
        if not away.fits:
            return away
        best = away.best
        assert best.plan is not None
        assert best.evaluation is not None
        problem = away.problem
        held = [best.evaluation.device_bytes[place] for place in problem.places]
        # A plan may leave devices out, so limits are found by the devices' numbers.
        each = zip(problem.places, best.plan.stages, strict=True)
        limit_of = {d: problem.limit_of(p) or 0 for p, stage in each for d in stage.devices}
        # With all state on the host, a device holds `held` bytes. State that fits into the rest of
        # its limit comes back.
        room = room_left(best.plan, held, limit_of)
        nearer = replace(best, plan=brought_back(best.plan, sizes, room))
        return self._with_seconds(replace(away, answers=(nearer, *away.answers[1:])))

    def _with_state(self, forecast: Forecast) -> Forecast:
        """Adds the fates of the optimizer's state to the plans, and the seconds of its copies."""
        fates, best = self.question.state_fates, forecast.best
        if not fates or best.plan is None:
            return forecast
        # All answers are to one problem, so they cut layers at the same places.
        graph = self.question.trace_as(best.splits).traced.graph
        answers = (
            replace(answer, plan=answer.plan and with_state_fates(graph, answer.plan, fates))
            for answer in forecast.answers
        )
        return self._with_seconds(replace(forecast, answers=tuple(answers)))

    def _with_seconds(self, forecast: Forecast) -> Forecast:
        """Adds the seconds in which the best plan copies optimizer state to the host and back."""
        best = forecast.best.plan
        assert best is not None
        return replace(forecast, state_s=away_s(best, self._state_bytes(), forecast.problem))

    def _state_bytes(self) -> dict[str, int]:
        model = self.question.trace()
        return state_bytes(model.traced.graph, self.question.cut(model))

    def signed(self, limit: Limits, target: Target | bool) -> Forecast:
        """Returns the first plan that keeps the limits as the hardware's compiler compiles it.

        If no plan keeps the limits, the answer says which limit a plan would keep.

        Args:
            limit: the memory limit as the user gave it.
            target: the compile target; True: that of the hardware.
        """
        if len(self.names) > 1:
            names = ", ".join(self.names)
            raise ValueError(f"compile is for one planner, not for {names}: name one")
        signer = Signer.of(self.cluster, None if isinstance(target, bool) else target)
        limits = limits_on(self.cluster, limit, self.devices)
        forecast, more = self._search(signer, limits, 0)
        if forecast is not None:
            return forecast
        # The loop ends because the limits grow without bound, while a plan's compiled bytes do not.
        while (would_do := self._search(signer, limits, more)[0]) is None:
            more += max(1, more // 16)
        (answer,), raised = would_do.answers, would_do.problem
        assert raised.memory_limit_bytes is not None
        smallest, compiler = raised.memory_limit_bytes, signer.stores[0].compiler.target.name
        reason = (
            f"no plan of {answer.planner} keeps the limit of {smallest - more:,} bytes per device as the compiler "
            f"for {compiler} makes it: {smallest:,} bytes would do. So may more stages or more micro-batches"
        )
        infeasible = Infeasible(reason, 0, more, smallest)
        refused = Answer(answer.planner, answer.planning_s, infeasible=infeasible)
        problem = replace(raised, memory_limit_bytes=smallest - more)
        return replace(would_do, problem=problem, answers=(refused,))

    def _search(
        self, signer: "Signer", limits: tuple[int, ...], more: int
    ) -> tuple[Forecast | None, int]:
        """Asks for plans until one, as compiled, keeps the limits raised by `more` bytes.

        Returns:
            The answers and `more`; or None, and the smallest raise under which a plan is
            expected to fit.
        """
        less, nearest, before = 0, math.inf, None
        for _ in range(ASKING.signings):
            forecast = self(signer.said, tuple(max(1, size + more - less) for size in limits))
            limit = forecast.problem.memory_limit_bytes
            assert limit is not None
            if not forecast.fits:
                needed = more + smallest_limit_bytes(forecast.answers) - limit
                return None, int(min(nearest, needed))
            problem = replace(forecast.problem, memory_limit_bytes=limit + less)
            question = replace(
                forecast.question or self.question, microbatches=forecast.microbatches
            )
            stages = signer.stages(question, forecast.problem, forecast.best)
            allowed = [problem.limit_of(place) or 0 for place in problem.places]
            over = max(x.compiled_bytes - size for x, size in zip(stages, allowed, strict=True))
            if over <= 0:
                compiled = replace(forecast.best, compiled=tuple(stages))
                return replace(forecast, problem=problem, answers=(compiled,)), more
            _log.info("compiled, the plan is %d bytes over the limit: planning goes on", over)
            nearest = min(nearest, more + over)
            # If the same plan comes again, the reported bytes of programs do not explain its
            # excess, so only lower limits lead to another plan.
            less, before = less + (over if forecast.plan == before else 0), forecast.plan
        return None, int(nearest)


def planner_names(option: str, planner: Any) -> list[str]:
    """Returns names of planners, given as "all", as a text with commas, or as a list.

    `option` is the option's name, for the message.

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


# Plans that keep the limits as the compiler of the hardware compiles them.


@dataclass(frozen=True)
class Signer:
    """The compilers of a cluster's devices, with the bytes of programs that they have reported."""

    cluster: Cluster
    stores: tuple[TargetStore, ...]  # one for each device

    @staticmethod
    def of(cluster: Cluster, target: Target | None = None) -> "Signer":
        """Returns the compilers for the devices of a cluster.

        Args:
            cluster: the hardware.
            target: the compile target of all devices; None: that of each device's name.

        Raises:
            ValueError: no compile target is known for a device, or its compiler is not installed.
        """
        targets = [target or target_of(device) for device in cluster.accelerators]
        folder, stores = Archive.beside_the_cache().folder, dict[Target, TargetStore]()
        for one in targets:
            one.check()
            stores.setdefault(one, TargetStore(compiler_of(one, folder), shared_store()))
        return Signer(cluster, tuple(stores[one] for one in targets))

    @property
    def said(self) -> Said:
        """For each program, the report of the compiler that counts the most temporary bytes."""
        largest: dict[Hashable, Sizes] = {}
        for store in dict.fromkeys(self.stores):
            for key, sizes in store.sizes.items():
                largest[key] = max(largest.get(key, sizes), sizes, key=lambda x: x.temporary)
        return largest

    def stages(self, question: Question, problem: Problem, answer: Answer) -> list[CompiledStage]:
        """Returns the bytes of each stage of a plan, as planned and as compiled.

        Args:
            question: has the model.
            problem: the problem to which the plan is an answer.
            answer: has the plan.

        Raises:
            ValueError: the compiler refuses a program, or the plan swaps to the host and the
                compile target has no host memory.
        """
        plan, decision = answer.plan, answer.decision
        assert plan is not None
        assert decision is not None
        plan = replace(plan, splits=answer.splits)
        by_store = {
            store: _laid_peaks(self._compiled(question, plan, store))
            for store in dict.fromkeys(self.stores)
        }
        evaluation = evaluate_decision(self._unsaid(question, problem, answer), decision)
        stages = list[CompiledStage]()
        for s, stage in enumerate(plan.stages):
            first, last = decision.bounds[s : s + 2]
            # Replicas hold the same values, but each may have its own compiler and so other bytes.
            fullest = max(stage.devices, key=lambda d: by_store[self.stores[d]][d][0].bytes)
            peak, padding, host = by_store[self.stores[fullest]][fullest]
            layers = problem.layers_on(s)[first:last]
            working = [x.working for x in layers_bytes(layers, decision.choices[first:last])]
            # Temporaries at the peak are those of the layer whose row (program or copy) runs then.
            at = peak.row.layer - first if peak.row else -1
            place = problem.schedule.device_of(s, problem.devices)
            stages.append(
                CompiledStage(
                    self.stores[fullest].compiler.target.name,
                    evaluation.device_bytes[place],
                    peak.bytes,
                    str(peak.row) if peak.row else "the beginning",
                    dict(peak.holders).get(str(Owner.TEMPORARY), 0),
                    working[at] if 0 <= at < len(working) else 0,
                    padding,
                    host,
                )
            )
        return stages

    def _unsaid(self, question: Question, problem: Problem, answer: Answer) -> Problem:
        """Returns the problem with estimates in place of the compilers' reports.

        The problem of a pipeline with replicas is returned as it is.
        """
        if not question.said or problem.replicated:
            return problem
        model, guessing = question.trace_as(answer.splits), replace(question, said={})
        costs = guessing.costs(self.cluster, model.traced, question.cut(model))
        return replace(problem, costs=costs)

    def _compiled(self, question: Question, plan: Plan, store: TargetStore) -> CompiledPlan:
        target = store.compiler.target
        away = [name for stage in plan.stages for name, f in stage.fates.items() if FATES[f].away]
        if away and not target.host_memory:
            raise ValueError(
                f"the plan swaps {away[0]} to the host, and {target.name} has no memory there: "
                "give host_memory_bytes = 0 in the cluster's file"
            )
        run = question.compiled(plan, store)
        try:
            run.bounds  # noqa: B018 - reading the property compiles the programs
        except RefusedProgram as refused:
            raise ValueError(f"{_name_of(run, refused.program)}: {refused}") from None
        return run


def _laid_peaks(run: CompiledPlan) -> list[tuple[Peak, int, int]]:
    """Returns each device's peak, its bytes of padding, and the host's bytes for all devices.

    Padding is what arrays take in memory beyond their elements.
    """
    elements = [
        [x.bytes for x in peaks(bound.lowered, len(run.devices), bound.temporary_bytes)]
        for bound in run.bounds
    ]
    *laid, host = run.peaks
    least = map(max, zip(*elements, strict=True))
    return [
        (peak, max(0, peak.bytes - size), host.bytes)
        for peak, size in zip(laid, least, strict=False)
    ]


def _name_of(run: CompiledPlan, program: Program) -> str:
    """Returns the name of the layer, or of the optimizer, to which a program belongs."""
    for programs in run.programs:
        for layer, layer_programs in zip(run.traced.graph.layers, programs, strict=True):
            keys = [forward_program(layer_programs).key, backward_program(layer_programs).key]
            if layer_programs.halves is not None:
                keys += [input_program(layer_programs).key, weight_program(layer_programs).key]
            if program.key in keys:
                return f"layer {layer.id} ({layer.name})"
    return "the optimizer"
