"""The compiled plans of a model: its loss, traced at the shapes of each batch that it meets, under one plan."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from jvpipe import _jax
from jvpipe.cost.archive import Archive
from jvpipe.cost.measure import Runs
from jvpipe.ir.plan import Plan
from jvpipe.ir.values import ValueKind
from jvpipe.papers.registry import find_planner
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.host_link import link_between
from jvpipe.runtime.engine.phases import phase
from jvpipe.runtime.engine.tensors import Limits, MemoryLimitExceeded
from jvpipe.runtime.engine.training_state import Leaf, Name
from jvpipe.schedules import find_schedule
from jvpipe.session.asking import ChosenShape, Planned
from jvpipe.session.devices import check_shard_maps
from jvpipe.session.measuring import Bench, work_s
from jvpipe.session.model_planner import Chosen, ModelPlanner, compile_plan
from jvpipe.session.optimizer_cut import OptimizerCutter
from jvpipe.session.settings import Settings
from jvpipe.session.trees import Trees, micro_batch_shapes, shapes_of
from jvpipe.trace.digests import jaxpr_lines
from jvpipe.trace.graph import Traced
from jvpipe.trace.layer_split import split_as_planned
from jvpipe.trace.leaves import abstract
from jvpipe.trace.model import trace_model
from jvpipe.trace.stacks import Stacks
from jvpipe.util.paths import path_name

Tree = Any
LeavesOf = Callable[[Stacks], Sequence[Leaf]]
_log = logging.getLogger("jvpipe")


def shown(batch: Tree) -> str:
    """Returns the leaves of a batch with their types and shapes, for people to read."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract(batch, "batch leaf"))
    return ", ".join(
        f"{path_name(path)} {leaf.dtype}{list(leaf.shape)}".strip() for path, leaf in leaves
    )


class CompiledPlans:
    """Holds the compiled plan of each batch shape that a model was traced at; the first one decides the plan of all.

    Args:
        settings: what the user asked for.
        store: where programs are compiled.
        present: those of the model that is trained meanwhile, if there is one: layers are timed in the room that it
            leaves under the limit.
    """

    def __init__(
        self, settings: Settings, store: ProgramStore, present: "CompiledPlans | None" = None
    ) -> None:
        self.settings, self._store = settings, store
        self._follows = present is not None  # which waits meanwhile: finer layers are not tried
        self.runs: Runs = {} if present is None else present.runs
        first = settings.places[0] if settings.places else 0  # the device that layers are timed on
        self._room_bytes = settings.limits[first] if settings.limits else None
        # The model that trains meanwhile keeps its peak.
        if present is not None and self._room_bytes is not None:
            self._room_bytes -= present.current.peaks[first].bytes
        self._by_shapes: dict[Any, CompiledPlan] = {}
        self._warmup: dict[Any, CompiledPlan] = {}
        self._leaves: dict[Name, Leaf] = {}
        self._trees: Trees | None = None
        self._archive = Archive.beside_the_cache(again=settings.remeasure, busy=self._follows)
        self.planned: Planned | None = None
        self.shape: ChosenShape | None = None
        self.model_id = object()  # the states of one model have the same

    def __bool__(self) -> bool:
        return bool(self._by_shapes)

    def __iter__(self) -> Iterator[CompiledPlan]:
        return iter(self._by_shapes.values())

    @property
    def layer_s(self) -> list[float] | None:
        """Seconds of each layer on a micro-batch, if they were measured."""
        return self.planned.layer_s if self.planned else None

    @property
    def current(self) -> CompiledPlan:
        """The compiled plan of the first batch shape."""
        self.check_traced()
        return next(iter(self._by_shapes.values()))

    @property
    def trees(self) -> Trees:
        """The caller's trees, as the model was first traced with them."""
        self.check_traced()
        assert self._trees is not None
        return self._trees

    def reasons(self) -> tuple[Sequence[float] | None, list[str]]:
        """Returns the seconds of the layers that the present plan was made with, if any, and its reasons."""
        compiled, planned, shape = self.current, self.planned, self.shape
        layer_s, lines = self.layer_s, list[str]()
        chosen = shape and shape.planned
        if shape and (chosen is None or chosen.plan.replicas == compiled.plan.replicas):
            lines += shape.why
        # A plan that took this one's place has other reasons, which nobody knows.
        if planned and planned.plan.cuts == compiled.plan.cuts:
            layer_s = layer_s and work_s(planned.placed)
            lines += planned.reasons(compiled.optimizer.cross_layer)
        return layer_s, lines + loop_reasons(compiled.traced)

    def check_traced(self) -> None:
        """Raises ValueError if no model was traced yet."""
        if not self._by_shapes:
            raise ValueError("this pipeline has no model yet: call init or restore first")

    def for_batch(self, batch: Tree, *, warms_up: bool = False) -> CompiledPlan:
        """Finds what runs a batch; at a shape that is new the loss is traced and compiled.

        Args:
            batch: a whole one.
            warms_up: in the synchronous steps before an asynchronous stream.
        """
        trees, key = self.trees, shapes_of(batch)
        if key not in self._by_shapes:
            micro_batch_shapes(batch, self.settings.microbatches)
            _log.warning("the shapes of the batch changed: tracing and compiling for them")
            try:
                self.trace(trees.params, batch, trees.rng, trees.model_state)
            except Exception as error:
                raise ValueError(
                    f"the loss does not take a batch of {shown(batch)}, init's was of {shown(trees.batch)}: "
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                ) from error
        return (self._warmup if warms_up else self._by_shapes)[key]

    def for_run(
        self,
        params: Tree,
        batch: Tree,
        rng: jax.Array | None,
        model_state: Tree,
        leaves_of: LeavesOf,
    ) -> "CompiledPlans":
        """Makes those of a run that begins with these; another model than the present one gets a new plan.

        Args:
            params: arrays or shapes, as all that follows.
            batch: a whole one.
            rng: the key of the run.
            model_state: with `has_state`.
            leaves_of: puts or makes the parameters, given how they are split into layers.
        """
        run = CompiledPlans(self.settings, self._store)
        run.runs = self.runs
        run.trace(params, batch, rng, model_state, leaves_of, before=self if self else None)
        return run

    def take_leaves(self) -> dict[Name, Leaf]:
        """Gives the parameters that the run begins with, by name, and forgets them: they may be large."""
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
        """Traces and compiles at the shapes of a batch; the first time this also plans.

        Args:
            params: arrays or shapes, as all that follows.
            batch: a whole one.
            rng: the key of the run.
            model_state: with `has_state`.
            leaves_of: puts or makes the parameters, given how they are split into layers; the plan has room for it.
            before: those of another run; if its model has the same layers, its plan holds.
        """
        settings = self.settings
        micro = micro_batch_shapes(batch, settings.microbatches)
        params, model_state = abstract(params), abstract(model_state, "leaf of the model state")
        base = self.current if self._by_shapes else None
        with phase("tracing and cutting the loss"):
            model = trace_model(
                settings.loss_fn,
                params,
                micro,
                rng,
                model_state,
                base and base.traced,
                has_aux=settings.has_aux,
                has_state=settings.has_state,
                sharding=settings.sharding,
                reductions=settings.reductions,
                deferred_over=settings.microbatches if settings.deferred_batch_norm else 1,
            )
        sharding, grad_norm = settings.sharding, settings.grad_norm
        cutter = OptimizerCutter.of(settings, model, grad_norm=grad_norm, sharding=sharding)
        traced = cutter.freeze(model.traced)
        check_shard_maps(traced.loss.eqns, sharding.axes if sharding else {})
        if leaves_of:
            self._leaves = {
                ("parameter", i): leaf for i, leaf in enumerate(leaves_of(model.stacks))
            }
        if base is None:
            self._trees = Trees(
                params, abstract(batch, "batch leaf"), rng, model_state, model.stacks
            )
            if before and (same := before._split_alike(traced, params)):
                base, traced = before.current, same
                self.planned, self.shape = before.planned, before.shape
                self.model_id = before.model_id
        if settings.hosts is not None and not self._by_shapes:
            functions = {
                "the loss": jaxpr_lines(traced.loss.jaxpr, traced.loss.constants),
                "the optimizer": cutter.lines(traced.graph, settings.schedule),
            }
            parts = [(name, "\n".join(lines)) for name, lines in functions.items()]
            settings.hosts.agree("what the processes train", parts)
        if base:
            compiled = self._compiled(traced, base.plan, base.optimizer)
        else:
            bench = Bench(self._store, self.runs, self._room_bytes, self._archive)
            planner = ModelPlanner(settings, bench, cutter, self._leaves)
            compiled, self.planned, self.shape = self._planned(planner, traced)
        if not self._follows:  # else another model waits: groups are compiled beside it
            compiled = self.in_groups(compiled)
        if settings.schedule.warmup_updates:
            plain = find_schedule("1f1b")
            self._warmup[shapes_of(batch)] = replace(
                compiled, schedule=plain, optimizer=cutter.cut(compiled.traced.graph, plain)
            )
        self._by_shapes[shapes_of(batch)] = compiled

    def _planned(self, planner: ModelPlanner, traced: Traced) -> Chosen:
        """Plans; of several processes the first one measures and decides for all."""
        hosts, finer = self.settings.hosts, not self._follows
        if hosts is None or isinstance(self.settings.stages, Plan):
            return planner.plan(traced, finer=finer)
        # All take part in measuring the link, before the first one decides.
        if find_planner(self.settings.planner).asks_seconds:
            bench = replace(planner.bench, between_hosts=link_between(hosts))
            planner = replace(planner, bench=bench)
        decided: list[Chosen] = []

        def decide() -> str:
            decided.append(planner.plan(traced, finer=finer))
            return json.dumps(decided[0].compiled.plan.to_json())

        plan = Plan.from_json(json.loads(hosts.decided("plan", decide)))
        if decided:
            return decided[0]
        with_plan = replace(planner, settings=replace(self.settings, stages=plan))
        return with_plan.plan(traced, finer=finer)

    def _split_alike(self, traced: Traced, params: Tree) -> Traced | None:
        """Splits a model as the present one is, if it has the same layers and the same tree of parameters."""
        present = self.current.traced
        if traced.cuts != present.cuts or jax.tree.structure(params) != jax.tree.structure(
            self.trees.params
        ):
            return None
        split = split_as_planned(traced, present.splits)
        return split if split.graph == present.graph else None

    def _compiled(self, traced: Traced, plan: Plan, optimizer: OptimizerCut) -> CompiledPlan:
        return compile_plan(self.settings, self._store, traced, plan, optimizer)

    def in_groups(self, compiled: CompiledPlan) -> CompiledPlan:
        """The same plan with layers in groups, if that was asked for and the limits leave room: groups hold more."""
        if not self.settings.group:
            return compiled
        grouped = replace(compiled, grouped=True)
        limits = Limits(self.settings.limits or None)
        try:
            limits.check(grouped.peaks, self.settings.devices)
        except MemoryLimitExceeded as error:
            _log.warning("layers stay apart, for in groups %s", error)
            return compiled
        return grouped

    def with_plan(self, plan: Plan, base: CompiledPlan | None = None) -> CompiledPlan:
        """Compiles the model under another plan, at the batch shape of `base` or at the first."""
        base = base or self.current
        plan = plan.under(self.settings.schedule.name)
        return self._compiled(base.traced, plan, base.optimizer)

    def from_spans(self, spans: Sequence[Sequence[Any]]) -> CompiledPlan:
        """Compiles a stream that came to the present plan through others, as a checkpoint describes it.

        Args:
            spans: (first micro-batch, plan as JSON) of each plan in turn, the present one last.
        """
        # Each plan but the first remembers the one before it, and where it took over.
        earlier = self.current
        for n, (start, plan) in enumerate(spans[:-1]):
            earlier = replace(
                self.with_plan(Plan.from_json(plan)), previous=(earlier, start) if n else None
            )
        return (
            replace(self.current, previous=(earlier, spans[-1][0])) if len(spans) > 1 else earlier
        )

    def adopt(self, compiled: CompiledPlan) -> None:
        """Runs everything under the plan of `compiled` from here on; it takes the place of the first."""
        # The first shape stays first: its plan is that of all.
        (first, _), *others = self._by_shapes.items()
        self._by_shapes = {
            first: compiled,
            **{key: self.with_plan(compiled.plan, other) for key, other in others},
        }
        self._warmup = {
            key: replace(warmup, plan=compiled.plan) for key, warmup in self._warmup.items()
        }

    def compile_everywhere(self) -> None:
        """Compiles all that training needs on every device of this process, so that any layer can run on any."""
        # Any layer may come to any device of this process by a later plan.
        every = [replace(plan, grouped=False) for plan in (self.current, *self._warmup.values())]
        for compiled in every:
            compiled.peaks  # noqa: B018 - what is asked for is compiled, where the plan has it
        local = [device for device in self.settings.devices if _jax.is_own(device)]
        programs = [
            self.current.placing.initial_program(piece) for piece in self.current.optimizer.init
        ]
        programs += [program for compiled in every for program in compiled.executables.values()]
        self._store.compile([(program, device) for program in programs for device in local])


def loop_reasons(traced: Traced) -> list[str]:
    """Writes a line for each layer that is a loop: it is not cut between the iterations, and what would cut it."""
    lines = []
    for layer, body in zip(traced.graph.layers, traced.bodies, strict=True):
        loops = [eqn for eqn in body.eqns if eqn.primitive.name in ("scan", "while")]
        counts = [eqn.params["length"] for eqn in loops if eqn.primitive.name == "scan"]
        once = bool(counts) and max(counts) < 2
        if not loops or once or not layer.reading(ValueKind.PARAMETER):
            continue
        times = f"{max(counts)} iterations" if counts else "an unknown number of iterations"
        lines.append(
            f"layer {layer.name} has a loop of {times}, which share their parameters: it is not cut between them. "
            "Written out, as a loop of Python or with unroll=True, each iteration can be a layer"
        )
    return lines
