"""What a pipeline runs: its loss, traced at the shapes of each batch it meets, under one plan."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import optax

from jvpipe._jax import Device
from jvpipe.arguments import batch_shapes, cut_for, micro_batch_shapes
from jvpipe.cost.measure import Runs
from jvpipe.cost.presets import accelerator_of
from jvpipe.ir.buffers import HOST
from jvpipe.ir.plan import Plan
from jvpipe.planners.by_hand import checkpointed, with_fates
from jvpipe.planning import Planned, Request, decide, measure
from jvpipe.programs.agreement import same_bits, same_update
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.build import Build
from jvpipe.runtime.state import piece_program
from jvpipe.schedules import Schedule, find_schedule
from jvpipe.splitting import Candidate, Splitter
from jvpipe.trace.graph import Traced
from jvpipe.trace.halves import split_at
from jvpipe.trace.loss import abstract
from jvpipe.trace.model import trace_model

Tree = Any
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
        self.planned: Planned | None = None

    def __bool__(self) -> bool:
        return bool(self._known)

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
            _log.warning("the shapes of the batch changed: tracing and compiling for them")
            params, rng, model_state = self.inputs
            self.trace(params, batch, rng, model_state)
        return self._known[key]

    def warm(self, batch: Tree) -> Build:
        """What runs a batch in the synchronous steps before an asynchronous stream."""
        return self._warm[batch_shapes(batch)]

    def trace(self, params: Tree, batch: Tree, rng: jax.Array | None, model_state: Tree) -> Build:
        """Traces at the shapes of a batch; the first time this also plans."""
        settings = self.settings
        micro = micro_batch_shapes(batch, settings.microbatches)
        self.inputs = (abstract(params), rng, abstract(model_state))
        first = self.first if self._known else None
        if first is None:
            self.batch = abstract(batch)
        cuts, splits = (first.traced.cuts, first.traced.splits) if first else (None, ())
        options = {"has_aux": settings.has_aux, "has_state": settings.has_state}
        model = trace_model(settings.loss_fn, params, micro, rng, model_state, cuts, splits, **options)
        self.stacks, traced = model.stacks, model.traced

        def cut(traced: Traced, schedule: Schedule = settings.schedule) -> OptimizerCut:
            shapes, count = model.params, settings.microbatches
            return cut_for(settings.optimizer, traced.graph, shapes, count, schedule, grad_norm=settings.grad_norm)

        build = self._build(traced, first.plan, first.optimizer) if first else self._planned_build(traced, cut)
        if settings.schedule.warmup_updates:
            plain = find_schedule("1f1b")
            self._warm[batch_shapes(batch)] = replace(build, schedule=plain, optimizer=cut(build.traced, plain))
        self._known[batch_shapes(batch)] = build
        return build

    def under(self, plan: Plan, base: Build | None = None) -> Build:
        """The first build, or that of a `base`, under another plan."""
        base = base or self.first
        plan = plan.with_schedule(self.settings.schedule.name)
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
        layer_s = self.planned.layer_s if self.planned else None
        return Build(
            traced, plan, settings.schedule, optimizer, settings.microbatches, settings.devices, self._store, layer_s
        )

    def _planned_build(self, traced: Traced, cut: Callable[[Traced], OptimizerCut]) -> Build:
        """Plans, unless the plan is given, and makes the plan ready to run."""
        settings = self.settings
        if isinstance(settings.stages, Plan):
            plan = settings.stages.with_schedule(settings.schedule.name)
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
        self.planned = found.planned
        return self._build(found.traced, self._by_hand(found.traced, found.planned.plan), found.optimizer)

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
        problem = measure(request, traced, optimizer, settings.devices[0], self._store, self.runs, self._room_bytes)

        def peak_bytes_of(plan: Plan) -> int:
            build = self._build(traced, self._by_hand(traced, plan), optimizer)
            return max(peak.bytes for peak in build.peaks[:HOST])

        return Candidate(traced, optimizer, decide(request, problem, peak_bytes_of))

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
