"""The compiled plans of a model: one for each shape of its batches, all under the same plan.

`KnownModels` remembers the compiled plans of every model that a pipeline has met.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from threading import RLock
from typing import Any

import jax

from jvpipe.cost.archive import Archive
from jvpipe.cost.measure import Runs
from jvpipe.cost.slowness import work_s
from jvpipe.ir.plan import Plan
from jvpipe.planners.loop_reasons import loop_reasons
from jvpipe.planners.planned_problem import Planned
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.meshes import check_shard_maps
from jvpipe.runtime.engine.phases import phase
from jvpipe.runtime.engine.tensors import Limits, MemoryLimitExceeded
from jvpipe.runtime.engine.training_state import Leaf, Name
from jvpipe.runtime.engine.trees import Trees
from jvpipe.runtime.state.origins import Parked
from jvpipe.session.measuring import Bench
from jvpipe.session.model_planner import ModelPlanner, compile_plan
from jvpipe.session.planning import ChosenShape
from jvpipe.session.settings import OptimizerCutter, Settings
from jvpipe.trace.batches import micro_batch_shapes, shapes_of, shown
from jvpipe.trace.digests import jaxpr_lines
from jvpipe.trace.graph import Traced
from jvpipe.trace.layer_split import split_as_planned
from jvpipe.trace.leaves import abstract
from jvpipe.trace.missing import missing_parameter
from jvpipe.trace.model import Model, trace_model
from jvpipe.trace.stacks import Stacks
from jvpipe.util.brief import first_line
from jvpipe.util.devices import is_own

Tree = Any
LeavesOf = Callable[[Stacks], Sequence[Leaf]]
_log = logging.getLogger("jvpipe")


class CompiledPlans:
    """The compiled plans of one model. The loss is traced and compiled once for each batch shape.

    The plan is made for the first shape. Later shapes use the same plan, because the plan also
    determines which devices hold the state.

    Args:
        settings: what the user asked for.
        store: compiles and keeps programs.
        present: the compiled plans of the model in training; None if `self` is for that model.
            Layers are timed in the memory that the present model leaves under the limit.
    """

    def __init__(
        self, settings: Settings, store: ProgramStore, present: "CompiledPlans | None" = None
    ) -> None:
        self.settings, self._store = settings, store
        self._follows = present is not None  # to keep a switch quick, finer layers are not tried
        self.runs: Runs = {} if present is None else present.runs
        first = settings.places[0] if settings.places else 0  # layers are timed on this device
        self._room_bytes = settings.limits[first] if settings.limits else None
        # The present model trains meanwhile, so the bytes of its peak are not free for timing.
        if present is not None and self._room_bytes is not None:
            self._room_bytes -= present.current.peaks[first].bytes
        self._by_shapes: dict[Any, CompiledPlan] = {}
        self._leaves: dict[Name, Leaf] = {}
        self._trees: Trees | None = None
        self._archive = Archive.beside_the_cache(again=settings.remeasure, busy=self._follows)
        self.planned: Planned | None = None
        self.shape: ChosenShape | None = None
        self.model_id = object()  # every state of the model refers to this object

    def __bool__(self) -> bool:
        return bool(self._by_shapes)

    def __iter__(self) -> Iterator[CompiledPlan]:
        return iter(self._by_shapes.values())

    @property
    def layer_s(self) -> list[float] | None:
        """Seconds that each layer takes for a micro-batch; None if they were not measured."""
        return self.planned.layer_s if self.planned else None

    @property
    def current(self) -> CompiledPlan:
        """The compiled plan of the first batch shape."""
        self.check_traced()
        return next(iter(self._by_shapes.values()))

    @property
    def trees(self) -> Trees:
        """The shapes of the caller's trees with which the model was first traced."""
        self.check_traced()
        assert self._trees is not None
        return self._trees

    def reasons(self) -> tuple[Sequence[float] | None, list[str]]:
        """Returns the layers' seconds that the planner used, if any, and the plan's reasons."""
        compiled, planned, shape = self.current, self.planned, self.shape
        layer_s, lines = self.layer_s, list[str]()
        chosen = shape and shape.planned
        if shape and (chosen is None or chosen.plan.replicas == compiled.plan.replicas):
            lines += shape.why
        # The planner's reasons explain its own cuts. After a migration, other cuts may be in use.
        if planned and planned.plan.cuts == compiled.plan.cuts:
            layer_s = layer_s and work_s(planned.placed)
            lines += planned.reasons(compiled.optimizer.cross_layer)
        return layer_s, lines + loop_reasons(compiled.traced)

    def check_traced(self) -> None:
        """Raises ValueError if no model has been traced."""
        if not self._by_shapes:
            raise ValueError("this pipeline has no model yet: call init or restore first")

    def for_batch(self, batch: Tree, *, warms_up: bool = False) -> CompiledPlan:
        """Returns the compiled plan that runs a batch; traces and compiles for a new batch shape.

        Args:
            batch: a whole batch.
            warms_up: whether the step is one of the synchronous steps that begin an
                asynchronous run.
        """
        trees, key = self.trees, shapes_of(batch)
        if key not in self._by_shapes:
            micro_batch_shapes(batch, self.settings.microbatches)
            _log.warning("the shapes of the batch changed: tracing and compiling for them")
            try:
                self.trace(trees.params, batch, trees.rng, trees.model_state)
            except Exception as error:
                raise ValueError(
                    f"the loss does not take a batch of {shown(batch)}, init's was of "
                    f"{shown(trees.batch)}: {type(error).__name__}: {first_line(error)}"
                ) from error
        compiled = self._by_shapes[key]
        return (warms_up and compiled.warmup) or compiled

    def for_run(
        self,
        params: Tree,
        batch: Tree,
        rng: jax.Array | None,
        model_state: Tree,
        leaves_of: LeavesOf,
    ) -> "CompiledPlans":
        """Returns the compiled plans of a run that begins with these trees.

        If the model has the same layers and tree of parameters as the present one, the
        present plan is kept; otherwise a plan is made. Each tree holds arrays or shapes.

        Args:
            params: the parameters.
            batch: a whole batch.
            rng: the key of the run.
            model_state: the model state, if the loss has one (`has_state`).
            leaves_of: makes the parameters or puts them on devices, given their split into layers.
        """
        run = CompiledPlans(self.settings, self._store)
        run.runs = self.runs
        run.trace(params, batch, rng, model_state, leaves_of, before=self if self else None)
        return run

    def take_leaves(self) -> dict[Name, Leaf]:
        """Returns the run's initial parameters by name, and forgets them: they may be large."""
        leaves, self._leaves = self._leaves, {}
        return leaves

    def trace(
        self,
        params: Tree,
        batch: Tree,
        rng: jax.Array | None,
        model_state: Tree,
        leaves_of: LeavesOf | None = None,
        before: "CompiledPlans | None" = None,
    ) -> None:
        """Traces and compiles the loss for a batch's shapes; the first call also makes the plan.

        Args:
            params: the parameters as arrays or shapes, like the other trees.
            batch: a whole batch.
            rng: the key of the run.
            model_state: the model state, if the loss has one (`has_state`).
            leaves_of: makes the parameters or puts them on devices, given their split into layers.
                It runs before layers are timed, so the plan leaves room for the parameters.
            before: the previous run's compiled plans; their plan is kept if layers are equal.
        """
        settings = self.settings
        present = self.current if self._by_shapes else None
        micro = micro_batch_shapes(batch, settings.microbatches)
        params, model_state = abstract(params), abstract(model_state, "leaf of the model state")
        model = self._traced_loss(params, micro, rng, model_state, present and present.traced)
        cutter = OptimizerCutter(settings, model.params, model.stacks)
        traced = cutter.freeze(model.traced)
        sharding = settings.sharding
        check_shard_maps(traced.loss.eqns, sharding.axes if sharding else {})
        if leaves_of:
            leaves = enumerate(leaves_of(model.stacks))
            self._leaves = {("parameter", i): leaf for i, leaf in leaves}
        base = present
        if present is None:
            batch_shapes = abstract(batch, "batch leaf")
            self._trees = Trees(params, batch_shapes, rng, model_state, model.stacks)
            if before and (same := before._split_alike(traced, params)):
                base, traced = before.current, same
                self.planned, self.shape = before.planned, before.shape
                self.model_id = before.model_id
            self._agree(traced, cutter)
        if base:
            compiled = self.with_plan(base.plan, base, traced)
        else:
            bench = Bench(self._store, self.runs, self._room_bytes, self._archive)
            planner = ModelPlanner(settings, bench, cutter, self._leaves, not self._follows)
            compiled, self.planned, self.shape = planner.plan_together(traced)
        # If another model is still training, this model's groups are compiled later, during its own
        # training.
        if settings.group and not self._follows:
            compiled = self.in_groups(compiled)
        self._by_shapes[shapes_of(batch)] = compiled

    def _traced_loss(
        self,
        params: Tree,
        micro_batch: Tree,
        rng: jax.Array | None,
        model_state: Tree,
        present: Traced | None,
    ) -> Model:
        """Traces the loss for the shapes of a micro-batch, and cuts it into layers.

        Args:
            params: shapes, like the other trees.
            micro_batch: a micro-batch.
            rng: the key of the run.
            model_state: the model state, if the loss has one.
            present: the trace at another batch shape, whose cuts are used; None to find cuts.
        """
        settings = self.settings
        with phase("tracing and cutting the loss"):
            return trace_model(
                settings.loss_fn,
                params,
                micro_batch,
                rng,
                model_state,
                present,
                has_aux=settings.has_aux,
                has_state=settings.has_state,
                sharding=settings.sharding,
                reductions=settings.reductions,
                deferred_over=settings.microbatches if settings.deferred_batch_norm else 1,
                whole_layers=settings.whole_layers,
            )

    def _agree(self, traced: Traced, cutter: OptimizerCutter) -> None:
        """Checks that all processes have traced the same loss and optimizer."""
        hosts = self.settings.hosts
        if hosts is None:
            return
        loss = jaxpr_lines(traced.loss.jaxpr, traced.loss.constants)
        optimizer = cutter.lines(traced.graph, self.settings.schedule)
        parts = [("the loss", "\n".join(loss)), ("the optimizer", "\n".join(optimizer))]
        hosts.agree("what the processes train", parts)

    def _split_alike(self, traced: Traced, params: Tree) -> Traced | None:
        """Splits layers like the present model's; returns None if layers or parameters differ."""
        present = self.current.traced
        containers = jax.tree.structure(self.trees.params)
        if traced.cuts != present.cuts or jax.tree.structure(params) != containers:
            return None
        split = split_as_planned(traced, present.splits)
        return split if split.graph == present.graph else None

    def in_groups(self, compiled: CompiledPlan) -> CompiledPlan:
        """Returns the plan with layers in groups that run as one program each.

        Groups take more memory, so layers are not grouped if groups would exceed a limit.
        """
        grouped = replace(compiled, grouped=True)
        try:
            Limits(self.settings.limits or None).check(grouped.peaks, self.settings.devices)
        except MemoryLimitExceeded as error:
            _log.warning("layers stay apart, for in groups %s", error)
            return compiled
        return grouped

    def with_plan(
        self, plan: Plan, base: CompiledPlan | None = None, traced: Traced | None = None
    ) -> CompiledPlan:
        """Compiles the model under another plan.

        Args:
            plan: the plan.
            base: a compiled plan of this model; None stands for the one of the first batch shape.
            traced: the model at another batch shape; None stands for the batch shape of `base`.
        """
        base = base or self.current
        return compile_plan(
            self.settings,
            self._store,
            traced or base.traced,
            plan.under(self.settings.schedule.name),
            base.optimizer,
            base.warmup_optimizer,
        )

    def from_spans(self, spans: Sequence[Sequence[Any]]) -> CompiledPlan:
        """Compiles the successive plans of a stream (a run without flushes); returns the last one.

        Args:
            spans: (first micro-batch, plan as JSON) of each plan in order, the present plan last,
                as the checkpoint of the stream lists them.
        """
        # Each compiled plan except the first refers to its predecessor, and has the number of the
        # micro-batch at which it replaced the predecessor.
        earlier = None
        for start, plan in spans[:-1]:
            compiled = self.with_plan(Plan.from_json(plan))
            earlier = compiled.after(earlier and (earlier, start))
        if earlier is None:
            return self.current
        return self.current.after((earlier, spans[-1][0]))

    def adopt(self, compiled: CompiledPlan) -> None:
        """Makes the plan of `compiled` the plan of every batch shape from now on.

        `compiled` must be for the first batch shape, and replaces the compiled plan of this shape.
        """
        # The first shape stays first, because `current` returns the first entry.
        (first, _), *others = self._by_shapes.items()
        later = {key: self.with_plan(compiled.plan, other) for key, other in others}
        self._by_shapes = {first: compiled} | later

    def compile_everywhere(self) -> None:
        """Compiles every program of the training for every device of this process.

        A later plan may then put any layer on any of these devices without compiling.
        """
        # A later plan first runs without groups, so the programs of single layers are compiled.
        current = self.current
        every = [replace(current, grouped=False)]
        if current.warmup is not None:
            every.append(current.warmup)
        programs = list(map(current.placing.initial_program, current.optimizer.init))
        for compiled in every:
            compiled.peaks  # noqa: B018 - reading it compiles the plan on its present devices
        for compiled in every:
            programs += compiled.executables.values()
        local = [device for device in self.settings.devices if is_own(device)]
        self._store.compile([(program, device) for program in programs for device in local])


Loss = Callable[..., Any]


REMEMBERED = 64
"""The largest number of models that are kept; the least recently requested one is dropped first."""


class KnownModels:
    """The compiled plans of the models that a pipeline has met.

    Each model is traced and planned once, so a switch back to an earlier model compiles nothing.
    The key of a model is its loss function (the object, not its code) with the shapes of its trees.
    `parked` holds, on the host, arrays of other models that the present model does not use.
    """

    def __init__(self, store: ProgramStore) -> None:
        self._store = store
        self._known: dict[Hashable, CompiledPlans] = {}
        self._lock = RLock()  # a model may be prepared in the background
        self.parked: Parked = {}

    def compiled_for(
        self, present: CompiledPlans, loss_fn: Loss, params: Tree, model_state: Tree
    ) -> CompiledPlans:
        """Returns the compiled plans of a loss; a new loss is traced at the present batch shape.

        Args:
            present: the compiled plans of the model in training.
            loss_fn: the loss; another function object with the same code counts as a new loss.
            params: arrays or shapes.
            model_state: arrays or shapes; None stands for the present model's.

        Raises:
            ValueError: the loss reads a parameter that `params` lack, or `Pipeline.init`
                would refuse the model.
        """
        trees = present.trees
        params = abstract(params)
        model_state = trees.model_state if model_state is None else abstract(model_state)
        key = self._key(present, loss_fn, params, model_state)
        present_key = self._key(present, present.settings.loss_fn, trees.params, trees.model_state)
        with self._lock:
            self._known[present_key] = present
            found = self._known.pop(key, None)
            # Entries are in the order of requests, so the least recently requested model is first.
            self._known[key] = found or self._traced(present, loss_fn, params, model_state)
            while len(self._known) > REMEMBERED:
                del self._known[next(iter(self._known))]
            return self._known[key]

    def _traced(
        self, present: CompiledPlans, loss_fn: Loss, params: Tree, model_state: Tree
    ) -> CompiledPlans:
        """Traces and plans another model at the batch shape of the present one."""
        settings = present.settings.for_another(loss_fn, present.current.plan)
        compiled_plans, trees = CompiledPlans(settings, self._store, present), present.trees
        try:
            compiled_plans.trace(params, trees.batch, trees.rng, model_state)
        except KeyError as error:
            micro = micro_batch_shapes(trees.batch, settings.microbatches)
            rest = (model_state, micro, trees.rng) if settings.has_state else (micro, trees.rng)
            path = missing_parameter(loss_fn, params, *rest) or error.args[0]
            raise ValueError(
                f"the new loss reads parameter '{path}', which params lack: give a "
                "value for every parameter that it reads (the values of kept "
                "parameters are ignored)"
            ) from error
        return compiled_plans

    @staticmethod
    def _key(present: CompiledPlans, loss_fn: Loss, params: Tree, model_state: Tree) -> Hashable:
        trees = present.trees
        return id(loss_fn), *map(shapes_of, (params, trees.batch, trees.rng, model_state))
