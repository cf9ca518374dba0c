"""The weights of a stream: the versions that tasks read, their shifts, and records of updates.

The schedule decides which weights a forward (F) and a backward (B) read. SHIFT computes shifted
weights before the task that reads them. SETTLE records the change that an update (U) has made:

    schedule         F reads                 B reads                rows
    PipeDream, 2BW   the rule's version      the same version       F; B; U
    PipeMare         the newest version      the newest, corrected  F; SHIFT, B; U, SETTLE
    XPipe            the newest, predicted   the newest version     SHIFT, F; B; U, SETTLE

The symbols are:

    w      the newest version of a parameter
    tau    on stage s of S, the most updates between a forward and the update from its gradient:
           S - 1 - s, or a share of it, rounded up, if an update follows several micro-batches
    d      PipeMare: the running mean of the parameter's updates
    u      XPipe: the parameter's last update
    k      the updates between a forward and its backward

With PipeMare a backward reads w - tau d, which is close to the weights that its forward read. With
XPipe a forward reads w + k u, which is close to the weights that its backward will read.

A parameter that several stages read (a tied one) has the versions of its first reader's stage. It
is neither corrected nor predicted.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.layers import Layer
from jvpipe.ir.rows import SettleRun, ShiftRun, SumRun, ZeroRun
from jvpipe.ir.use import Use
from jvpipe.ir.values import NEVER, Value, ValueKind
from jvpipe.lowering.expand import Expander
from jvpipe.lowering.operation import Delivery, Operation, Write, summed
from jvpipe.lowering.stream.stream_timeline import StreamTimeline
from jvpipe.lowering.update import Slots
from jvpipe.lowering.weight_rule import Weights


class StreamWeights(Weights):
    """The rule for the weights that layers read under the schedule of a timeline.

    `existing` is the set of values made so far, which the expander shares.

    >>> from jvpipe.ir.layers import Array, LayerGraph, Ref, Tensor
    >>> from jvpipe.ir.plan import Plan
    >>> from jvpipe.lowering.layout import MicrobatchLayout
    >>> from jvpipe.lowering.stream.stream_timeline import PlanSpan
    >>> from jvpipe.schedules import find_schedule
    >>> edge, loss = Ref(ValueKind.TENSOR, 0), Ref(ValueKind.LOSS, 0)
    >>> layers = Layer(0, "a", (), (edge,)), Layer(1, "b", (edge,), (loss,))
    >>> graph = LayerGraph(layers, (Tensor(Array("t", (), "float32", 4), 0, (1,), True),), ())
    >>> spans = [PlanSpan(0, MicrobatchLayout.of(graph, Plan.from_cuts([1, 1]), ()))]
    >>> timeline = StreamTimeline(graph, spans, find_schedule("pipemare"), 2, 3, drained=False)
    >>> weights = StreamWeights(timeline, set())
    >>> [weights.tau(layer, 0) for layer in (0, 1)], [weights.ahead(0, m) for m in range(3)]
    ([1, 0], [0, 1, 1])
    """

    def __init__(self, timeline: StreamTimeline, existing: set[Value]) -> None:
        super().__init__(timeline.graph, accumulates=timeline.every > 1)
        self.timeline, self.schedule = timeline, timeline.schedule
        self.existing = existing

    def is_tied(self, p: int, m: int) -> bool:
        """Tells whether several stages read a parameter in a micro-batch.

        If so, the parameter has the versions of its first reader's stage.

        Args:
            p: the parameter.
            m: the micro-batch.
        """
        parameter = self.graph.parameters[p]
        if parameter.frozen:
            return False
        stage = self.timeline.layout(m).stage
        # All readers in one stage read that stage's version, so only stages are counted.
        return len({stage[reader] for reader in parameter.readers}) > 1

    def version(self, p: int, m: int, *, back: bool) -> int:
        """Returns the version of a parameter that is read for a micro-batch.

        Args:
            p: the parameter.
            m: the micro-batch.
            back: whether the backward reads it, rather than the forward.
        """
        owner = self.graph.parameters[p].owner
        reads_stale = back and not self.is_tied(p, m)
        return self.timeline.version(owner, m, back=reads_stale)

    def tau(self, layer: int, m: int) -> int:
        """Counts the updates between a layer's forward and the update from the forward's gradient.

        Args:
            layer: the layer.
            m: the micro-batch.
        """
        layout = self.timeline.layout(m)
        return self.schedule.tau(len(layout.plan.stages), layout.stage[layer])

    def ahead(self, layer: int, m: int) -> int:
        """Counts the updates between a layer's forward of a micro-batch and its backward.

        Args:
            layer: the layer.
            m: the micro-batch.
        """
        forward = self.timeline.version(layer, m, back=False)
        backward = self.timeline.version(layer, m, back=True)
        return backward - forward

    # Reading

    def reading(self, p: int, m: int, *, back: bool) -> Value:
        """Names the weights that a layer reads: shifted ones if they exist, or the rule's version.

        Args:
            p: the parameter.
            m: the micro-batch.
            back: whether the layer's backward reads it; if not, its forward does.
        """
        # Shifted weights exist if `shifts` has made them.
        shifted = self._shifted(p, m, back=back)
        if shifted in self.existing and not self.is_tied(p, m):
            return shifted
        return self.graph.parameter(p, self.version(p, m, back=back))

    def shifts(
        self,
        layer: Layer,
        m: int,
        parameters: Iterable[int],
        *,
        back: bool,
    ) -> Iterator[Operation]:
        """Yields the operation that predicts or corrects all weights of a layer at once.

        The weights are shifted by multiples of the updates that the schedule remembers.

        Args:
            layer: the layer.
            m: the micro-batch.
            parameters: the parameters that will be read. If none of them shifts, nothing is
                yielded.
            back: whether the layer's backward reads them; if not, its forward does.
        """
        shifts = self.schedule.decay is not None if back else self.schedule.predicts
        if not shifts:
            return
        memory = ValueKind.DELTA if back else ValueKind.APPLIED
        to_shift = []
        for p in layer.reading(ValueKind.PARAMETER):
            is_shifted = self._shifted(p, m, back=back) in self.existing
            is_remembered = Value(memory, p) in self.existing
            if is_remembered and not is_shifted and not self.is_tied(p, m):
                to_shift.append(p)
        updates = -self.tau(layer.id, m) if back else self.ahead(layer.id, m)
        if not updates or set(to_shift).isdisjoint(parameters):
            return
        reads, memories, writes = [], [], []
        for p in to_shift:
            version = self.version(p, m, back=back)
            reads.append(Value(ValueKind.PARAMETER, p, version=version))
            memories.append(Value(memory, p))
            writes.append(Write.of(self.graph, self._shifted(p, m, back=back)))
        # From here on `reading` names the shifted weights.
        self.existing.update(write.value for write in writes)
        yield Operation(
            Kind.SHIFT,
            layer.id,
            m,
            reads=(*reads, *memories),
            writes=tuple(writes),
            run=ShiftRun(updates),
        )

    def gradient(self, p: int, layer: int, m: int) -> Value:
        """Names the sum of gradients to which a micro-batch adds.

        Each update has one sum or, if the devices of a stage take turns with micro-batches, one sum
        for each device.

        Args:
            p: the parameter.
            layer: the layer that reads it.
            m: the micro-batch.
        """
        every = self.timeline.every
        turns = self.timeline.replicas(layer, m)
        update = m // every
        # The sum of a device that takes turns is named by the first micro-batch that adds to it.
        first = NEVER if turns == 1 else update * every + m % turns
        return Value(ValueKind.GRADIENT, p, layer, first, update)

    def tied_versions(self, layer: Layer, m: int) -> tuple[Delivery, ...]:
        """Returns the deliveries that send a layer's own parameters to all layers that read them.

        The version is the one that the forward of the micro-batch reads.

        Args:
            layer: the layer, which may own parameters.
            m: the micro-batch.
        """
        deliveries = []
        for p in layer.reading(ValueKind.PARAMETER):
            parameter = self.graph.parameters[p]
            if parameter.owner == layer.id:
                version = self.graph.parameter(p, self.version(p, m, back=False))
                deliveries.append(Delivery(version, tuple(parameter.readers)))
        return tuple(deliveries)

    def use(self, kind: Kind, layer: Layer, m: int) -> Use:
        """Returns the record of the versions that a layer's forward or backward has read.

        Args:
            kind: the kind of task, a forward or a backward.
            layer: the layer that ran.
            m: the micro-batch.
        """
        back = KINDS[kind].back
        parameters = layer.reading(ValueKind.PARAMETER)
        assert back is not None, f"a {kind} reads no weights"
        tied = [p for p in parameters if self.is_tied(p, m)]
        tied_versions = tuple((p, self.version(p, m, back=back)) for p in tied)
        updates = 0
        if any(self._shifted(p, m, back=back) in self.existing for p in parameters):
            updates = self.tau(layer.id, m) if back else self.ahead(layer.id, m)
        version = self.timeline.version(layer.id, m, back=back)
        return Use(kind, layer.id, m, version, tied_versions, updates)

    def _shifted(self, p: int, m: int, *, back: bool) -> Value:
        """Names the shifted weights that a task would read in place of a version.

        Args:
            p: the parameter.
            m: the micro-batch.
            back: whether the task is a backward, rather than a forward.
        """
        return Value(ValueKind.CORRECTED if back else ValueKind.PREDICTED, p, microbatch=m)


@dataclass(frozen=True)
class LayerUpdate:
    """The update of a layer after a micro-batch.

    For each parameter p, it reads the version `before[p]` and makes `version`. If `remembers` is
    true, a SETTLE row reads the weights before and after the update. Then the update must not
    overwrite the old weights.
    """

    version: int
    before: dict[int, int]
    remembers: bool
    operations: tuple[Operation, ...]


class StreamUpdates:
    """An expander of a stream's updates: it makes operations of the optimizer's pieces."""

    def __init__(self, weights: StreamWeights, expander: Expander, slots: Slots) -> None:
        self.weights, self.timeline, self.graph = weights, weights.timeline, weights.graph
        self.expander = expander
        self.slots = slots

    def weigh(self, layer: Layer, m: int) -> Iterator[Operation]:
        """Yields the operation that sums an update's loss weights, once all of them exist.

        Args:
            layer: the layer whose forward has just run.
            m: the micro-batch of the forward.
        """
        graph = self.graph
        every = self.timeline.every
        ends_update = (m + 1) % every == 0
        if graph.weighted and ends_update and 1 in layer.writing(ValueKind.LOSS):
            batch = range(m + 1 - every, m + 1)
            reads = [Value(ValueKind.LOSS, 1, microbatch=n) for n in batch]
            total = Write(Value(ValueKind.WEIGHT, 0, graph.loss_layer, version=m // every), 4)
            run = SumRun(every)
            yield self.expander.operation(
                Kind.WEIGHT,
                layer.id,
                m,
                reads,
                [total],
                run,
            )

    def added_up(self, layer: int, m: int) -> Iterator[Operation]:
        """Yields the operations that add up the gradients of devices that have taken turns.

        Args:
            layer: the layer that is about to be updated, which owns the parameters.
            m: the last micro-batch of the update.
        """
        graph, weights = self.graph, self.weights
        update = m // self.timeline.every
        owned = graph.trained(graph.owned(layer))
        readers = [reader for p in owned for reader in graph.parameters[p].readers]
        for reader in dict.fromkeys(readers):
            parameters = [p for p in owned if reader in graph.parameters[p].readers]
            sums = [Value(ValueKind.GRADIENT, p, reader, version=update) for p in parameters]
            # The last `turns` micro-batches ran on different devices, each with a sum of its own.
            turns = self.timeline.replicas(reader, m)
            last_ones = range(m + 1 - turns, m + 1)
            parts = [[weights.gradient(p, reader, last) for p in parameters] for last in last_ones]
            yield from summed(graph, reader, m, parts, sums)

    def update(self, layer: int, m: int) -> LayerUpdate:
        """Makes the update of a layer after a micro-batch.

        Args:
            layer: the layer.
            m: the last micro-batch whose gradients the update takes.
        """
        update = m // self.timeline.every
        graph = self.graph
        before = {p: self.slots.newest[p] for p in graph.trained(graph.owned(layer))}
        tau = self.weights.tau(layer, m)
        schedule = self.weights.schedule
        # On the last stage (tau = 0) forward and backward read the same weights without a shift.
        remembers = tau > 0 and (schedule.decay is not None or schedule.predicts)
        operations = []
        for number, piece in enumerate(self.slots.optimizer.update):
            if piece.layer == layer:
                operations.append(self.slots.operation(self.expander, number, update, m))
        if remembers and before:
            operations += self._remembered(layer, before, m, tau)
        elif before:  # a layer that came from an earlier stage may still have records of updates
            forgets = self._forgotten(layer, before)
            operations[-1] = replace(operations[-1], forgets=forgets)
        return LayerUpdate(update + 1, before, remembers, tuple(operations))

    def _remembered(
        self,
        layer: int,
        before: dict[int, int],
        m: int,
        tau: int,
    ) -> Iterator[Operation]:
        """Yields the operations that record an update.

        PipeMare records the running mean of all updates, XPipe the last update.

        Args:
            layer: the layer that was updated.
            before: for each parameter, the version before the update.
            m: the micro-batch after which the layer was updated.
            tau: the number of updates between a forward of the layer and its update.
        """
        corrects = self.weights.schedule.decay is not None
        kind = ValueKind.DELTA if corrects else ValueKind.APPLIED
        old: list[Value] = []
        new: list[Write] = []
        memory: list[Write] = []
        for p, version in before.items():
            old.append(Value(ValueKind.PARAMETER, p, version=version))
            after = Value(ValueKind.PARAMETER, p, version=self.slots.newest[p])
            new.append(Write.of(self.graph, after))
            memory.append(Write.of(self.graph, Value(kind, p)))
        remembered = list(memory)
        if corrects:  # a running mean needs the number of updates in it
            remembered.append(Write(Value(ValueKind.UPDATES, 0, layer), 4))
        if memory[0].value not in self.expander.existing:
            yield self.expander.operation(
                Kind.ZERO,
                layer,
                m,
                [],
                remembered,
                ZeroRun(kind),
            )
        reads = [*old, *(write.value for write in (*new, *remembered))]
        # PipeMare also scales down the first `anneal_updates` updates, so it writes the parameters.
        writes = [*new, *remembered] if corrects else memory
        yield self.expander.operation(
            Kind.SETTLE,
            layer,
            m,
            reads,
            writes,
            SettleRun(tau),
        )

    def _forgotten(self, layer: int, parameters: Iterable[int]) -> tuple[Value, ...]:
        """Names the records of a layer's updates, and removes them from the existing values."""
        kinds = (ValueKind.DELTA, ValueKind.APPLIED)
        memory = [Value(kind, p) for kind in kinds for p in parameters]
        memory.insert(0, Value(ValueKind.UPDATES, 0, layer))
        forgotten = tuple(value for value in memory if value in self.expander.existing)
        self.expander.existing.difference_update(forgotten)
        return forgotten
