"""Lowers a stream: passes turn the steps of an asynchronous schedule into rows, in this order.

    order -> expand -> place -> swap -> prefetch -> period

A stream has no flush between its steps, so several versions of the weights exist at once. Each
version is a buffer of its own.

The first steps of a stream fill the pipeline. From some step on, each step equals the step before,
except that the numbers of micro-batches and versions are shifted. So only the beginning of a stream
is lowered, and then cut into steps (period.py). Steps repeat because, once the pipeline is full,
the order of tasks is the same in each step, and the order determines everything else.

    step        0     1     2     3     4 ...
    pipeline    fill  fill  full  full  full
    kept        yes   yes   yes   no    no        steps 3, 4, ... equal step 2
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

from jvpipe.ir.buffers import Spot
from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import Layer, LayerGraph
from jvpipe.ir.rows import Row
from jvpipe.ir.task import Task, TaskLists
from jvpipe.ir.use import Use
from jvpipe.ir.values import VALUES, Value, ValueKind
from jvpipe.lowering.expand import Expander, metrics_of
from jvpipe.lowering.operation import Operation
from jvpipe.lowering.order import order
from jvpipe.lowering.place import Placer
from jvpipe.lowering.prefetch import prefetched
from jvpipe.lowering.step import swapped_by
from jvpipe.lowering.stream.departures import Departures, LastReads, refresh, settle
from jvpipe.lowering.stream.period import StreamStep, Unrolled, dropping
from jvpipe.lowering.stream.stream_timeline import PlanSpan, StreamTimeline
from jvpipe.lowering.stream.weights import StreamUpdates, StreamWeights
from jvpipe.lowering.swap import swap
from jvpipe.lowering.update import Slots
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.schedules.round_robin import RoundRobin
from jvpipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class StreamLowering:
    """A stream and its lowered steps.

    Each of the `spans` has a layout, and the micro-batch from which it applies.
    `in_flight_at_switch` has, for each step in which a span begins, the names of the buffers that
    the previous step leaves.

    >>> import jax
    >>> from jvpipe.ir.layers import Array, Ref, Signature, Tensor
    >>> from jvpipe.ir.plan import Plan
    >>> from jvpipe.ir.rows import Row
    >>> from jvpipe.lowering.layout import MicrobatchLayout
    >>> from jvpipe.schedules import find_schedule
    >>> edge, loss = Ref(ValueKind.TENSOR, 0), Ref(ValueKind.LOSS, 0)
    >>> layers = Layer(0, "a", (), (edge,)), Layer(1, "b", (edge,), (loss,))
    >>> graph = LayerGraph(layers, (Tensor(Array("t", (), "float32", 4), 0, (1,), True),), ())
    >>> signatures = Signature((), (), (0,), (), (), ()), Signature((), (("input", 0),), (), (), (), (0,))
    >>> spans = [PlanSpan(0, MicrobatchLayout.of(graph, Plan.from_cuts([1, 1]), signatures))]
    >>> optimizer = OptimizerCut((), (), (), jax.tree.structure(None), ())
    >>> stream = StreamLowering(graph, spans, find_schedule("pipedream"), 2, optimizer)
    >>> " ".join(f"{row.stage}{row.kind}" for row in stream.steps[-1].lowered.rows if row.kind in (Kind.F, Kind.B))
    '0F 0B 1F 1B 0F 0B 1F 1B'
    >>> [str(spot) for spot in stream.steps[-1].after]
    ['cotangent 0 micro-batch -1 at 0']
    """

    graph: LayerGraph
    spans: Sequence[PlanSpan]
    schedule: Schedule
    microbatches: int
    optimizer: OptimizerCut
    in_flight_at_switch: Mapping[int, Collection[Spot]] = field(default_factory=dict)

    @cached_property
    def steps(self) -> tuple[StreamStep, ...]:
        """The first steps, up to the first one that all later steps equal."""
        turns = [RoundRobin(span.layout.plan.replicas) for span in self.spans]
        in_flight = max(turn.in_flight[0] for turn in turns)
        M, switch = self.microbatches, self.switch_step
        # Steps are equal if their rows, and the names of all buffers before and after them, are
        # equal in each step's own numbers. If a step equals the step before it, the next step
        # begins with the same buffers as this step. A full pipeline has the same tasks in every
        # step, so all later steps are then equal as well. This happens after at most `fill` steps:
        # by then the micro-batches that were in flight at the switch have left. More steps are
        # lowered than compared, because the last lowered steps are different: no row reads the
        # buffers that they leave.
        fill = switch + 2 + -(-in_flight // M)
        unrolled = self._lower(fill + 2 + -(-2 * in_flight // M), drained=False)
        steps = [unrolled.step(n) for n in range(switch + 2)]
        for n in range(switch + 2, fill + 3):
            following = unrolled.step(n)
            if following == steps[-1]:
                return tuple(steps)
            steps.append(following)
        raise AssertionError("the steps of a stream must repeat")

    def step(self, steps: int) -> StreamStep:
        """Returns step number `steps`, counted from 0."""
        return self.steps[min(steps, len(self.steps) - 1)]

    @property
    def switch_step(self) -> int:
        """The step in which the last span begins."""
        return self.spans[-1].start // self.microbatches

    def drain(self, steps: int) -> StreamStep:
        """Makes the step that drains the pipeline, and so ends a stream after a number of steps."""
        n = min(steps, len(self.steps))
        drain = self._lower(n, drained=True).step(n)
        return dropping(drain, self.steps[n - 1])

    def _lower(self, steps: int, *, drained: bool) -> Unrolled:
        """Lowers the first steps of the stream and, if `drained`, the drain that ends it."""
        timeline = StreamTimeline(
            self.graph,
            self.spans,
            self.schedule,
            self.microbatches,
            steps,
            drained=drained,
        )
        lists = timeline.parts if drained else timeline.parts[:-1]
        return _Unrolling(self, timeline, lists).unrolled(drained=drained)


class _Unrolling:
    """The passes of lowering over the first steps of a stream.

    `_place_steps` collects these data, by which the rows are later cut into steps:

        blocks    the numbers of the blocks at which steps begin, then the number of all blocks
        spots     for each of these blocks, the names of all buffers before it
        uses      the versions that each step's layers read or made
        left      for each forward, the first layer of its stage, which names the rows of swaps, and
                  the buffers to swap after it
    """

    def __init__(
        self,
        stream: StreamLowering,
        timeline: StreamTimeline,
        lists: Sequence[TaskLists],
    ) -> None:
        self.timeline, self.lists = timeline, lists
        self.in_flight_at_switch = stream.in_flight_at_switch
        existing: set[Value] = set()
        self.weights = StreamWeights(timeline, existing)
        self.expander = Expander(stream.graph, self.weights, existing)
        self.slots = Slots(stream.graph, stream.optimizer)
        self.updates = StreamUpdates(self.weights, self.expander, self.slots)
        self.placer = Placer(stream.graph, timeline.plan(0), stream.optimizer)
        self.ordered = self._ordered()
        tasks = [task for step in self.ordered for task in step]
        timeline.settle(tasks)
        self.last_reads = LastReads(timeline, self.weights, tasks)
        self.blocks = [0]
        self.spots = [self._spots()]
        self.uses: list[list[Use]] = []
        self.left: dict[Task, tuple[int, list[int]]] = {}

    def _ordered(self) -> list[list[Task]]:
        """Returns the tasks of each step in the order of their dispatch."""
        ordered: list[list[Task]] = []
        done: list[Task] = []
        for part in self.lists:
            step = order(
                self.timeline.waits,
                part,
                done,
                self.timeline.versions,
            )
            ordered.append(step)
            done += step
        return ordered

    def unrolled(self, *, drained: bool) -> Unrolled:
        """Expands, places, swaps and prefetches all tasks.

        Args:
            drained: whether the last step is the one that drains the stream.
        """
        timeline, placer = self.timeline, self.placer
        self._place_steps(drained=drained)
        placer.enter(timeline.spans[-1].layout.plan)
        swapped = swap(
            placer.blocks,
            placer.buffers,
            _within_steps(self.lists),
            self.left.__getitem__,
        )
        blocks = list(swapped)
        groups: list[list[Row]] = []
        for start, end in pairwise(self.blocks):
            # Each step is prefetched alone, so state is fetched in the step of the update that
            # reads it.
            groups += prefetched(blocks[start:end], placer.buffers)
        # So far each step is marked by its first block. `bounds` needs the first row of that block.
        # It is known only now, because swaps and prefetching have added rows to blocks.
        rows_before = [0, *accumulate(map(len, groups))]
        return Unrolled(
            rows=[row for rows in groups for row in rows],
            buffers=placer.buffers,
            bounds=[rows_before[block] for block in self.blocks],
            spots=self.spots,
            uses=self.uses,
            metrics=[self._metrics(n) for n in range(len(self.ordered))],
            lasting=frozenset(self._lasting()),
            M=timeline.M,
            every=timeline.every,
            end=placer.lasting() if drained else None,
        )

    def _place_steps(self, *, drained: bool) -> None:
        """Expands and places all tasks, and notes where steps begin and what exists there."""
        timeline = self.timeline
        placer = self.placer
        M = self.timeline.M
        departures = Departures(placer)
        # A span begins with the first task of its first micro-batch, whatever the stage.
        starts = {span.start: span.layout.plan for span in timeline.spans[1:]}
        number = 0
        for n, tasks in enumerate(self.ordered):
            # The plan changes in this step. The previous step ran as if the plan would not change.
            # The layers' buffers are only those that the previous step left, so the placer forgets
            # all others.
            if n in self.in_flight_at_switch:
                placer.keep(self.in_flight_at_switch[n], n * M, n * M // timeline.every)
            uses: list[Use] = []
            for task in tasks:
                placer.begin()
                departures.free(number)
                if task.microbatch in starts:
                    settle(placer, starts.pop(task.microbatch))
                placer.enter(timeline.plans[task.microbatch])
                # Rows of swaps go before and after blocks that have a task. The block of an update
                # gets no task, so that no swap is inserted there.
                placer.begin(None if task.kind == Kind.U else task)
                uses += self._task(task, number)
                if task.kind == Kind.F:
                    layout = timeline.layout(task.microbatch)
                    self.left[task] = swapped_by(placer, layout, task)
                departures.note(number)
                number += 1
            # A stream ends with one version of every parameter, at all places that read it.
            if drained and n == len(self.ordered) - 1:
                placer.begin()
                placer.enter(timeline.spans[-1].layout.plan)
                refresh(placer, self.slots.newest)
            self.uses.append(uses)
            self.blocks.append(len(placer.blocks))
            self.spots.append(self._spots())

    def _task(self, task: Task, number: int) -> list[Use]:
        """Expands and places a task, and returns the versions that its layers have read or made.

        Args:
            task: the next task.
            number: its number in the order of dispatch.
        """
        m = task.microbatch
        layout = self.timeline.layout(m)
        layers = layout.layers(task.stage)
        match task.kind:
            case Kind.U:
                return [self._update(layer.id, m, number) for layer in layers]
            case Kind.F:
                for layer in layers:
                    self._place(self._forward(layer, m))
            case Kind.B:
                for layer in reversed(layers):
                    self._place(self.expander.backward(task.kind, layer, m, layout))
            case _:
                raise AssertionError(f"a stream has no {task}")
        return [self.weights.use(task.kind, layer, m) for layer in layers]

    def _forward(self, layer: Layer, m: int) -> Iterator[Operation]:
        """Yields a layer's forward and, once all parts exist, reductions of losses and weights."""
        M = self.timeline.M
        graph = self.timeline.graph
        *before, forward = self.expander.forward(layer, m, self.timeline.layout(m))
        yield from before
        delivers = (*forward.delivers, *self.weights.tied_versions(layer, m))
        yield replace(forward, delivers=delivers)
        yield from self.updates.weigh(layer, m)
        first = m // M * M  # of the step
        weight = Value(
            ValueKind.WEIGHT,
            0,
            graph.loss_layer,
            microbatch=first,
        )
        yield from self.expander.losses(layer, range(first, first + M), weight)

    def _update(self, layer: int, m: int, number: int) -> Use:
        """Updates a layer at one of its places, which then sends the parameters to the others.

        The new version overwrites the old one, unless a later task still reads the old version, or
        the schedule needs the old version to remember the update. In these two cases the new
        version goes to buffers of its own.

        Args:
            layer: the layer to update.
            m: the micro-batch after which the layer is updated.
            number: the task's number in the order of dispatch.
        """
        placer = self.placer
        graph = self.timeline.graph
        placer.enter(self.timeline.plan(m))
        place = placer.where.updated_at(layer)
        sums = self.updates.added_up(layer, m)
        update = self.updates.update(layer, m)
        keeps = update.remembers
        for p, version in update.before.items():
            keeps |= self.last_reads.after(p, place, version, number)
        for operation in (*sums, *update.operations):
            placer.perform(operation, keeps=keeps, place=place)
        for p in graph.trained(graph.owned(layer)):
            value = graph.parameter(p, self.slots.newest[p])
            for other in placer.where.places[layer]:
                if other != place:
                    placer.send(value, place, other, layer, m)
        return Use(Kind.U, layer, m, update.version)

    def _place(self, operations: Iterator[Operation]) -> None:
        for operation in operations:
            self.placer.perform(operation)

    def _spots(self) -> dict[int, Spot]:
        """Returns the present name of each buffer."""
        return {b: spot for spot, b in self.placer.ids.items()}

    def _lasting(self) -> set[int]:
        """Finds the buffers that outlive every step.

        They hold the newest version of each value that lasts between steps, and what the schedule
        remembers about updates.
        """
        lasting = {b for _, b in self.placer.lasting()}
        for (value, _), b in self.placer.current.items():
            if VALUES[value.kind].remembered:
                lasting.add(b)
        return lasting

    def _metrics(self, n: int) -> list[int]:
        """Lists the metrics of step n, then the losses of its micro-batches."""
        M, placer = self.timeline.M, self.placer
        first = n * M
        batch = range(first, first + M)
        values = metrics_of(placer.graph, first)
        values += [Value(ValueKind.LOSS, 0, microbatch=m) for m in batch]
        return [b for b in map(placer.metric, values) if b is not None]


def _within_steps(lists: Sequence[TaskLists]) -> TaskLists:
    """Returns one list of tasks, without updates, for each step and stage.

    The swapping pass looks ahead only within a list. So it inserts no swap for a task of another
    step.
    """
    of_stages = (tasks for part in lists for tasks in part)
    return tuple(tuple(task for task in tasks if task.kind != Kind.U) for tasks in of_stages)
