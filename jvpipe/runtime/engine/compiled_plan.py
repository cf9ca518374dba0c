"""A compiled plan: a traced loss under a plan, with its programs compiled and its rows bound.

A row is one program or one copy on one place (a device, or a mesh of several). A plan becomes ready
to run in four phases. Each line shows a phase and what it makes:

    lay out    layouts: which values each layer's programs take and leave, under the plan's fates
    lower      rows: what runs where and in which order, over numbered buffers
    compile    programs: one for each distinct row and device
    bind       instructions: rows with their programs, so that running needs no look-ups

In this file, a layout is always the result of the first phase. How an array is cut over the devices
of a mesh is called its spec. Each phase runs when its result is first needed. So a plan that is
only compared with other plans compiles nothing. If several processes run a plan, each binds only
its own part of the rows. These parts fit together only if all processes have lowered the plan to
the same rows (see `agree_on_rows`).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax

from jvpipe import _jax
from jvpipe._jax import Device
from jvpipe.ir.buffers import Buffer, Lowered, Peak, Spot, peaks
from jvpipe.ir.examples import Batching
from jvpipe.ir.fates import Fates
from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.layers import LayerGraph, Spec, SplitSignature
from jvpipe.ir.plan import Plan
from jvpipe.ir.rows import AskRun, OfferRun, Row
from jvpipe.ir.task import TaskLists
from jvpipe.ir.values import VALUES, Value, ValueKind
from jvpipe.lowering.group import grouped
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.placement import Placement
from jvpipe.lowering.projection import projected, telling_all
from jvpipe.lowering.receipts import with_receipts
from jvpipe.lowering.step import lower_evaluation, lower_step
from jvpipe.lowering.stream.lower import StreamLowering
from jvpipe.lowering.stream.period import Step, dropping
from jvpipe.lowering.stream.timeline import PlanSpan
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.model import Share, layer_programs
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.store import Program, ProgramStore
from jvpipe.runtime.engine.binding import Bound, bind
from jvpipe.runtime.engine.hosts import Carried, Hosts
from jvpipe.runtime.engine.inner_layout import laid_graph, laid_programs
from jvpipe.runtime.engine.phases import phase
from jvpipe.runtime.engine.placing import Placing
from jvpipe.runtime.engine.replicas import Replicas, check_replicas
from jvpipe.runtime.engine.row_programs import RowPrograms, arrival
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B
from jvpipe.schedules.planned import lists_of, pipeline_length
from jvpipe.schedules.schedule import Schedule
from jvpipe.trace.graph import Traced

LayerLayouts = Sequence[Sequence[LayerPrograms]]
"""The programs of all layers, for each layout. Rows name a layout by its position here."""


@dataclass(eq=False)
class CompiledPlan:
    """Everything that a step needs for one batch shape; programs are compiled when first needed.

    A stream is an asynchronous run, whose pipeline is not flushed between steps.

    Args:
        traced: the model.
        plan: the cuts, places and fates of the model's layers.
        schedule: the order of the tasks.
        optimizer: the optimizer's update, cut into pieces.
        microbatches: how many micro-batches a step has.
        devices: the device of each place of the plan.
        store: compiles programs, and keeps them.
        previous: in a stream whose plan has changed: the compiled plan before this one, and the
            number of the first micro-batch under this one. The number counts the micro-batches of
            the earlier plan's lowered steps. A step that the run repeats is lowered only once, so
            the number may be smaller than in the run.
        hosts: the processes that run the plan together, if there are several.
        stand_in: a device of this process to use in place of all devices. Programs can then be
            compiled, and bytes counted, although the devices belong to other processes.
        grouped: whether consecutive layers of a stage run as one program.
        warmup_optimizer: the update cut for the synchronous steps that begin an asynchronous run;
            None if there are none.
    """

    traced: Traced
    plan: Plan
    schedule: Schedule
    optimizer: OptimizerCut
    microbatches: int
    devices: tuple[Device, ...]
    store: ProgramStore
    previous: tuple["CompiledPlan", int] | None = None
    hosts: Hosts | None = None
    stand_in: Device | None = None
    grouped: bool = False
    warmup_optimizer: OptimizerCut | None = None

    def __post_init__(self) -> None:
        if self.plan.keep_last and not self.schedule.synchronous:
            raise ValueError(
                f"checkpoint='except_last' means nothing under {self.schedule.name}: a stream has no last micro-batch"
            )
        self.schedule.check(pipeline_length(self.plan, self.schedule), self.microbatches)
        # The programs of all rows that were bound, by their keys and devices.
        self.executables: dict[tuple[Hashable, Device], Program] = {}
        self.compile_s = 0.0  # how long these programs took to compile, one after another
        # Making any of the next values compiles programs, which takes long. So none is a
        # `cached_property`: in Python 3.11, all plans would share its lock and wait for each other.
        self.bound_step: Bound | None = None
        self._evaluation: Bound | None = None
        self._peaks: tuple[Peak, ...] | None = None
        self._warmup: CompiledPlan | None = None
        self.bound_steps: dict[int, tuple[Step, Bound]] = {}
        self.bound_drains: dict[int, tuple[Step, Bound]] = {}
        graph = self.traced.graph
        where = Placement(graph, self.plan, self.optimizer)
        self.persistent = where.lasting
        fates = Fates.of(graph, self.plan)
        # The residuals that each layout keeps. The second layout is that of the last micro-batch.
        shares: list[Share | Fates] = [fates, "all"] if self.plan.keep_last else [fates]
        self.programs = [self._layer_programs(share) for share in shares]
        self.replicas: Replicas | None = None
        if self.plan.replicated:
            check_replicas(self.plan, self.schedule, graph, self.microbatches)
        # In a synchronous schedule, each replica works on a slice of every micro-batch. In an
        # asynchronous one, replicas take turns with whole micro-batches, and nothing is sliced.
        if self.plan.replicated and self.schedule.synchronous:
            whole = list(zip(shares, self.programs, strict=True))
            self.replicas = Replicas(self.traced, where, self.store, whole)

    @cached_property
    def graph(self) -> LayerGraph:
        """The model's layers.

        If places are meshes, each tensor between layers has a spec, which says how it is cut over
        the devices of a mesh. With replicas, each device of a mesh has the whole tensor.
        """
        group = self._group
        return laid_graph(self.store, self.traced, group) if group else self.traced.graph

    @property
    def _group(self) -> Device | None:
        """A mesh of this process, if tensors between layers are cut over meshes; else None."""
        is_laid = self.traced.loss.sharding and not self.plan.replicated
        return next(filter(_jax.is_own, self.devices)) if is_laid else None

    def _layer_programs(self, share: Share | Fates) -> tuple[LayerPrograms, ...]:
        programs = layer_programs(self.store, self.traced, share)
        group, sharding = self._group, self.traced.loss.sharding
        if not (group and sharding):
            return programs
        return laid_programs(self.store, self.graph, programs, group, sharding)

    @cached_property
    def row_programs(self) -> RowPrograms:
        """The programs of rows for micro-batches that run under this plan."""
        schedule = self.schedule
        return RowPrograms(
            self.traced,
            self.graph,
            self.optimizer,
            schedule,
            schedule.synchronous or schedule.period(self.microbatches) > 1,
            self.programs,
            self.replicas,
        )

    @cached_property
    def lists(self) -> TaskLists:
        """The tasks of each device in a synchronous step."""
        return lists_of(self.plan, self.schedule, self.microbatches)

    @cached_property
    def _halves(self) -> list[dict[int, SplitSignature]]:
        """For each layout, the signatures of the two halves of split backwards, by layer.

        The half I of a backward gives the cotangents of the layer's inputs. The half W adds the
        gradients of its parameters to their sums.
        """
        splits = self.schedule.synchronous and any(
            task.kind is Kind.I for tasks in self.lists for task in tasks
        )
        return [
            {
                layer: of_layer.halves.signature
                for layer, of_layer in enumerate(programs)
                if splits and of_layer.halves and layer not in self.plan.unsplit
            }
            for programs in self.programs
        ]

    def layouts(self, first: int = 0) -> list[MicrobatchLayout]:
        """Returns the layout of each micro-batch of a step.

        Under `checkpoint="except_last"` the last micro-batch keeps every value, so it has a layout
        of its own.

        Args:
            first: the number of this plan's first layout. Rows name layouts by number. If earlier
                micro-batches run under another plan, that plan's layouts have the first numbers.
        """
        plans = [self.plan, self.plan.without_fates()][: len(self.programs)]
        usual, *last = [self._layout(i, first + i, plan) for i, plan in enumerate(plans)]
        return [*[usual] * (self.microbatches - len(last)), *last]

    def _layout(self, index: int, number: int, plan: Plan) -> MicrobatchLayout:
        """Returns the layout of `self.programs[index]`; rows name the layout by `number`."""
        halves = self._halves[index]
        signatures = [programs.signature for programs in self.programs[index]]
        slices = self.replicas.layouts(index, halves) if self.replicas else {}
        fates = Fates.of(self.graph, plan)
        return MicrobatchLayout(number, self.graph, self.plan, fates, signatures, halves, slices)

    @property
    def batching(self) -> Batching | None:
        """How values depend on a micro-batch's examples; None unless replicas work on slices.

        An activation has a part for each example, for instance, and a loss is a mean over them.
        """
        return self.replicas.batching if self.replicas else None

    @property
    def step(self) -> Bound:
        """A synchronous step."""
        if self.bound_step is None:
            layouts, lists, batching = self.layouts(), self.lists, self.batching
            lowered = lower_step(self.graph, layouts, lists, self.optimizer, batching)
            self.bound_step = self.bound(lowered)
        return self.bound_step

    @property
    def warmup(self) -> "CompiledPlan | None":
        """The same plan for the synchronous steps that begin an asynchronous run."""
        if self._warmup is None and (optimizer := self.warmup_optimizer):
            self._warmup = replace(
                self.after(None), warmup_optimizer=None, schedule=ONE_F_ONE_B, optimizer=optimizer
            )
        return self._warmup

    @cached_property
    def placing(self) -> Placing:
        """The placing of the arrays that outlive a step."""
        return Placing(self.graph, self.optimizer, self.persistent, self.devices)

    @property
    def lowered(self) -> Lowered:
        """The rows of a synchronous step."""
        return self.step.lowered

    @cached_property
    def spans(self) -> tuple[PlanSpan, ...]:
        """The parts of a stream: one under each earlier plan, then one under this plan."""
        if self.previous is None:
            return (PlanSpan(0, self.layouts()[0]),)
        earlier, start = self.previous
        return (*earlier.spans, PlanSpan(start, self.layouts(len(earlier.spans))[0]))

    @property
    def _span_programs(self) -> list[Sequence[LayerPrograms]]:
        """The programs of all layers under each plan of a stream, in the order of `spans`."""
        earlier = self.previous[0]._span_programs if self.previous else []
        return [*earlier, self.programs[0]]

    @cached_property
    def stream(self) -> StreamLowering:
        """The steps of an asynchronous stream, lowered."""
        return StreamLowering(
            self.graph,
            self.spans,
            self.schedule,
            self.microbatches,
            self.optimizer,
            self._in_flight_at_switch,
        )

    @property
    def _in_flight_at_switch(self) -> dict[int, frozenset[Spot]]:
        """The arrays in flight at each change of plan in the stream, by the step of the change."""
        if self.previous is None:
            return {}
        earlier, start = self.previous
        in_flight = earlier._in_flight_at_switch
        step = start // self.microbatches
        if step == 0:
            return in_flight
        return in_flight | {step: frozenset(earlier.stream.steps[step - 1].after)}

    def stream_step(self, steps: int) -> tuple[Step, Bound]:
        """Returns the step that a stream runs after its first `steps` steps."""
        # From some step on, all steps of a stream are alike, so the last lowered one is repeated.
        n = min(steps, len(self.stream.steps) - 1)
        if n not in self.bound_steps:
            step = self.stream.steps[n]
            if self.previous and n == self.stream.switch_step > 0:
                # The first step of the new plan also frees the arrays that the old plan has left.
                step = dropping(step, self.previous[0].stream.steps[n - 1])
            self.bound_steps[n] = step, self.bound(step.lowered, self._span_programs)
        return self.bound_steps[n]

    def drain(self, steps: int) -> tuple[Step, Bound]:
        """Returns the rows that finish what the first `steps` steps of a stream leave in flight."""
        n = min(steps, len(self.stream.steps))
        if n not in self.bound_drains:
            step = self.stream.drain(n)
            # A drain begins with exactly the arrays that the step before it has left.
            assert step.before == self.stream.steps[n - 1].after
            self.bound_drains[n] = step, self.bound(step.lowered, self._span_programs)
        return self.bound_drains[n]

    def representative(self, steps: int) -> int:
        """Returns how many lowered steps leave the same arrays in flight as `steps` steps do.

        All steps after the last lowered one repeat it, and so leave the same arrays as it does.
        """
        return min(steps, len(self.stream.steps)) if steps else 0

    def after(self, previous: tuple["CompiledPlan", int] | None) -> "CompiledPlan":
        """Returns the same plan after another one in a stream, without groups of layers.

        With groups, a plan may need more memory, so its peaks must be checked before groups run.

        Args:
            previous: as the attribute.
        """
        return replace(self, previous=previous, grouped=False)

    def without_previous(self, steps: int) -> tuple["CompiledPlan", int]:
        """Drops the stream's earlier plans, once no micro-batch of theirs is in flight.

        Args:
            steps: how many steps the stream has had.

        Returns:
            The compiled plan without earlier plans, and the number of steps after which a stream
            under this plan alone has the same arrays in flight.
        """
        if self.previous is None or steps < len(self.stream.steps):
            return self, steps
        # Compare this stream with one that runs under this plan alone. Once the micro-batches of
        # the old plans have passed, both repeat the same step, so the state fits both. Only the
        # number of steps before that step differs.
        alone = self.after(None)
        assert alone.stream.steps[-1].after == self.stream.steps[-1].after
        return alone, len(alone.stream.steps)

    @property
    def peaks(self) -> tuple[Peak, ...]:
        """The most bytes on each device, and last on the host, in any step."""
        if self._peaks is None:
            self._peaks = self.peaks_of(*self.bounds)
        return self._peaks

    @property
    def bounds(self) -> list[Bound]:
        """The bound rows of training: a step, or the steps of a stream with a drain after each.

        The synchronous steps that begin the run come first, if there are any.
        """
        if self.schedule.synchronous:
            return [self.step]
        first = [] if self.previous or self.warmup is None else [self.warmup.step]
        # A stream may be drained after any step, and a drain may hold more bytes than a step.
        numbers = range(self.stream.switch_step, len(self.stream.steps))
        steps = [self.stream_step(n)[1] for n in numbers]
        drains = [self.drain(n + 1)[1] for n in numbers]
        return [*first, *steps, *drains]

    def peaks_of(self, *bounds: Bound) -> tuple[Peak, ...]:
        """Returns the most bytes on each device, and last on the host, in any of these rows."""
        places = len(self.devices)
        by_bound = [peaks(bound.laid, places, bound.temporary_bytes) for bound in bounds]
        by_place = zip(*by_bound, strict=True)
        return tuple(max(of_place, key=lambda peak: peak.bytes) for of_place in by_place)

    @cached_property
    def evaluation_peaks(self) -> tuple[Peak, ...]:
        """The most bytes on each device, and last on the host, in an evaluation."""
        return self.peaks_of(self.evaluation)

    @property
    def evaluation(self) -> Bound:
        """The rows of the forwards, for an evaluation."""
        if self._evaluation is None:
            lowered = lower_evaluation(
                self.graph, self.plan, self.optimizer, self.microbatches, self.batching
            )
            self._evaluation = self.bound(lowered)
        return self._evaluation

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation has been asked for."""
        return self._evaluation is not None

    def bound(self, lowered: Lowered, layouts: LayerLayouts = ()) -> Bound:
        """Compiles the programs of rows, and binds each row to its program.

        If there are several processes, all lower the same rows. Each process binds the rows of its
        own places, and its own half of each copy between processes.

        Args:
            lowered: the rows.
            layouts: the programs of all layers for each layout, in the order of the layouts'
                numbers; by default, the programs of this plan's layouts.
        """
        rows = replace(self.row_programs, layouts=layouts or self.programs)
        devices = (self.stand_in,) * len(self.devices) if self.stand_in else self.devices
        whole, all_rows = lowered, ()
        if self.hosts is not None:
            processes = [device.process_index for device in self.devices]
            lowered = whole = with_receipts(telling_all(lowered, processes), processes)
            if self.stand_in is None:
                all_rows = whole.rows
                lowered = projected(whole, processes, self.hosts.process)
        if self.grouped:
            lowered = _in_groups(lowered, rows)
        # Rows that differ only in their micro-batch share an executable.
        tasks = _tasks(lowered)
        programs = [(rows.laid(lowered, row), devices[row.place]) for row in tasks.values()]
        with phase("compiling, or loading what was compiled"):
            executables = dict(zip(tasks, self.store.compile(programs), strict=True))
        self.executables |= {(program.key, device): program for program, device in programs}
        self.compile_s = self.store.compile_s(self.executables)
        by_task = zip(tasks, programs, strict=True)
        can_fail = {task for task, (program, _) in by_task if program.calls_host}
        bound = bind(
            lowered,
            devices,
            executable_of=lambda row: executables[_task(row)],
            calls_host=lambda row: _task(row) in can_fail,
            mark_of=self._mark,
            crossing_of=partial(self._crossing, whole, rows),
            spec_of=self.spec,
        )
        return replace(bound, whole=all_rows)

    def _crossing(self, whole: Lowered, rows: RowPrograms, row: Row) -> Callable[..., Any] | None:
        """Returns a function that runs this process's half of a copy between processes.

        Returns None for a row that is not such a copy.
        """
        if not isinstance(row.run, OfferRun | AskRun):
            return None
        assert self.hosts is not None, "a single process copies to no other"
        if isinstance(row.run, OfferRun):
            return self.hosts.offering(row.run)
        # A copy has the number of its row among the rows of all processes.
        copy = whole.rows[row.run.number]
        copied = copy.reads[0]
        array = rows.crossing_array(whole, copied)
        spec = self.spec(whole.buffers[copied].value)
        return self.hosts.asking(row.run, copy, _jax.placed(array, self.devices[row.place], spec))

    def _mark(self, moved: Buffer) -> Callable[[], Any] | None:
        """Returns a function that compiles a program for a monitor to wait for.

        The program only reads an array that was moved, so it ends once the array has arrived.
        Returns None for an array that no row overwrites: a monitor can wait for the array itself.
        """
        kind = moved.value.kind
        is_overwritten = VALUES[kind].alone or kind is ValueKind.PARAMETER
        if not is_overwritten:
            return None
        array = self.row_programs.shape(moved.value)
        program = arrival([array]).laid([self.spec(moved.value)], ())
        return lambda: self.store.compile([(program, self.devices[moved.memory])])[0]

    def spec(self, value: Value) -> Spec:
        """Returns how a value is cut over the devices of a mesh."""
        return self.row_programs.spec(value)

    def lying(self, value: Value, place: int) -> jax.ShapeDtypeStruct:
        """Returns the shape, type and device of a value that outlives a step, at a place.

        Args:
            value: the value.
            place: the number of the place.
        """
        return self.row_programs.placed(value, self.devices[place])

    def carried(self, buffer: Buffer, source: int) -> Carried:
        """Returns the copy of an array from process `source` to the place of a buffer.

        Args:
            buffer: the buffer that gets the copy.
            source: the process that has the array.
        """
        target = self.devices[buffer.place].process_index
        return Carried(source, target, self.lying(buffer.value, buffer.place))


def _in_groups(lowered: Lowered, rows: RowPrograms) -> Lowered:
    """Joins rows into groups that run as one program, except rows that call code on the host.

    A row that calls such code can fail while it runs, and the message has to name its layer.
    """
    alone = {task for task, row in _tasks(lowered).items() if rows.program(lowered, row).calls_host}
    return grouped(lowered, lambda row: _task(row) not in alone)


def _tasks(lowered: Lowered) -> dict[Hashable, Row]:
    """Returns a row for each executable of a step, by the key of the executable."""
    return {_task(row): row for row in lowered.rows if KINDS[row.kind].computes}


def _task(row: Row) -> Hashable:
    """Returns the key of a row's executable.

    Rows with the same key must have equal programs. No program depends on the micro-batch or the
    versions of arrays, so the key leaves them out, and all micro-batches share it. Some rows of a
    kind and layer read or write more arrays than others, so the key has the counts of both.
    """
    if len(row.parts) > 1:
        return row.place, *map(_task, row.parts), row.wires
    return row.kind, row.layer, row.run, row.place, len(row.reads), len(row.writes)
