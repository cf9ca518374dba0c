"""A compiled plan: a traced loss under a plan, with its programs compiled and its rows bound.

A row is one program, one copy or one wait on one place (a device, or a mesh of several). A plan
becomes ready to run in four phases. Each line shows a phase and what it makes:

    lay out    layouts: which values each layer's programs take and leave, under the plan's fates
    lower      rows: what runs where and in which order, over numbered buffers
    compile    programs: one for each distinct row and device
    bind       instructions: rows with their programs, so that running needs no look-ups

The first phase is in laid_plan.py, the second in jvpipe/lowering, and the last two are in
row_binder.py. In this file, a layout is always a result of the first phase. The spec of an array
says how the array is cut over the devices of a mesh. Each phase runs when its result is first
needed. So a plan that is only compared with other plans compiles nothing. If several processes run
a plan, each binds only its own part of the rows. These parts fit together only if all processes
have lowered the plan to the same rows, which `agree_on_rows` (row_agreement.py) checks.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax

from jvpipe.ir.buffers import Buffer, Lowered, Peak, Spot, peaks
from jvpipe.ir.layers import Spec
from jvpipe.ir.values import Value
from jvpipe.lowering.step import lower_evaluation, lower_step
from jvpipe.lowering.stream.lower import StreamLowering
from jvpipe.lowering.stream.period import StreamStep, dropping
from jvpipe.lowering.stream.stream_timeline import PlanSpan
from jvpipe.programs.layer import LayerPrograms
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.programs.store import Program
from jvpipe.runtime.engine.binding import Bound
from jvpipe.runtime.engine.hosts import Carried, Hosts
from jvpipe.runtime.engine.laid_plan import LaidPlan
from jvpipe.runtime.engine.placing import Placing
from jvpipe.runtime.engine.row_binder import LayerLayouts, RowBinder
from jvpipe.runtime.engine.row_programs import RowPrograms
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B
from jvpipe.util.devices import Device


@dataclass(eq=False)
class CompiledPlan(LaidPlan):
    """Everything that a step needs for one batch shape; programs are compiled when first needed.

    A stream is an asynchronous run, whose pipeline is not flushed between steps. The first
    arguments are those of `LaidPlan`.

    Args:
        previous: in a stream whose plan has changed: the compiled plan before this one, and the
            number of the first micro-batch under this one. Only micro-batches of lowered steps are
            counted. The run may repeat the last lowered step many times, so the number may be
            smaller than in the run.
        hosts: the processes that run the plan together, if there are several.
        stand_in: a device of this process to use in place of all devices. Programs can then be
            compiled, and bytes counted, although the devices belong to other processes.
        grouped: whether consecutive layers of a stage run as one program.
        warmup_optimizer: the update cut for the synchronous steps that begin an asynchronous run;
            None if there are none.
    """

    previous: tuple["CompiledPlan", int] | None = None
    hosts: Hosts | None = None
    stand_in: Device | None = None
    grouped: bool = False
    warmup_optimizer: OptimizerCut | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._binder = RowBinder(
            self.store,
            self.devices,
            self.hosts,
            self.stand_in,
            self.grouped,
        )
        # Making any of these values compiles programs, which takes long. So none of them is a
        # `cached_property`: in Python 3.11, all plans would share its lock and wait for each other.
        self.bound_step: Bound | None = None
        self._evaluation: Bound | None = None
        self._peaks: tuple[Peak, ...] | None = None
        self._warmup: CompiledPlan | None = None
        # The steps and drains of a stream, by the number of lowered steps before them.
        self.bound_steps: dict[int, tuple[StreamStep, Bound]] = {}
        self.bound_drains: dict[int, tuple[StreamStep, Bound]] = {}

    @cached_property
    def row_programs(self) -> RowPrograms:
        """The programs of the rows of micro-batches that run under this plan."""
        schedule = self.schedule
        has_sums = schedule.synchronous or schedule.period(self.microbatches) > 1
        return RowPrograms(
            self.traced,
            self.graph,
            self.optimizer,
            schedule,
            has_sums,
            self.programs,
            self.replicas,
        )

    @property
    def executables(self) -> Mapping[tuple[Hashable, Device], Program]:
        """The programs of all rows that were bound, by their keys and devices."""
        return self._binder.executables

    @property
    def compile_s(self) -> float:
        """How long the programs in `executables` took to compile, one after another."""
        return self._binder.compile_s

    @property
    def step(self) -> Bound:
        """A synchronous step."""
        if self.bound_step is None:
            lowered = lower_step(
                self.graph,
                self.layouts(),
                self.lists,
                self.optimizer,
                self.batching,
            )
            self.bound_step = self.bound(lowered)
        return self.bound_step

    @property
    def warmup(self) -> "CompiledPlan | None":
        """The same plan for the synchronous steps that begin an asynchronous run, if there are any.

        They run under 1F1B.
        """
        if self._warmup is None and (optimizer := self.warmup_optimizer):
            self._warmup = replace(
                self.after(None),
                warmup_optimizer=None,
                schedule=ONE_F_ONE_B,
                optimizer=optimizer,
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
        """The parts of a stream: one under each earlier plan, and the last one under this plan."""
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
        """The arrays in flight at each change of plan in a stream, by the first step after it.

        A change before the first step has none.
        """
        if self.previous is None:
            return {}
        earlier, start = self.previous
        in_flight = earlier._in_flight_at_switch
        step = start // self.microbatches
        if step == 0:
            return in_flight
        return in_flight | {step: frozenset(earlier.stream.steps[step - 1].after)}

    def stream_step(self, steps: int) -> tuple[StreamStep, Bound]:
        """Returns the step that a stream runs after its first `steps` steps, and its bound rows."""
        # From some step on, all steps of a stream are alike, so the last lowered one is repeated.
        n = min(steps, len(self.stream.steps) - 1)
        if n not in self.bound_steps:
            step = self.stream.steps[n]
            if self.previous and n == self.stream.switch_step > 0:
                # The first step of the new plan also frees the arrays that the old plan has left.
                step = dropping(step, self.previous[0].stream.steps[n - 1])
            self.bound_steps[n] = step, self.bound(step.lowered, self._span_programs)
        return self.bound_steps[n]

    def drain(self, steps: int) -> tuple[StreamStep, Bound]:
        """Returns the rows that finish what the first `steps` steps of a stream leave in flight.

        The first result is the drain as lowered, the second its bound rows.
        """
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

        With groups, a plan may need more memory. So groups are used only after its peaks with
        groups have been checked.

        Args:
            previous: the plan before it and its own first micro-batch, as in `CompiledPlan`.
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
        # the old plans have passed, both streams repeat the same step and leave the same arrays in
        # flight, so the state fits both. Only the number of steps before that step differs.
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
                self.graph,
                self.plan,
                self.optimizer,
                self.microbatches,
                self.batching,
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
        return self._binder.bound(lowered, self.row_programs, layouts or self.programs)

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
