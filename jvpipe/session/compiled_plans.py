"""The compiled plans of a model: its loss, traced at the shapes of each batch that it meets, under one plan."""

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from threading import RLock
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import JaxprEqn
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
from jvpipe.runtime.state.model_change import Parked
from jvpipe.schedules import find_schedule
from jvpipe.schedules.planned import pipeline_length
from jvpipe.session.arguments import micro_batch_shapes, shapes_of
from jvpipe.session.measuring import Bench, ChosenShape
from jvpipe.session.model_planner import Chosen, ModelPlanner, compile_plan
from jvpipe.session.planning import Planned, work_s
from jvpipe.session.settings import OptimizerCutter, Settings, Trees
from jvpipe.trace.digests import jaxpr_lines
from jvpipe.trace.graph import Traced
from jvpipe.trace.jaxprs import every
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
    """Holds the compiled plan of each batch shape that a model was traced at.

    The first one decides the plan of all.

    Args:
        settings: what the user asked for.
        store: where programs are compiled.
        present: those of the model that is trained meanwhile, if there is one: layers are timed in
            the room that it leaves under the limit.
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
            leaves_of: puts or makes the parameters, given how they are split into layers; the plan
                has room for it.
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
            compiled = self.in_groups(compiled) if settings.group else compiled
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
        """The same plan with layers in groups, if the limits leave room: groups hold more."""
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
        """Runs everything under the plan of `compiled` from here on.

        It takes the place of the first.
        """
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


def agree_on_rows(compiled: CompiledPlan, name: str = "the rows that processes run") -> None:
    """Makes sure that all processes have lowered a plan alike, before anything crosses between them.

    Args:
        compiled: the plan.
        name: of what is compared, for the message.

    Raises:
        Disagreement: some rows differ.
    """
    if compiled.hosts is not None:
        parts = [(f"rows {i}", "\n".join(rows)) for i, rows in enumerate(compiled.whole_rows)]
        compiled.hosts.agree(name, parts)


# The models that a pipeline has met: each is traced and planned once, so that one that comes back
# costs nothing.

Loss = Callable[..., Any]


REMEMBERED = 64
"""How many models are remembered; those that were asked for longest ago are forgotten."""


class KnownModels:
    """Remembers compiled plans by the loss they were traced from (that very object) and the shapes of its parameters.

    `parked` are arrays on the host that the present model lacks.
    """

    def __init__(self, store: ProgramStore) -> None:
        self._store = store
        self._known: OrderedDict[Hashable, CompiledPlans] = OrderedDict()
        self._lock = RLock()  # a model may be prepared in the background
        self.parked: Parked = {}

    def compiled_for(
        self, present: CompiledPlans, loss_fn: Loss, params: Tree, model_state: Tree
    ) -> CompiledPlans:
        """Finds the compiled plans of a loss.

        One that is new is traced at the present one's batch and planned.

        Args:
            present: those of the model that is trained.
            loss_fn: the very object that is looked for.
            params: arrays or shapes.
            model_state: also arrays or shapes; by default the present one's.

        Raises:
            ValueError: the loss reads a parameter that `params` lack, or what `Pipeline.init`
                refuses.
        """
        trees = present.trees
        params, model_state = (
            abstract(params),
            trees.model_state if model_state is None else abstract(model_state),
        )
        key = self._key(present, loss_fn, params, model_state)
        with self._lock:
            self._known[
                self._key(present, present.settings.loss_fn, trees.params, trees.model_state)
            ] = present
            if key not in self._known:
                self._known[key] = self._traced(present, loss_fn, params, model_state)
            # The least recently asked for goes first.
            self._known.move_to_end(key)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
            return self._known[key]

    def _traced(
        self, present: CompiledPlans, loss_fn: Loss, params: Tree, model_state: Tree
    ) -> CompiledPlans:
        settings = replace(present.settings, loss_fn=loss_fn)
        if isinstance(settings.stages, Plan) or settings.shares:  # for the layers of another model
            plan = settings.stages if isinstance(settings.stages, Plan) else present.current.plan
            places = tuple(stage.devices[0] for stage in plan.stages)
            length = pipeline_length(plan, settings.schedule)
            replicas = tuple(stage.devices for stage in plan.stages) if plan.replicated else ()
            settings = replace(
                settings, stages=length, places=places, shares=False, replicas=replicas
            )
        compiled_plans, trees = CompiledPlans(settings, self._store, present), present.trees
        try:
            compiled_plans.trace(params, trees.batch, trees.rng, model_state)
        except KeyError as error:
            micro = micro_batch_shapes(trees.batch, settings.microbatches)
            rest = (model_state, micro, trees.rng) if settings.has_state else (micro, trees.rng)
            path = _missing(loss_fn, params, *rest) or error.args[0]
            raise ValueError(
                f"the new loss reads parameter '{path}', which params lack: give a value for every parameter that it "
                "reads (of those that are kept the value does not matter)"
            ) from error
        return compiled_plans

    @staticmethod
    def _key(present: CompiledPlans, loss_fn: Loss, params: Tree, model_state: Tree) -> Hashable:
        return id(loss_fn), *map(shapes_of, (params, present.trees.batch, model_state))


class _MissingError(Exception):
    pass


class _Watched(dict[Any, Any]):
    """A part of the parameters that tells what is looked for and missing."""

    path: tuple[Any, ...] = ()

    def __missing__(self, key: Any) -> Any:
        raise _MissingError("/".join(map(str, (*self.path, key))))


def _missing(loss_fn: Loss, params: Tree, *rest: Any) -> str | None:
    """Returns the path of the first parameter that a loss looks for and does not find.

    Returns None if that cannot be told.
    """

    def watched(tree: Tree, path: tuple[Any, ...]) -> Tree:
        if not isinstance(tree, Mapping):
            return tree
        watching = _Watched({key: watched(value, (*path, key)) for key, value in tree.items()})
        watching.path = path
        return watching

    try:
        jax.eval_shape(lambda params, *rest: loss_fn(watched(params, ()), *rest), params, *rest)
    except _MissingError as missing:
        return str(missing)
    except Exception:
        return None
    return None


def check_shard_maps(eqns: Iterable[JaxprEqn], axes: Mapping[str, int]) -> None:
    """Raises ValueError for a `jax.shard_map` over another mesh than that of a stage.

    Args:
        eqns: of the loss.
        axes: of the meshes that stages are on, with their sizes; none: each stage is on one device.
    """
    for eqn in every(eqns):
        if eqn.primitive.name == "shard_map" and (own := dict(eqn.params["mesh"].shape)) != dict(
            axes
        ):
            stages = f"on meshes of {dict(axes)}" if axes else "on one device each"
            raise ValueError(
                f"the loss calls jax.shard_map over a mesh of {own}, and stages are {stages}: give each stage such a "
                "mesh, devices=[Mesh(...), ...], with sharding= or batch_axis="
            )
