"""The programs of replicated stages: each layer on the slices of its replicas, and what goes between these."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import jax.numpy as jnp

from jvpipe.ir.examples import Batching, Examples, Over, Spread
from jvpipe.ir.fates import Fates
from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import LayerGraph, Signature, SplitSignature
from jvpipe.ir.plan import Plan
from jvpipe.ir.rows import AddRun, ConcatRun, JoinRun, Row, SliceRun, StateRun
from jvpipe.ir.values import Value, ValueKind
from jvpipe.lowering.layout import SliceLayout
from jvpipe.lowering.placement import Placement, written_state
from jvpipe.lowering.slicing import REDUCED
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.loss import Parts
from jvpipe.programs.model import Share, programs_of
from jvpipe.programs.slices import (
    cut_program,
    join_program,
    reduce_program,
    state_program,
    weighted_program,
)
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.runtime.value_shapes import shape
from jvpipe.schedules.auto import AUTO, GivenLists
from jvpipe.schedules.round_robin import check_turns
from jvpipe.schedules.schedule import Schedule
from jvpipe.trace.graph import Traced
from jvpipe.trace.reductions import Beside
from jvpipe.trace.slices import Apart, sliced, taken_apart

_Key = tuple[int, Examples, int]


@dataclass
class Replicas:
    """What a plan with replicated stages runs beside whole micro-batches.

    Args:
        traced: the layers on a whole micro-batch.
        plan: the replicas of each stage.
        store: where programs are made.
        whole: of each layout what its layers keep, and their programs on a whole micro-batch.
    """

    traced: Traced
    plan: Plan
    store: ProgramStore
    whole: Sequence[tuple[Share | Fates, Sequence[LayerPrograms]]]
    _slices: dict[Examples, Traced] = field(default_factory=dict)
    _programs: dict[_Key, LayerPrograms] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_edges()

    @cached_property
    def where(self) -> Placement:
        """The places of layers, and their slices."""
        return Placement(self.traced.graph, self.plan)

    @cached_property
    def apart(self) -> Apart:
        """What is known of the loss, whose examples are computed apart."""
        slices = [e for stage in self.plan.stages for e in self.where.slices(stage.layers[0]) if e]
        return taken_apart(self.traced, [e.size for e in slices])

    @property
    def batching(self) -> Batching:
        """How edges, aux and the loss lie over the examples."""
        return self.apart.batching

    def sliced(self, examples: Examples) -> Traced:
        """The layers on some of the examples."""
        if examples not in self._slices:
            self._slices[examples] = sliced(self.traced, examples, self.apart)
        return self._slices[examples]

    def programs(self, layout: int, examples: Examples, layer: int) -> LayerPrograms:
        """A layer's programs on some of the examples, under the fates of a layout.

        Args:
            layout: by its number.
            examples: of a micro-batch.
            layer: by its number.

        Raises:
            ValueError: they leave other values for the backward than those of the whole micro-batch.
        """
        key = layout, examples, layer
        if key not in self._programs:
            share, whole = self.whole[layout]
            made = programs_of(self.store, self.sliced(examples), layer, share)
            if _interface(made.signature) != _interface(whole[layer].signature):
                name = self.traced.graph.label(self.traced.graph.layers[layer])
                raise ValueError(
                    f"layer {name} leaves other values for its backward on {examples.size} examples than on "
                    f"{self.traced.graph.examples}: give its stage one device, or use larger micro-batches"
                )
            self._programs[key] = made
        return self._programs[key]

    def layouts(
        self, layout: int, split: Mapping[int, SplitSignature]
    ) -> dict[Examples, SliceLayout]:
        """What the programs of layers take and give on each slice.

        Args:
            layout: by its number.
            split: of the layers whose backwards run in halves, what these take and give on a whole micro-batch.
        """
        layers: dict[Examples, list[int]] = {}
        for stage in self.plan.stages:
            for e in self.where.slices(stage.layers[0]):
                if e is not None:
                    layers.setdefault(e, []).extend(stage.layers)
        made: dict[Examples, SliceLayout] = {}
        for e, members in layers.items():
            programs = {i: self.programs(layout, e, i) for i in members}
            halves = {i: p.halves.signature for i, p in programs.items() if i in split and p.halves}
            for i in split.keys() & set(members):
                both = halves[i], split[i]
                assert len({(_interface(x.input), _interface(x.weight)) for x in both}) == 1, (
                    "it splits as the whole does"
                )
            made[e] = SliceLayout({i: p.signature for i, p in programs.items()}, halves)
        return made

    def program(self, row: Row, reads: Sequence[Value]) -> Program:
        """What a row between replicas runs; its `reads` are values."""
        shapes = [self.shape(value) for value in reads]
        match row.kind:
            case Kind.SLICE:
                assert isinstance(row.run, SliceRun)
                return cut_program(shapes[0], row.run)
            case Kind.CONCAT:
                assert isinstance(row.run, ConcatRun)
                return join_program(shapes, row.run.axis)
            case Kind.REDUCE if isinstance(row.run, StateRun):
                return state_program(
                    shapes, self._state_parts(row.layer, dict.fromkeys(v.index for v in reads))
                )
            case Kind.REDUCE if isinstance(row.run, JoinRun) and row.run.weights:
                return weighted_program(shapes[0], row.run.weights)
            case Kind.REDUCE:
                replicas = len(row.reads) // len(row.writes)
                return reduce_program(
                    shapes[::replicas], replicas, in_place=isinstance(row.run, AddRun)
                )
            case _:
                raise AssertionError(f"{row} is none between replicas")

    def shape(self, value: Value) -> jax.ShapeDtypeStruct:
        """The shape and type of a part of an edge or of a leaf of aux, or of the gradient of a parameter."""
        graph, i = self.traced.graph, value.index
        match value.kind:
            case ValueKind.TENSOR | ValueKind.COTANGENT:
                return self._part(
                    shape(graph.tensors[i].array), self.batching.tensors[i], value.examples
                )
            case ValueKind.AUX:
                return self._part(shape(graph.aux[i]), self.batching.aux[i], value.examples)
            case ValueKind.GRADIENT:
                return shape(graph.parameters[i].array)
            case ValueKind.STATE:
                return shape(graph.state[i])
            case _:
                raise AssertionError(f"{value} does not go between replicas")

    def _part(
        self, whole: jax.ShapeDtypeStruct, spread: Spread, examples: Examples | None
    ) -> jax.ShapeDtypeStruct:
        if examples is None or spread.over is not Over.ALONG:
            return whole
        sizes = list(whole.shape)
        sizes[spread.axis] = sizes[spread.axis] // self.traced.graph.examples * examples.size
        return jax.ShapeDtypeStruct(tuple(sizes), whole.dtype)

    def loss_parts(self) -> list[Parts | None]:
        """The parts in which each loss and leaf of aux of a micro-batch is made; None: whole."""
        graph = self.traced.graph
        parts = [self._made_in(graph.loss_layer, self.batching.loss)] * (1 + graph.weighted)
        for i, spread in enumerate(self.batching.aux):
            maker = next(layer.id for layer in graph.layers if i in layer.writing(ValueKind.AUX))
            parts.append(self._made_in(maker, spread))
        return parts

    def _state_parts(self, layer: int, leaves: Iterable[int]) -> list[Parts]:
        """The parts of some leaves of the model state that a layer's replicas have made.

        Args:
            layer: that makes them.
            leaves: by their numbers.
        """
        slices = tuple(e for e in self.where.slices(layer) if e is not None)
        spreads = [self.batching.state[k] for k in leaves]
        return [Parts(slices, spread) for spread in spreads if spread is not None]

    def _made_in(self, layer: int, spread: Spread) -> Parts | None:
        slices = tuple(e for e in self.where.slices(layer) if e is not None)
        return Parts(slices[:1] if spread.over is Over.NONE else slices, spread) if slices else None

    def _check_edges(self) -> None:
        """Raises ValueError for what goes from stage to stage and cannot be cut, where their widths differ."""
        graph, widths = self.traced.graph, self.plan.replicas
        exact = {Beside.DIVISOR, Beside.GUARD} & set(self.apart.amended.values())
        for tensor, spread in zip(graph.tensors, self.batching.tensors, strict=True):
            layers = (tensor.producer, *tensor.readers)
            stages = sorted({self.where.stage[layer] for layer in layers})
            if len({widths[s] for s in stages}) == 1 or spread.over in (Over.ALONG, Over.NONE):
                continue
            is_number = jnp.issubdtype(tensor.array.dtype, jnp.inexact)
            # A count and what is divided by it must be of the same slice: none is shared out.
            if spread.over not in REDUCED or exact or not is_number:
                raise ValueError(
                    f"tensor '{tensor.array.name}' goes from stage to stage without an axis of examples, and stages "
                    f"{stages} have {[widths[s] for s in stages]} replicas: give them as many as each other, or move "
                    "the cut"
                )


def _interface(signature: Signature) -> object:
    """A signature without the sizes of what is left."""
    return replace(signature, residuals=()), tuple(array.name for array in signature.residuals)


def check_replicable(schedule: Schedule, *, given: bool = False) -> None:
    """Raises ValueError if replicated stages cannot run under a schedule; `given`: the plan brings its own order."""
    if given or schedule == AUTO or isinstance(schedule.lists, GivenLists):
        raise ValueError(
            "replicated stages cannot run under an order that a planner has chosen, yet: use '1f1b', 'zb-h1' or "
            "another rule, or one device for each stage"
        )


def check_replicas(plan: Plan, schedule: Schedule, graph: LayerGraph, microbatches: int) -> None:
    """Raises ValueError if replicated stages cannot run so.

    Args:
        plan: that has such stages.
        schedule: in which order they run.
        graph: of a micro-batch.
        microbatches: of a step.
    """
    check_replicable(schedule, given=bool(plan.tasks))
    most = max(plan.replicas)
    if not schedule.synchronous:
        check_turns(schedule, plan, microbatches)
        if written := sorted(graph.state[k].name for k in written_state(graph)):
            raise ValueError(
                f"model state '{written[0]}' goes from micro-batch to micro-batch, and under {schedule.name} the "
                "devices of a stage take turns in these: use a synchronous schedule, or one device for each stage"
            )
    elif most > graph.examples:
        raise ValueError(
            f"stage {plan.replicas.index(most)} has {most} replicas, and a micro-batch {graph.examples} examples: each "
            "replica needs one at least. Use fewer replicas, fewer micro-batches or larger batches"
        )
