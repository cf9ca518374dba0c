"""A traced loss and a plan, made ready to run: programs compiled, rows bound."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar, assert_never

import jax

from jvpipe import _jax
from jvpipe._jax import Device
from jvpipe.ir.buffers import Buffer, Lowered, Peak, Spot, peaks
from jvpipe.ir.examples import Batching
from jvpipe.ir.fates import Fates
from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.layers import LayerGraph, Spec, SplitSignature
from jvpipe.ir.plan import Plan
from jvpipe.ir.rows import (
    AddRun,
    AskRun,
    LayerRun,
    OfferRun,
    PieceRun,
    Row,
    Run,
    SettleRun,
    ShiftRun,
    SumRun,
)
from jvpipe.ir.task import TaskLists
from jvpipe.ir.values import VALUES, Value, ValueKind
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.placement import Placement
from jvpipe.lowering.projection import projected, telling_all
from jvpipe.lowering.receipts import with_receipts
from jvpipe.lowering.step import lower_evaluation, lower_step
from jvpipe.lowering.stream.lower import StreamLowering
from jvpipe.lowering.stream.period import Step, dropping
from jvpipe.lowering.stream.timeline import PlanSpan
from jvpipe.programs import weights
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.loss import loss_program, zeros_program
from jvpipe.programs.model import (
    Share,
    backward_program,
    evaluation_program,
    forward_program,
    input_program,
    layer_programs,
    piece_program,
    single_backward_program,
    weight_program,
)
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.slices import reduce_program
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.runtime.binding import Bound, bind
from jvpipe.runtime.hosts import Hosts
from jvpipe.runtime.inner_layout import laid_graph, laid_programs
from jvpipe.runtime.phases import phase
from jvpipe.runtime.replicas import Replicas, check_replicas
from jvpipe.runtime.state import Placing
from jvpipe.runtime.value_shapes import shape, value_shape, value_spec
from jvpipe.schedules.planned import lists_of, pipeline_length
from jvpipe.schedules.schedule import Schedule
from jvpipe.trace.graph import Traced

R = TypeVar("R")


@dataclass(eq=False)
class CompiledPlan:
    """Everything that a step of one batch shape needs; what is not asked for is not compiled."""

    traced: Traced
    plan: Plan
    schedule: Schedule
    optimizer: OptimizerCut
    microbatches: int
    devices: tuple[Device, ...]
    store: ProgramStore
    previous: tuple["CompiledPlan", int] | None = (
        None  # where a stream came from, at which micro-batch of its lowering
    )
    hosts: Hosts | None = None
    stand_in: Device | None = (
        None  # of this process, for which all is compiled: what others would hold is asked
    )

    def __post_init__(self) -> None:
        if self.plan.keep_last and not self.schedule.synchronous:
            raise ValueError(
                f"checkpoint='except_last' means nothing under {self.schedule.name}: a stream has no last one"
            )
        self.schedule.check(pipeline_length(self.plan, self.schedule), self.microbatches)
        self.executables: dict[
            tuple[Hashable, Device], Program
        ] = {}  # which programs are used where
        self.bound_steps: dict[int, tuple[Step, Bound]] = {}
        self.whole_rows: list[list[str]] = []  # of all processes, as they were bound
        self.bound_drains: dict[int, tuple[Step, Bound]] = {}
        graph = self.traced.graph
        self.persistent = Placement(graph, self.plan).lasting(self.optimizer)
        kept: list[Share | Fates] = [
            Fates.of(graph, self.plan),
            *(["all"] if self.plan.keep_last else []),
        ]
        self.programs = [self._layer_programs(share) for share in kept]
        self.replicas: Replicas | None = None
        if self.plan.replicated:
            check_replicas(self.plan, self.schedule, graph, self.microbatches)
        if self.plan.replicated and self.schedule.synchronous:  # else they take turns
            whole = list(zip(kept, self.programs, strict=True))
            self.replicas = Replicas(self.traced, self.plan, self.store, whole)

    @cached_property
    def graph(self) -> LayerGraph:
        """The layers, with what goes between them as it lies; replicas have it whole on each device of a group."""
        group = self._group
        return laid_graph(self.store, self.traced, group) if group else self.traced.graph

    @property
    def _group(self) -> Device | None:
        """A group of devices that what layers make is laid over."""
        laid = self.traced.loss.sharding and not self.plan.replicated
        return next(filter(_jax.is_own, self.devices)) if laid else None

    def _layer_programs(self, share: Share | Fates) -> tuple[LayerPrograms, ...]:
        made, sharding, group = (
            layer_programs(self.store, self.traced, share),
            self.traced.loss.sharding,
            self._group,
        )
        return (
            laid_programs(self.store, self.graph, made, group, sharding)
            if group and sharding
            else made
        )

    @cached_property
    def lists(self) -> TaskLists:
        """The tasks of each device in a synchronous step."""
        return lists_of(self.plan, self.schedule, self.microbatches)

    @cached_property
    def _halves(self) -> list[dict[int, SplitSignature]]:
        """What the halves of each layer's backward take and give, if backwards are split; like `programs`."""
        if not self.schedule.synchronous or not any(
            task.kind is Kind.I for tasks in self.lists for task in tasks
        ):
            return [{} for _ in self.programs]
        return [
            {
                i: p.halves.signature
                for i, p in enumerate(programs)
                if p.halves and i not in self.plan.unsplit
            }
            for programs in self.programs
        ]

    def layouts(self, first: int = 0) -> list[MicrobatchLayout]:
        """The layout of each micro-batch of a step; `first` numbers its programs."""
        graph = self.graph
        usual, *last = [
            MicrobatchLayout(
                number,
                graph,
                self.plan,
                Fates.of(graph, plan),
                [p.signature for p in programs],
                halves,
                self.replicas.layouts(number - first, halves) if self.replicas else {},
            )
            for number, (plan, programs, halves) in enumerate(
                zip(
                    (self.plan, self.plan.without_fates()),
                    self.programs,
                    self._halves,
                    strict=False,
                ),
                first,
            )
        ]
        return [*[usual] * (self.microbatches - len(last)), *last]

    @property
    def batching(self) -> Batching | None:
        """How what stages exchange lies over the examples, if one is replicated."""
        return self.replicas.batching if self.replicas else None

    @cached_property
    def step(self) -> Bound:
        """A synchronous step."""
        return self.bound(
            lower_step(self.graph, self.layouts(), self.lists, self.optimizer, self.batching)
        )

    @cached_property
    def placing(self) -> Placing:
        """Where the arrays lie between steps."""
        return Placing(self.graph, self.optimizer, self.persistent, self.devices)

    @property
    def lowered(self) -> Lowered:
        """The rows of a synchronous step."""
        return self.step.lowered

    @cached_property
    def spans(self) -> tuple[PlanSpan, ...]:
        """The plans of a stream, in turn: this one, after those under which it began."""
        if self.previous is None:
            return (PlanSpan(0, self.layouts()[0]),)
        earlier, start = self.previous
        return (*earlier.spans, PlanSpan(start, self.layouts(len(earlier.spans))[0]))

    @property
    def _span_programs(self) -> list[Sequence[LayerPrograms]]:
        return [*(self.previous[0]._span_programs if self.previous else ()), self.programs[0]]

    @cached_property
    def stream(self) -> StreamLowering:
        """The steps of an asynchronous stream, lowered."""
        graph, M = self.graph, self.microbatches
        return StreamLowering(
            graph, self.spans, self.schedule, M, self.optimizer, self._in_flight_at_switch
        )

    @property
    def _in_flight_at_switch(self) -> dict[int, frozenset[Spot]]:
        """The values in flight when the stream came from one plan to the next, by step."""
        if self.previous is None:
            return {}
        earlier, start = self.previous
        step = start // self.microbatches
        had = {step: frozenset(earlier.stream.steps[step - 1].after)} if step else {}
        return earlier._in_flight_at_switch | had

    def stream_step(self, steps: int) -> tuple[Step, Bound]:
        """The step of a stream after so many steps."""
        n = min(steps, len(self.stream.steps) - 1)
        if n not in self.bound_steps:
            step = self.stream.steps[n]
            if self.previous and n == self.stream.switch_step > 0:
                step = dropping(step, self.previous[0].stream.steps[n - 1])
            self.bound_steps[n] = step, self.bound(step.lowered, self._span_programs)
        return self.bound_steps[n]

    def drain(self, steps: int) -> tuple[Step, Bound]:
        """The rows that finish a stream after so many steps."""
        n = min(steps, len(self.stream.steps))
        if n not in self.bound_drains:
            step = self.stream.drain(n)
            assert step.before == self.stream.steps[n - 1].after
            self.bound_drains[n] = step, self.bound(step.lowered, self._span_programs)
        return self.bound_drains[n]

    def representative(self, steps: int) -> int:
        """The steps of a stream after which it is as after so many: the first ones once it repeats itself."""
        return min(steps, len(self.stream.steps)) if steps else 0

    def without_previous(self, steps: int) -> tuple["CompiledPlan", int]:
        """Drops the plans that the stream came from once nothing of them is in flight; tells where its stream is."""
        if self.previous is None or steps < len(self.stream.steps):
            return self, steps
        alone = replace(self, previous=None)
        assert alone.stream.steps[-1].after == self.stream.steps[-1].after
        return alone, len(alone.stream.steps)

    @cached_property
    def peaks(self) -> tuple[Peak, ...]:
        """The most bytes on each device, and last on the host, in any step."""
        return self.peaks_of(*self.bounds)

    @property
    def bounds(self) -> list[Bound]:
        """All that training runs: the step, or those of a stream and what ends it after each of them."""
        if self.schedule.synchronous:
            return [self.step]
        numbers = range(self.stream.switch_step, len(self.stream.steps))
        steps = [self.stream_step(n)[1] for n in numbers]
        return [*steps, *(self.drain(n + 1)[1] for n in numbers)]

    def peaks_of(self, *bounds: Bound) -> tuple[Peak, ...]:
        """The most bytes on each device, and last on the host, while one of these runs."""
        by_bound = [peaks(bound.laid, len(self.devices), bound.temporary_bytes) for bound in bounds]
        return tuple(
            max(column, key=lambda peak: peak.bytes) for column in zip(*by_bound, strict=True)
        )

    @cached_property
    def evaluation_peaks(self) -> tuple[Peak, ...]:
        """The same for an evaluation."""
        return self.peaks_of(self.evaluation)

    @cached_property
    def evaluation(self) -> Bound:
        """The forward alone."""
        lowered = lower_evaluation(
            self.graph, self.plan, self.optimizer, self.microbatches, self.batching
        )
        return self.bound(lowered)

    def bound(self, lowered: Lowered, programs: Sequence[Sequence[LayerPrograms]] = ()) -> Bound:
        """Rows made ready to run; `programs` are those of the rows' layouts, if they are not this plan's."""
        known, crossing_of = programs or self.programs, _no_crossing
        devices = (self.stand_in,) * len(self.devices) if self.stand_in else self.devices
        if self.hosts is not None:
            processes = [device.process_index for device in self.devices]
            lowered = whole = with_receipts(telling_all(lowered, processes), processes)
            if self.stand_in is None:
                rows = [
                    f"{row} {row.place} {row.reads} {row.writes} {row.frees}" for row in whole.rows
                ]
                self.whole_rows.append(rows)
                lowered = projected(whole, processes, self.hosts.process)
                crossing_of = partial(self._crossing, whole, known)
        tasks = {_task(row): row for row in lowered.rows if KINDS[row.kind].computes}
        wanted = [(self._laid(lowered, row, known), devices[row.place]) for row in tasks.values()]
        with phase("compiling, or loading what was compiled"):
            executables = dict(zip(tasks, self.store.compile(wanted), strict=True))
        self.executables |= {(program.key, device): program for program, device in wanted}
        watched = {
            task for task, (program, _) in zip(tasks, wanted, strict=True) if program.calls_host
        }
        return bind(
            lowered,
            devices,
            lambda row: executables[_task(row)],
            lambda row: _task(row) in watched,
            self._mark,
            crossing_of,
            self.spec,
        )

    def _crossing(
        self, whole: Lowered, programs: Sequence[Sequence[LayerPrograms]], row: Row
    ) -> Callable[..., Any] | None:
        """Gives what runs this process's half of a copy between processes; None for other rows."""
        assert self.hosts is not None
        if isinstance(row.run, OfferRun):
            return self.hosts.offering(row.run)
        if isinstance(row.run, AskRun):
            like = self._crossing_array(
                whole, programs, copied := whole.rows[row.run.number].reads[0]
            )
            placed = _jax.placed(
                like, self.devices[row.place], self.spec(whole.buffers[copied].value)
            )
            return self.hosts.asking(row.run, whole.rows[row.run.number], placed)
        return None

    def _crossing_array(
        self, whole: Lowered, programs: Sequence[Sequence[LayerPrograms]], b: int
    ) -> jax.ShapeDtypeStruct:
        """The shape and type of an array that another process makes."""
        array = self.known_shape(whole.buffers[b].value)
        if array is None:
            maker = next(row for row in whole.rows if b in row.writes)
            program = self._program(whole, maker, programs)
            array = jax.eval_shape(program.fn, *program.inputs)[maker.writes.index(b)]
        return array

    def _mark(self, moved: Buffer) -> Callable[[], Any] | None:
        """Gives what compiles a program that says when an array has arrived; None if nothing overwrites that array."""
        if not VALUES[moved.value.kind].alone and moved.value.kind is not ValueKind.PARAMETER:
            return None
        array = self._shape(moved.value)
        program = _arrival([array]).laid([self.spec(moved.value)], ())
        return lambda: self.store.compile([(program, self.devices[moved.memory])])[0]

    def _laid(
        self, lowered: Lowered, row: Row, programs: Sequence[Sequence[LayerPrograms]]
    ) -> Program:
        """The program of a row, told how what it reads and writes lies over the devices of a place."""
        known = (
            self._layer(row, programs)
            if isinstance(row.run, LayerRun) and row.kind is not Kind.E
            else None
        )
        takes, gives = (
            [self.spec(lowered.buffers[b].value, known) for b in ids]
            for ids in (row.reads, row.writes)
        )
        return self._program(lowered, row, programs).laid(takes, gives)

    def spec(self, value: Value, programs: LayerPrograms | None = None) -> Spec:
        """How a value lies over the devices of a group.

        Args:
            value: of a step.
            programs: of its layer, if they are not those of this plan.
        """
        if value.kind is ValueKind.RESIDUAL:
            return (programs or self.programs[0][value.layer]).signature.residuals[value.index].spec
        return value_spec(self.graph, self.optimizer, value)

    def _program(
        self, lowered: Lowered, row: Row, programs: Sequence[Sequence[LayerPrograms]]
    ) -> Program:
        graph, layer = self.traced.graph, row.layer
        written = [lowered.buffers[b].value for b in row.writes]
        match row.kind:
            case Kind.F | Kind.R:
                return forward_program(self._layer(row, programs), recompute=row.kind is Kind.R)
            case Kind.B:
                return self.backward_program(self._layer(row, programs))
            case Kind.I:
                return input_program(self._layer(row, programs))
            case Kind.W:
                return weight_program(self._layer(row, programs))
            case Kind.E:
                return evaluation_program(self._traced(row).bodies[layer])
            case Kind.ZERO:
                return zeros_program([self._shape(v) for v in written])
            case Kind.SHIFT:
                return weights.shifted(
                    [self._shape(v) for v in written], _operand(row, ShiftRun).updates
                )
            case Kind.SETTLE:
                shapes = [
                    self._shape(v)
                    for v in written
                    if v.kind in (ValueKind.DELTA, ValueKind.APPLIED)
                ]
                if self.schedule.decay is None:
                    return weights.difference(shapes)
                tau = _operand(row, SettleRun).tau
                return weights.settled(
                    shapes, tau, self.schedule.decay, self.schedule.anneal_updates
                )
            case Kind.WEIGHT:
                return weights.total(self.traced.loss_shapes[1], _operand(row, SumRun).count)
            case Kind.LOSS:
                if self.replicas:
                    values = [lowered.buffers[b].value for b in row.reads]
                    shapes = [
                        self._shape(v) if v.kind is ValueKind.LOSS else self.replicas.shape(v)
                        for v in values
                    ]
                    return loss_program(
                        graph, shapes, self.microbatches, self.replicas.loss_parts()
                    )
                parts = [self.traced.loss_shapes, [shape(a) for a in graph.aux]]
                shapes = [s for part in parts for s in part for _ in range(self.microbatches)]
                return loss_program(graph, shapes, self.microbatches)
            case Kind.REDUCE if self.replicas is None:
                shapes = [self._shape(lowered.buffers[b].value) for b in row.reads[::2]]
                return reduce_program(shapes, 2, in_place=isinstance(row.run, AddRun))
            case Kind.SLICE | Kind.CONCAT | Kind.REDUCE:
                assert self.replicas, "without replicas nothing is cut"
                return self.replicas.program(row, [lowered.buffers[b].value for b in row.reads])
            case Kind.U:
                piece = _operand(row, PieceRun)
                return piece_program(self.optimizer.update[piece.piece], keeps=piece.keeps)
            case Kind.ARRIVE:
                return _arrival([self._shape(lowered.buffers[b].value) for b in row.reads])
            case (
                Kind.FEED
                | Kind.SEND
                | Kind.RETURN
                | Kind.MOVE
                | Kind.OUT
                | Kind.FREE
                | Kind.IN
                | Kind.DROP
                | Kind.RECEIPT
            ):
                raise AssertionError(f"{row} runs no program")
            case _:
                assert_never(row.kind)

    def _layer(self, row: Row, programs: Sequence[Sequence[LayerPrograms]]) -> LayerPrograms:
        """The programs of a row's layer, on the examples that it is for."""
        run = _operand(row, LayerRun)
        if run.examples is None:
            return programs[run.layout][row.layer]
        assert self.replicas
        return self.replicas.programs(run.layout, run.examples, row.layer)

    def _traced(self, row: Row) -> Traced:
        """The layers on the examples that a row is for."""
        if not isinstance(row.run, LayerRun) or row.run.examples is None:
            return self.traced
        assert self.replicas
        return self.replicas.sliced(row.run.examples)

    def backward_program(self, programs: LayerPrograms) -> Program:
        """A layer's backward; it adds to sums unless every micro-batch is an update."""
        single = not self.schedule.synchronous and self.schedule.period(self.microbatches) == 1
        return single_backward_program(programs) if single else backward_program(programs)

    def lying(self, value: Value, place: int) -> jax.ShapeDtypeStruct:
        """The shape and type of what lies on the devices between steps, and where: at a place."""
        return _jax.placed(self._shape(value), self.devices[place], self.spec(value))

    def known_shape(self, value: Value) -> jax.ShapeDtypeStruct | None:
        """The shape and type of a value, or of the part of it that a replica has; None where a program alone knows."""
        if self.replicas and value.kind in (ValueKind.TENSOR, ValueKind.COTANGENT, ValueKind.AUX):
            return self.replicas.shape(value)
        return value_shape(self.traced, self.optimizer, value)

    def _shape(self, value: Value) -> jax.ShapeDtypeStruct:
        array = self.known_shape(value)
        assert array is not None, f"nobody says what {value} is like"
        return array


def _operand(row: Row, kind: type[R]) -> R:
    """The operand of a row, which is of this kind."""
    assert isinstance(row.run, kind), row
    return row.run


def _task(row: Row) -> tuple[Kind, int, Run, int, int, int]:
    """The key of a row's executable: rows that differ in the micro-batch alone share one."""
    return row.kind, row.layer, row.run, row.place, len(row.reads), len(row.writes)


def _no_crossing(row: Row) -> None:
    """One process has no copies to others."""


def _arrival(arrays: Sequence[jax.ShapeDtypeStruct]) -> Program:
    """A program that yields a mark once arrays are there."""
    key = "arrival", *((array.shape, str(array.dtype)) for array in arrays)
    return Program(key, lambda *xs: [jax.numpy.int32(0)], tuple(arrays))
