"""The programs of stages with replicas: those of layers on slices, and those that cut and join.

Replicas are devices that run the same layers, each on a slice of every micro-batch. In this
picture, a micro-batch has four examples, START:STOP is a slice of them, and time runs to the right.
The update of stage 1 is left out:

    stage 0, replica 0    F(0:2)                             B(0:2)  REDUCE  U
    stage 0, replica 1    F(2:4)                             B(2:4)
    stage 1, one device           CONCAT  F  B  SLICE SLICE

CONCAT joins the slices of an activation, each SLICE cuts out a part of its cotangent, and REDUCE
adds up the gradients of both replicas.

The programs of a layer on a slice must take and leave the same values as those on the whole
micro-batch, only in other sizes. Then all decisions about the layer hold for each replica. One
example is the fate of its residuals: whether the values that its forward leaves for its backward
are kept, swapped to the host or recomputed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import jax.numpy as jnp

from jvpipe.ir.examples import Batching, Examples, Over
from jvpipe.ir.fates import Fates
from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import LayerGraph, Signature, SplitSignature
from jvpipe.ir.plan import Plan
from jvpipe.ir.rows import AddRun, ConcatRun, JoinRun, Row, SliceRun, StateRun
from jvpipe.ir.values import Value, ValueKind
from jvpipe.lowering.exchange import REDUCED
from jvpipe.lowering.graph_arrays import graph_array
from jvpipe.lowering.layout import SliceLayout
from jvpipe.lowering.placement import Placement, written_state
from jvpipe.lowering.replica_parts import ReplicaParts, Slice
from jvpipe.programs.between_replicas import (
    cut_program,
    join_program,
    reduce_program,
    state_program,
    weighted_program,
)
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.loss_programs import Parts
from jvpipe.programs.model_programs import Share, programs_of
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.runtime.engine.value_shapes import shape
from jvpipe.schedules.auto import AUTO, GivenLists
from jvpipe.schedules.round_robin import check_turns
from jvpipe.schedules.schedule import Schedule
from jvpipe.trace.graph import Traced
from jvpipe.trace.slices import Apart, sliced, taken_apart
from jvpipe.trace.sums_and_means import Beside

_Key = tuple[int, Examples, int]  # a layout, a slice and a layer


@dataclass
class Replicas:
    """The programs that a plan with replicas runs besides those on whole micro-batches.

    A layout is a choice of the residuals that layers keep. A plan has one, or two if the last
    micro-batch of a step keeps all of them.

    Args:
        traced: the layers, traced on a whole micro-batch.
        where: the places of the layers, and the slices that each layer's replicas work on.
        store: compiles programs.
        whole: for each layout, which residuals layers keep, and the programs of layers on a whole
            micro-batch.
    """

    traced: Traced
    where: Placement
    store: ProgramStore
    whole: Sequence[tuple[Share | Fates, Sequence[LayerPrograms]]]
    _slices: dict[Examples, Traced] = field(default_factory=dict)
    _programs: dict[_Key, LayerPrograms] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_edges()

    @cached_property
    def apart(self) -> Apart:
        """The analysis of the loss: how each of its values depends on the examples."""
        sizes = []
        for stage in self.where.plan.stages:
            slices = _not_whole(self.where.slices(stage.layers[0]))
            sizes += [examples.size for examples in slices]
        return taken_apart(self.traced, sizes)

    @cached_property
    def parts(self) -> ReplicaParts:
        """The parts of values that replicas work on."""
        return ReplicaParts(self.where, self.batching)

    @property
    def batching(self) -> Batching:
        """How the tensors between layers, aux and the loss depend on the examples."""
        return self.apart.batching

    def sliced(self, examples: Examples) -> Traced:
        """Returns the layers, traced on a slice of the examples."""
        if examples not in self._slices:
            self._slices[examples] = sliced(self.traced, examples, self.apart)
        return self._slices[examples]

    def programs(self, layout: int, examples: Examples, layer: int) -> LayerPrograms:
        """Returns a layer's programs on a slice of the examples, under the fates of a layout.

        Args:
            layout: the number of the layout.
            examples: the slice of a micro-batch.
            layer: the number of the layer.

        Raises:
            ValueError: on the slice, the layer leaves other residuals than on a whole micro-batch.
        """
        key = layout, examples, layer
        if key not in self._programs:
            # The values of a layer have the same names on a slice, so fates apply to them, too.
            share, whole = self.whole[layout]
            programs = programs_of(self.store, self.sliced(examples), layer, share)
            if _interface(programs.signature) != _interface(whole[layer].signature):
                name = self.traced.graph.label(self.traced.graph.layers[layer])
                raise ValueError(
                    f"layer {name} leaves other values for its backward on {examples.size} "
                    f"examples than on {self.traced.graph.examples}: "
                    "give its stage one device, or use larger micro-batches"
                )
            self._programs[key] = programs
        return self._programs[key]

    def layouts(
        self,
        layout: int,
        split: Mapping[int, SplitSignature],
    ) -> dict[Examples, SliceLayout]:
        """Returns the signatures of layers on each slice: the values that programs take and give.

        Args:
            layout: the number of the layout.
            split: for each layer whose backward runs in two halves, the halves' signatures on a
                whole micro-batch.
        """
        layers: dict[Examples, list[int]] = {}
        for stage in self.where.plan.stages:
            for examples in _not_whole(self.where.slices(stage.layers[0])):
                layers.setdefault(examples, []).extend(stage.layers)
        return {
            examples: self._slice_layout(layout, examples, members, split)
            for examples, members in layers.items()
        }

    def _slice_layout(
        self,
        layout: int,
        examples: Examples,
        layers: Sequence[int],
        split: Mapping[int, SplitSignature],
    ) -> SliceLayout:
        """Returns the signatures of layers on one slice.

        Args:
            layout: the number of the layout.
            examples: the slice.
            layers: the layers that run on the slice.
            split: as in `layouts`.
        """
        programs = {i: self.programs(layout, examples, i) for i in layers}
        halves: dict[int, SplitSignature] = {}
        for i, of_layer in programs.items():
            if i in split and of_layer.halves:
                halves[i] = of_layer.halves.signature
        for i in split.keys() & set(layers):
            assert _interfaces(halves[i]) == _interfaces(split[i]), "it splits as the whole does"
        signatures = {i: of_layer.signature for i, of_layer in programs.items()}
        return SliceLayout(signatures, halves)

    def program(self, row: Row, reads: Sequence[Value]) -> Program:
        """Returns the program of a row between replicas.

        Args:
            row: a row that slices, joins or reduces values.
            reads: the values that it reads.
        """
        shapes = [self.shape(value) for value in reads]
        match row.kind:
            case Kind.SLICE:
                assert isinstance(row.run, SliceRun)
                return cut_program(shapes[0], row.run)
            case Kind.CONCAT:
                assert isinstance(row.run, ConcatRun)
                return join_program(shapes, row.run.axis)
            case Kind.REDUCE if isinstance(row.run, StateRun):
                leaves = dict.fromkeys(value.index for value in reads)
                return state_program(shapes, self._state_parts(row.layer, leaves))
            case Kind.REDUCE if isinstance(row.run, JoinRun) and row.run.weights:
                return weighted_program(shapes[0], row.run.weights)
            case Kind.REDUCE:
                # The row reads the parts of the first result from all replicas, then the parts of
                # the second, and so on. All parts of a result have one shape.
                replicas = len(row.reads) // len(row.writes)
                in_place = isinstance(row.run, AddRun)
                return reduce_program(shapes[::replicas], replicas, in_place=in_place)
            case _:
                raise AssertionError(f"{row} is not a row between replicas")

    def shape(self, value: Value) -> jax.ShapeDtypeStruct:
        """Returns the shape and type of a value between replicas, or of a replica's part of it."""
        array = graph_array(self.traced.graph, value.kind, value.index)
        assert array is not None, f"{value} does not go between replicas"
        whole, spread = shape(array), self.parts.spread(value)
        if value.examples is None or spread.over is not Over.ALONG:
            return whole
        # The axis may have several entries per example, such as one for each token.
        sizes = list(whole.shape)
        rows_per_example = sizes[spread.axis] // self.traced.graph.examples
        sizes[spread.axis] = rows_per_example * value.examples.size
        return jax.ShapeDtypeStruct(tuple(sizes), whole.dtype)

    def loss_parts(self) -> list[Parts | None]:
        """Returns the parts in which replicas make the loss, its weight and each leaf of aux.

        An entry is None if a single device makes the whole value.
        """
        batching = self.batching
        losses = 1 + self.traced.graph.weighted
        spreads = {Value(ValueKind.LOSS, i): batching.loss for i in range(losses)}
        spreads |= {Value(ValueKind.AUX, i): spread for i, spread in enumerate(batching.aux)}
        parts: list[Parts | None] = []
        for value, spread in spreads.items():
            slices = _not_whole(self.parts.makers(value))
            parts.append(Parts(slices, spread) if slices else None)
        return parts

    def _state_parts(self, layer: int, leaves: Iterable[int]) -> list[Parts]:
        """Returns the parts in which a layer's replicas make some leaves of the model state.

        Args:
            layer: the number of the layer.
            leaves: the numbers of the leaves.
        """
        slices = _not_whole(self.where.slices(layer))
        spreads = [self.batching.state[k] for k in leaves]
        return [Parts(slices, spread) for spread in spreads if spread is not None]

    def _check_edges(self) -> None:
        """Checks that tensors between stages with different numbers of replicas can be divided.

        A tensor with an axis of examples is cut along this axis. A sum or mean over the examples is
        shared out: each replica that reads it gets a weighted sum of the senders' values.

        Raises:
            ValueError: a tensor can neither be cut nor shared out.
        """
        graph, widths = self.traced.graph, self.where.plan.replicas
        # If the loss divides a sum by a count, a replica needs both for the same examples. If a sum
        # is shared out, its parts belong to no particular examples. So with such a loss, no tensor
        # may be shared out.
        divides = {Beside.DIVISOR, Beside.GUARD} & set(self.apart.amended.values())
        for tensor, spread in zip(graph.tensors, self.batching.tensors, strict=True):
            layers = (tensor.producer, *tensor.readers)
            stages = sorted({self.where.stage[layer] for layer in layers})
            replicas = [widths[s] for s in stages]
            if len(set(replicas)) == 1 or spread.over in (Over.ALONG, Over.NONE):
                continue
            is_number = jnp.issubdtype(tensor.array.dtype, jnp.inexact)
            can_be_shared = spread.over in REDUCED and is_number and not divides
            if not can_be_shared:
                raise ValueError(
                    f"tensor '{tensor.array.name}' goes from stage to stage without an "
                    f"axis of examples, and stages {stages} have {replicas} replicas: "
                    "give them as many as each other, or move the cut"
                )


def _not_whole(slices: Sequence[Slice]) -> tuple[Examples, ...]:
    """Returns the slices of replicas; none if a single device has all examples."""
    return tuple(examples for examples in slices if examples is not None)


def _interface(signature: Signature) -> object:
    """Returns what a layer's signatures on all slices share: of residuals, only the names.

    Their sizes differ from slice to slice.
    """
    return replace(signature, residuals=()), tuple(array.name for array in signature.residuals)


def _interfaces(halves: SplitSignature) -> object:
    return _interface(halves.input), _interface(halves.weight)


def check_replicable(schedule: Schedule, *, has_order: bool = False) -> None:
    """Checks that stages with replicas can run under a schedule.

    Args:
        schedule: the schedule.
        has_order: whether the plan has an order of tasks of its own.

    Raises:
        ValueError: the order of tasks is chosen by a search, which does not consider replicas.
    """
    if has_order or schedule == AUTO or isinstance(schedule.lists, GivenLists):
        raise ValueError(
            "replicated stages cannot run under an order that a planner has chosen, yet: "
            "use '1f1b', 'zb-h1' or another rule, or one device for each stage"
        )


def check_replicas(
    plan: Plan,
    schedule: Schedule,
    graph: LayerGraph,
    microbatches: int,
) -> None:
    """Checks that a plan with replicas can run.

    Args:
        plan: a plan in which some stage has replicas.
        schedule: the order in which stages run.
        graph: the layers, on a whole micro-batch.
        microbatches: how many micro-batches a step has.

    Raises:
        ValueError: the schedule does not allow replicas, an asynchronous schedule would have to
            carry model state between replicas, or a replica would have no example.
    """
    check_replicable(schedule, has_order=bool(plan.tasks))
    if not schedule.synchronous:
        check_turns(schedule, plan, microbatches)
        if written := sorted(graph.state[k].name for k in written_state(graph)):
            raise ValueError(
                f"model state '{written[0]}' goes from micro-batch to micro-batch, "
                f"and under {schedule.name} the devices of a stage take turns in these: "
                "use a synchronous schedule, or one device for each stage"
            )
        return
    widest = max(plan.replicas)
    if widest > graph.examples:
        raise ValueError(
            f"stage {plan.replicas.index(widest)} has {widest} replicas, "
            f"and a micro-batch {graph.examples} examples: "
            "each replica needs one at least. "
            "Use fewer replicas, fewer micro-batches or larger batches"
        )
