"""What a pipeline runs: its loss, traced at the shapes of each batch it meets, under one plan."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import optax

from jvpipe._jax import Device
from jvpipe.cost.archive import Archive
from jvpipe.cost.measure import Runs
from jvpipe.cost.presets import accelerator_of
from jvpipe.ir.plan import Plan
from jvpipe.planners.user_fates import checkpointed, with_fates
from jvpipe.programs.bit_equality import same_bits, same_update
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.compiled_plan import Build
from jvpipe.runtime.state import Leaf, Name, Placing, piece_program
from jvpipe.schedules import Schedule, find_schedule
from jvpipe.session.arguments import batch_shapes, cut_for, micro_batch_shapes
from jvpipe.session.planning import Planned, Request, decide, measure
from jvpipe.session.splitting import Candidate, Splitter
from jvpipe.trace.graph import Traced
from jvpipe.trace.layer_split import split_at
from jvpipe.trace.leaves import abstract, path_name
from jvpipe.trace.model import trace_model
from jvpipe.trace.stacks import Stacks

Tree = Any
LeavesOf = Callable[[Stacks], Sequence[Leaf]]
_log = logging.getLogger("jvpipe")


@dataclass(frozen=True)
class Settings:
    """What the user asked of a pipeline, checked; `places[s]` is the device of stage s, as an index."""

    loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    stages: int | Plan
    microbatches: int
    schedule: Schedule
    planner: str
    memory_limit_bytes: int | None
    host_limit_bytes: int | None
    fates: Mapping[str, str]
    checkpoint: str | None
    devices: tuple[Device, ...]
    places: tuple[int, ...]
    has_aux: bool
    has_state: bool
    grad_norm: bool
    remeasure: bool = False


def _shown(batch: Tree) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(abstract(batch, "batch leaf"))
    return ", ".join(f"{path_name(path)} {leaf.dtype}{list(leaf.shape)}".strip() for path, leaf in leaves)


class Builds:
    """The builds of a pipeline by the shapes of their batch; the first to be traced decides the plan of all.

    Where these follow a `present` model, layers are timed in the room that it leaves under the limit.
    """

    def __init__(self, settings: Settings, store: ProgramStore, present: "Builds | None" = None) -> None:
        self.settings, self._store = settings, store
        self._follows = present is not None  # which waits meanwhile: finer layers are not tried
        self.runs: Runs = {} if present is None else present.runs
        self._room_bytes = limit = settings.memory_limit_bytes
        if present is not None and limit is not None:
            self._room_bytes = limit - present.first.peaks[0].bytes
        self._known: dict[Any, Build] = {}
        self._warm: dict[Any, Build] = {}
        self._leaves_of: LeavesOf | None = None
        self._leaves: dict[Name, Leaf] = {}
        self._archive = Archive.beside_the_cache(anew=settings.remeasure, busy=self._follows)
        self._seen: list[Build] = []  # while it is planned
        self.planned: Planned | None = None
        self.token = object()  # the states of one model have the same

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def layer_s(self) -> list[float] | None:
        """Seconds of each layer on a micro-batch, if they were measured."""
        return self.planned.layer_s if self.planned else None

    def __iter__(self) -> Any:
        return iter(self._known.values())

    @property
    def first(self) -> Build:
        """What everybody asks who has no batch at hand."""
        if not self._known:
            raise ValueError("this pipeline has no model yet: call init or restore first")
        return next(iter(self._known.values()))

    def of(self, batch: Tree) -> Build:
        """What runs a batch; a shape that is new is traced and compiled for."""
        self.first  # noqa: B018 - there must be one
        key = batch_shapes(batch)
        if key not in self._known:
            micro_batch_shapes(batch, self.settings.microbatches)
            _log.warning("the shapes of the batch changed: tracing and compiling for them")
            params, rng, model_state = self.inputs
            try:
                self.trace(params, batch, rng, model_state)
            except Exception as error:
                raise ValueError(
                    f"the loss does not take a batch of {_shown(batch)}, init's was of {_shown(self.batch)}: "
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                ) from error
        return self._known[key]

    def warm(self, batch: Tree) -> Build:
        """What runs a batch in the synchronous steps before an asynchronous stream."""
        return self._warm[batch_shapes(batch)]

    def begun(
        self, params: Tree, batch: Tree, rng: jax.Array | None, model_state: Tree, leaves_of: LeavesOf
    ) -> "Builds":
        """The builds of a run that begins with these; another model than the present one is planned anew.

        Args:
            params: arrays or shapes, as all that follows.
            batch: a whole one.
            rng: the key of the run.
            model_state: with `has_state`.
            leaves_of: puts or makes the parameters, given how they are split into layers.
        """
        begun = Builds(self.settings, self._store)
        begun.runs, begun._leaves_of = self.runs, leaves_of
        begun.trace(params, batch, rng, model_state, before=self if self else None)
        return begun

    def taken_leaves(self) -> dict[Name, Leaf]:
        """The parameters that the run begins with, by name; given once, for they may be large."""
        leaves, self._leaves = self._leaves, {}
        return leaves

    def trace(
        self, params: Tree, batch: Tree, rng: jax.Array | None, model_state: Tree, before: "Builds | None" = None
    ) -> Build:
        """Traces at the shapes of a batch; the first time this also plans.

        Args:
            params: arrays or shapes, as all that follows.
            batch: a whole one.
            rng: the key of the run.
            model_state: with `has_state`.
            before: the builds of another run; if its model has the same layers, its plan holds.
        """
        settings = self.settings
        micro = micro_batch_shapes(batch, settings.microbatches)
        params, model_state = abstract(params), abstract(model_state, "leaf of the model state")
        first = self.first if self._known else None
        cuts, splits = (first.traced.cuts, first.traced.splits) if first else (None, ())
        options = {"has_aux": settings.has_aux, "has_state": settings.has_state}
        model = trace_model(settings.loss_fn, params, micro, rng, model_state, cuts, splits, **options)
        self.stacks, traced = model.stacks, model.traced
        if self._leaves_of:
            self._leaves = {("parameter", i): leaf for i, leaf in enumerate(self._leaves_of(self.stacks))}
            self._leaves_of = None
        self.inputs = (params, rng, model_state)
        if first is None:
            self.batch = abstract(batch, "batch leaf")
            if before and (again := before._again(traced, params)):
                first, traced = before.first, again
                self.planned, self.token = before.planned, before.token

        def cut(traced: Traced, schedule: Schedule = settings.schedule) -> OptimizerCut:
            shapes, count = model.params, settings.microbatches
            return cut_for(settings.optimizer, traced.graph, shapes, count, schedule, grad_norm=settings.grad_norm)

        build = self._build(traced, first.plan, first.optimizer) if first else self._planned_build(traced, cut)
        if settings.schedule.warmup_updates:
            plain = find_schedule("1f1b")
            self._warm[batch_shapes(batch)] = replace(build, schedule=plain, optimizer=cut(build.traced, plain))
        self._known[batch_shapes(batch)] = build
        return build

    def _again(self, traced: Traced, params: Tree) -> Traced | None:
        """A model with the splits of the present one, if it has the same layers and the same tree of parameters."""
        present = self.first.traced
        if traced.cuts != present.cuts or jax.tree.structure(params) != jax.tree.structure(self.inputs[0]):
            return None
        split = split_at(traced, present.splits)
        return split if split.graph == present.graph else None

    def under(self, plan: Plan, base: Build | None = None) -> Build:
        """The first build, or that of a `base`, under another plan."""
        base = base or self.first
        plan = plan.under(self.settings.schedule.name)
        return self._build(base.traced, plan, base.optimizer)

    def along(self, legs: Sequence[Sequence[Any]]) -> Build:
        """The build of a stream that came to this plan through others: (micro-batch, plan as JSON)."""
        found = self.first
        for n, (start, plan) in enumerate(legs[:-1]):
            found = replace(self.under(Plan.from_json(plan)), origin=(found, start) if n else None)
        return replace(self.first, origin=(found, legs[-1][0])) if len(legs) > 1 else found

    def switch(self, build: Build) -> None:
        """From here on everything runs under the plan of `build`, which takes the place of the first."""
        (first, _), *others = self._known.items()
        self._known = {first: build, **{key: self.under(build.plan, other) for key, other in others}}
        self._warm = {key: replace(warm, plan=build.plan) for key, warm in self._warm.items()}

    def metrics(self, build: Build, values: Sequence[jax.Array]) -> dict[str, Any]:
        """The metrics of a step by name, from what it yielded."""
        groups = len(build.traced.graph.aux_groups)
        metrics: dict[str, Any] = {"loss": values[0]}
        if self.settings.has_aux:
            metrics["aux"] = jax.tree.unflatten(build.traced.loss.aux_tree, values[1 : 1 + groups])
        if len(values) > 1 + groups:
            metrics["grad_norm"] = values[1 + groups]
        return metrics

    def compile_everywhere(self) -> None:
        """Compiles all that training needs on every device, so that any layer can run on any; nothing runs."""
        every = [self.first, *self._warm.values()]
        for build in every:
            build.peaks  # noqa: B018 - what is asked for is compiled, where the plan has it
        programs = [piece_program(piece) for piece in self.first.optimizer.init]
        programs += [program for build in every for program in build.executables.values()]
        self._store.compile([(program, device) for program in programs for device in self.settings.devices])

    def _build(self, traced: Traced, plan: Plan, optimizer: OptimizerCut) -> Build:
        settings = self.settings
        if plan.splits and plan.splits != traced.splits:
            raise ValueError(
                f"the plan splits layers before equations {list(plan.splits)}, this pipeline's are split before "
                f"{list(traced.splits)}: a plan with other layers needs a new pipeline, Pipeline(stages=plan)"
            )
        plan = replace(plan, splits=traced.splits)
        plan.check(len(traced.graph.layers), len(settings.devices))
        return Build(traced, plan, settings.schedule, optimizer, settings.microbatches, settings.devices, self._store)

    def _planned_build(self, traced: Traced, cut: Callable[[Traced], OptimizerCut]) -> Build:
        """Plans, unless the plan is given, and makes the plan ready to run."""
        settings = self.settings
        if isinstance(settings.stages, Plan):
            plan = settings.stages.under(settings.schedule.name)
            traced = split_at(traced, plan.splits)
            return self._build(traced, self._by_hand(traced, plan), cut(traced))
        chooses = settings.planner == "jvpipe"  # other planners are to do as their papers say
        splitter = self._splitter(cut)
        traced = splitter.finest(traced, settings.stages) if chooses else traced
        layers = len(traced.graph.layers)
        if settings.stages > layers:
            raise ValueError(
                f"{settings.stages} stages need as many layers, the model has {layers}: use at most {layers} stages"
            )
        found = self._planned(cut, traced)
        if chooses and not self._follows:
            found = splitter.better(found, partial(self._planned, cut))
        self.planned, build = found.planned, self._looked_at(found.traced, found.planned.plan, found.optimizer)
        self._seen.clear()
        return build

    def _planned(self, cut: Callable[[Traced], OptimizerCut], traced: Traced) -> Candidate:
        """The planner's plan for a model cut into these layers."""
        settings, optimizer = self.settings, cut(traced)
        assert isinstance(settings.stages, int)
        request = Request(
            settings.planner,
            settings.stages,
            settings.schedule.name,
            settings.microbatches,
            settings.places,
            settings.memory_limit_bytes,
            settings.host_limit_bytes,
        )
        given = self._store, settings.devices, self.runs, self._room_bytes, self._archive
        problem = measure(request, traced, optimizer, *given)

        def held_bytes_of(plan: Plan) -> list[int]:
            build = self._looked_at(traced, plan, optimizer)
            placing = Placing(traced.graph, optimizer, build.persistent, settings.devices)
            both = zip(build.peaks, placing.peaks(self._leaves), strict=True)
            most = [max(step.bytes, making.bytes) for step, making in both]
            return [most[stage.devices[0]] for stage in plan.stages]

        return Candidate(traced, optimizer, decide(request, problem, held_bytes_of))

    def _looked_at(self, traced: Traced, plan: Plan, optimizer: OptimizerCut) -> Build:
        """The build of a planner's plan, the same that was looked at before if there was one: what is checked, runs."""
        plan = replace(self._by_hand(traced, plan), splits=traced.splits)
        build = next((x for x in self._seen if x.traced is traced and x.plan == plan), None)
        if build is None:
            build = self._build(traced, plan, optimizer)
            self._seen.append(build)
        return build

    def _splitter(self, cut: Callable[[Traced], OptimizerCut]) -> Splitter:
        device, store = self.settings.devices[0], self._store

        def agree(whole: Traced, layer: int, halves: Traced) -> bool:
            return same_bits(store, device, whole, layer, halves) and same_update(
                store, device, cut(whole), layer, cut(halves)
            )

        return Splitter(accelerator_of(device), agree)

    def _by_hand(self, traced: Traced, plan: Plan) -> Plan:
        """A plan with the fates that the user gave."""
        if self.settings.checkpoint is not None:
            plan = checkpointed(traced.graph, plan, self.settings.checkpoint)
        return with_fates(traced.graph, plan, self.settings.fates)
