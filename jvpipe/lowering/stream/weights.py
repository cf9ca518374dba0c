"""The weights of a stream: which version each task reads, what is computed of it first,
what an update remembers.

    PipeDream, 2BW   F and B read the same version: the one that the rule says
    PipeMare         B reads the newest, corrected by what is remembered of its updates: SHIFT back, then B; U, SETTLE
    XPipe            F reads the newest, moved ahead by the last update: SHIFT, then F; U, SETTLE

On stage s of S, tau = S - 1 - s updates lie between a forward and its own update. With PipeMare's
running mean d of a parameter's updates, a backward reads w - tau d: about the weights that its
forward read. With XPipe's last update u, a forward reads w + k u, if k updates lie between it and
its backward: about the weights that its backward will read.

A parameter that several stages read follows its first reader: its versions are those of that stage,
and it is neither corrected nor predicted.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.layers import Layer
from jvpipe.ir.rows import PieceRun, SettleRun, ShiftRun, SumRun, ZeroRun
from jvpipe.ir.use import Use
from jvpipe.ir.values import NEVER, Value, ValueKind
from jvpipe.lowering.expand import Expander
from jvpipe.lowering.operation import Delivery, Operation, Write, summed
from jvpipe.lowering.stream.timeline import StreamTimeline
from jvpipe.lowering.update import Slots


class StreamWeights:
    """The rule of a timeline's schedule.

    `existing` are the values that there are by now, shared with the expander.

    >>> from jvpipe.ir.layers import Array, LayerGraph, Ref, Tensor
    >>> from jvpipe.ir.plan import Plan
    >>> from jvpipe.lowering.layout import MicrobatchLayout
    >>> from jvpipe.lowering.stream.timeline import PlanSpan
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
        self.timeline = timeline
        self.graph, self.existing = timeline.graph, existing
        self.schedule = timeline.schedule
        self.accumulates = timeline.every > 1

    def is_tied(self, p: int, m: int) -> bool:
        """Tells whether several stages read a parameter in a micro-batch, and its versions are
        those of the first.
        """
        parameter = self.graph.parameters[p]
        if parameter.frozen:
            return False
        stage = self.timeline.layout(m).stage
        # Layers of one stage read the stage's version, as if one layer read it.
        return len({stage[reader] for reader in parameter.readers}) > 1

    def version(self, p: int, m: int, *, back: bool) -> int:
        """Returns the version of a parameter that the forward, or the backward, of a micro-batch
        reads.

        Args:
            p: the parameter.
            m: the micro-batch.
            back: of the backward rather than the forward.
        """
        owner = self.graph.parameters[p].owner
        reads_stale = back and not self.is_tied(p, m)
        return self.timeline.version(owner, m, back=reads_stale)

    def tau(self, layer: int, m: int) -> int:
        """Counts the updates between a layer's forward of a micro-batch and its update."""
        layout = self.timeline.layout(m)
        return len(layout.plan.stages) - 1 - layout.stage[layer]

    def ahead(self, layer: int, m: int) -> int:
        """Counts the updates between a layer's forward of a micro-batch and its backward."""
        forward = self.timeline.version(layer, m, back=False)
        backward = self.timeline.version(layer, m, back=True)
        return backward - forward

    # Reading

    def reading(
        self,
        p: int,
        layer: int,
        m: int,
        *,
        back: bool,
    ) -> Value:
        """Names the version that the rule says, or what has been computed of it.

        Args:
            p: the parameter.
            layer: that reads it.
            m: the micro-batch.
            back: by the backward rather than the forward.
        """
        # `shifts` has computed it before, if the schedule does and there was something to add.
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
        """Predicts or corrects a layer's weights along what is remembered of their updates, all at
        once.

        Args:
            layer: whose weights.
            m: the micro-batch.
            parameters: those that will be read.
            back: by the backward rather than the forward.
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
            writes.append(Write(self._shifted(p, m, back=back), self._bytes(p)))
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
        """Names the sum of the update that a micro-batch belongs to.

        Where devices take turns, each has a sum of its own, named by the first micro-batch in it.

        Args:
            p: the parameter.
            layer: that reads it.
            m: the micro-batch.
        """
        every = self.timeline.every
        turns = self.timeline.replicas(layer, m)
        update = m // every
        # Devices that take turns have a sum each, named by the first micro-batch of its own.
        first = NEVER if turns == 1 else update * every + m % turns
        return Value(ValueKind.GRADIENT, p, layer, first, update)

    def tied_versions(self, layer: Layer, m: int) -> tuple[Delivery, ...]:
        """Delivers, to all who read them, the versions of a layer's own parameters that a
        micro-batch reads first.
        """
        deliveries = []
        for p in layer.reading(ValueKind.PARAMETER):
            parameter = self.graph.parameters[p]
            if parameter.owner == layer.id:
                version = self.graph.parameter(p, self.version(p, m, back=False))
                deliveries.append(Delivery(version, tuple(parameter.readers)))
        return tuple(deliveries)

    def use(self, kind: Kind, layer: Layer, m: int) -> Use:
        """Records what a layer's forward or backward has read.

        Args:
            kind: of task: a forward or a backward.
            layer: that ran.
            m: the micro-batch.
        """
        back = KINDS[kind].back
        parameters = layer.reading(ValueKind.PARAMETER)
        assert back is not None, f"a {kind} reads no weights"
        tied = tuple((p, self.version(p, m, back=back)) for p in parameters if self.is_tied(p, m))
        updates = 0
        if any(self._shifted(p, m, back=back) in self.existing for p in parameters):
            updates = self.tau(layer.id, m) if back else self.ahead(layer.id, m)
        version = self.timeline.version(layer.id, m, back=back)
        return Use(kind, layer.id, m, version, tied, updates)

    def _shifted(self, p: int, m: int, *, back: bool) -> Value:
        """Names what is read of a parameter instead of a version of it, once it has been computed."""
        return Value(ValueKind.CORRECTED if back else ValueKind.PREDICTED, p, microbatch=m)

    def _bytes(self, p: int) -> int:
        return self.graph.parameters[p].array.bytes


@dataclass(frozen=True)
class LayerUpdate:
    """The update of a layer after a micro-batch.

    `before` are the versions that it takes, by parameter, `version` is the one that it makes. One
    that `remembers` reads the weights before and after it, so that it cannot overwrite them.
    """

    layer: int
    version: int
    before: dict[int, int]
    remembers: bool
    operations: tuple[Operation, ...]


class StreamUpdates:
    """Expands the updates of a stream."""

    def __init__(self, weights: StreamWeights, expander: Expander, slots: Slots) -> None:
        self.weights = weights
        self.expander = expander
        self.slots = slots
        self._pieces = list(enumerate(slots.optimizer.update))

    def weigh(self, layer: Layer, m: int) -> Iterator[Operation]:
        """Yields the sum of the weights of an update's micro-batches, once all of them have theirs."""
        graph = self.weights.graph
        every = self.weights.timeline.every
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
        """Yields what adds up the gradients of a layer's own parameters, where devices have taken
        turns in them.

        Args:
            layer: whose update comes.
            m: the last micro-batch of it.
        """
        graph, weights = self.weights.graph, self.weights
        update = m // weights.timeline.every
        owned = graph.trained(graph.owned(layer))
        readers = [reader for p in owned for reader in graph.parameters[p].readers]
        for reader in dict.fromkeys(readers):
            parameters = [p for p in owned if reader in graph.parameters[p].readers]
            sums = [Value(ValueKind.GRADIENT, p, reader, version=update) for p in parameters]
            writes = [Write(total, graph.parameters[total.index].array.bytes) for total in sums]
            # The last micro-batches of the update, one for each device, name the devices' own sums.
            turns = weights.timeline.replicas(reader, m)
            last_ones = range(m + 1 - turns, m + 1)
            parts = [[weights.gradient(p, reader, last) for p in parameters] for last in last_ones]
            yield from summed(layer, m, parts, sums, writes)

    def update(self, layer: int, m: int) -> LayerUpdate:
        """Makes the update of a layer after a micro-batch."""
        update = m // self.weights.timeline.every
        graph = self.weights.graph
        before = {p: self.slots.newest[p] for p in graph.trained(graph.owned(layer))}
        tau = self.weights.tau(layer, m)
        schedule = self.weights.schedule
        # On the last stage (tau = 0) forward and backward read the same weights anyway.
        remembers = tau > 0 and (schedule.decay is not None or schedule.predicts)
        operations = []
        for number, piece in self._pieces:
            if piece.layer != layer:
                continue
            reads = [self.slots.value(slot, layer, update, m) for slot in piece.reads]
            results = zip(piece.writes, piece.program.out_avals, strict=True)
            writes = [self.slots.written(slot, aval, layer, m) for slot, aval in results]
            run = PieceRun(number)
            operations.append(
                self.expander.operation(
                    Kind.U,
                    layer,
                    m,
                    reads,
                    writes,
                    run,
                )
            )
        if remembers and before:
            operations += self._remembered(layer, before, m, tau)
        elif before:  # its last piece ends what the layer remembered at earlier stages
            forgets = self._forgotten(layer, before)
            operations[-1] = replace(operations[-1], forgets=forgets)
        return LayerUpdate(
            layer,
            update + 1,
            before,
            remembers,
            tuple(operations),
        )

    def _remembered(
        self,
        layer: int,
        before: dict[int, int],
        m: int,
        tau: int,
    ) -> Iterator[Operation]:
        """Yields what PipeMare and XPipe do to remember an update: the mean of all, or the last
        one.

        Args:
            layer: that was updated.
            before: by parameter, the version before.
            m: the micro-batch after which that was.
            tau: the updates between a forward of the layer and its update.
        """
        corrects = self.weights.schedule.decay is not None
        kind = ValueKind.DELTA if corrects else ValueKind.APPLIED
        old: list[Value] = []
        new: list[Write] = []
        memory: list[Write] = []
        for p, version in before.items():
            size = self.weights.graph.parameters[p].array.bytes
            old.append(Value(ValueKind.PARAMETER, p, version=version))
            after = Value(ValueKind.PARAMETER, p, version=self.slots.newest[p])
            new.append(Write(after, size))
            memory.append(Write(Value(kind, p), size))
        remembered = list(memory)
        if corrects:  # a running mean counts what it has seen
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
        # PipeMare also scales the update down while it anneals, so its parameters are written, too.
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
        """Ends what a layer brought to the last stage, where nothing is remembered."""
        kinds = (ValueKind.DELTA, ValueKind.APPLIED)
        memory = [Value(kind, p) for kind in kinds for p in parameters]
        memory.insert(0, Value(ValueKind.UPDATES, 0, layer))
        forgotten = tuple(value for value in memory if value in self.expander.existing)
        self.expander.existing.difference_update(forgotten)
        return forgotten
