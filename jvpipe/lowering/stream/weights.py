"""The weights of a stream: which version each task reads, what is computed of it first, what an update remembers.

    PipeDream, 2BW   F, B read the version that the rule says, and the same
    PipeMare         B reads the newest, corrected by what is remembered of its updates: SHIFT back, then B; U, SETTLE
    XPipe            F reads the newest, moved ahead by the last update: SHIFT, then F; U, SETTLE

A parameter that several stages read follows its first reader: its versions are those of that stage.
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
    """The rule of a timeline's schedule; `made` are the values that there are by now.

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

    def __init__(self, timeline: StreamTimeline, made: set[Value]) -> None:
        self.timeline, self.graph, self.made = timeline, timeline.graph, made
        self.schedule = timeline.schedule
        self.accumulates = timeline.every > 1

    def is_tied(self, p: int, m: int) -> bool:
        """Tells whether several stages read a parameter in a micro-batch, and its versions are those of the first."""
        stage, parameter = self.timeline.layout(m).stage, self.graph.parameters[p]
        return not parameter.frozen and len({stage[reader] for reader in parameter.readers}) > 1

    def version(self, p: int, m: int, *, back: bool) -> int:
        """The version of a parameter that the forward, or the backward, of a micro-batch reads.

        Args:
            p: the parameter.
            m: the micro-batch.
            back: of the backward rather than the forward.
        """
        return self.timeline.version(
            self.graph.parameters[p].owner, m, back=back and not self.is_tied(p, m)
        )

    def tau(self, layer: int, m: int) -> int:
        """The updates between a layer's forward of a micro-batch and its update."""
        layout = self.timeline.layout(m)
        return len(layout.plan.stages) - 1 - layout.stage[layer]

    def ahead(self, layer: int, m: int) -> int:
        """The updates between a layer's forward of a micro-batch and its backward."""
        return self.timeline.version(layer, m, back=True) - self.timeline.version(
            layer, m, back=False
        )

    # Reading

    def reading(self, p: int, layer: int, m: int, *, back: bool) -> Value:
        """The version that the rule says, or what has been computed of it.

        Args:
            p: the parameter.
            layer: that reads it.
            m: the micro-batch.
            back: by the backward rather than the forward.
        """
        shifted = self._shifted(p, m, back=back)
        if shifted in self.made and not self.is_tied(p, m):
            return shifted
        return self.graph.parameter(p, self.version(p, m, back=back))

    def shifts(
        self, layer: Layer, m: int, wanted: Iterable[int], *, back: bool
    ) -> Iterator[Operation]:
        """Predicts or corrects a layer's weights along what is remembered of their updates, all at once.

        Args:
            layer: whose weights.
            m: the micro-batch.
            wanted: the parameters that will be read.
            back: by the backward rather than the forward.
        """
        if not (self.schedule.decay is not None if back else self.schedule.predicts):
            return
        own = [p for p in layer.reading(ValueKind.PARAMETER) if not self.is_tied(p, m)]
        by = ValueKind.DELTA if back else ValueKind.APPLIED
        own = [
            p
            for p in own
            if self._shifted(p, m, back=back) not in self.made and Value(by, p) in self.made
        ]
        updates = -self.tau(layer.id, m) if back else self.ahead(layer.id, m)
        if not updates or set(own).isdisjoint(wanted):
            return
        reads = [Value(ValueKind.PARAMETER, p, version=self.version(p, m, back=back)) for p in own]
        reads += [Value(by, p) for p in own]
        writes = [Write(self._shifted(p, m, back=back), self._bytes(p)) for p in own]
        self.made.update(write.value for write in writes)
        yield Operation(Kind.SHIFT, layer.id, m, tuple(reads), tuple(writes), ShiftRun(updates))

    def gradient(self, p: int, layer: int, m: int) -> Value:
        """The sum of the update that a micro-batch belongs to; where devices take turns, that of those that share one.

        Args:
            p: the parameter.
            layer: that reads it.
            m: the micro-batch.
        """
        turns, update = self.timeline.replicas(layer, m), m // self.timeline.every
        first = NEVER if turns == 1 else update * self.timeline.every + m % turns
        return Value(ValueKind.GRADIENT, p, layer, first, update)

    def tied_versions(self, layer: Layer, m: int) -> tuple[Delivery, ...]:
        """The owner sends each version of a parameter on, with the first micro-batch that reads it."""
        parameters = self.graph.parameters
        owned = [p for p in layer.reading(ValueKind.PARAMETER) if parameters[p].owner == layer.id]
        return tuple(
            Delivery(
                self.graph.parameter(p, self.version(p, m, back=False)),
                tuple(parameters[p].readers),
            )
            for p in owned
        )

    def use(self, kind: Kind, layer: Layer, m: int) -> Use:
        """Records what a layer's forward or backward has read.

        Args:
            kind: of task: a forward or a backward.
            layer: that ran.
            m: the micro-batch.
        """
        back, parameters = KINDS[kind].back, layer.reading(ValueKind.PARAMETER)
        assert back is not None, f"a {kind} reads no weights"
        tied = tuple((p, self.version(p, m, back=back)) for p in parameters if self.is_tied(p, m))
        shift = self.tau(layer.id, m) if back else self.ahead(layer.id, m)
        shifted = any(self._shifted(p, m, back=back) in self.made for p in parameters)
        version = self.timeline.version(layer.id, m, back=back)
        return Use(kind, layer.id, m, version, tied, shift if shifted else 0)

    def _shifted(self, p: int, m: int, *, back: bool) -> Value:
        return Value(ValueKind.CORRECTED if back else ValueKind.PREDICTED, p, microbatch=m)

    def _bytes(self, p: int) -> int:
        return self.graph.parameters[p].array.bytes


@dataclass(frozen=True)
class LayerUpdate:
    """The update of a layer after a micro-batch; `before` are the versions that it takes, `version` the one it makes.

    One that `remembers` reads the weights before it and after it.
    """

    layer: int
    version: int
    before: dict[int, int]
    remembers: bool
    operations: tuple[Operation, ...]


class StreamUpdates:
    """Expands the updates of a stream."""

    def __init__(self, weights: StreamWeights, expander: Expander, slots: Slots) -> None:
        self.weights, self.expander, self.slots = weights, expander, slots
        self._pieces = list(enumerate(slots.optimizer.update))

    def weigh(self, layer: Layer, m: int) -> Iterator[Operation]:
        """Once all micro-batches of an update have their weights: the sum."""
        graph, every = self.weights.graph, self.weights.timeline.every
        if graph.weighted and 1 in layer.writing(ValueKind.LOSS) and (m + 1) % every == 0:
            reads = [Value(ValueKind.LOSS, 1, microbatch=n) for n in range(m + 1 - every, m + 1)]
            total = Write(Value(ValueKind.WEIGHT, 0, graph.loss_layer, version=m // every), 4)
            yield self.expander.operation(Kind.WEIGHT, layer.id, m, reads, [total], SumRun(every))

    def added_up(self, layer: int, m: int) -> Iterator[Operation]:
        """Yields what adds up the gradients of a layer's own parameters, where devices have taken turns in them.

        Args:
            layer: whose update comes.
            m: the last micro-batch of it.
        """
        graph, weights = self.weights.graph, self.weights
        owned = graph.trained(graph.owned(layer))
        for reader in dict.fromkeys(
            reader for p in owned for reader in graph.parameters[p].readers
        ):
            mine = [p for p in owned if reader in graph.parameters[p].readers]
            sums = [
                Value(ValueKind.GRADIENT, p, reader, version=m // weights.timeline.every)
                for p in mine
            ]
            writes = tuple(Write(v, graph.parameters[v.index].array.bytes) for v in sums)
            turns = weights.timeline.replicas(reader, m)
            parts = [
                [weights.gradient(p, reader, m - turns + 1 + q) for p in mine] for q in range(turns)
            ]
            yield from summed(layer, m, parts, sums, writes)

    def update(self, layer: int, m: int) -> LayerUpdate:
        """The update of a layer after a micro-batch."""
        update, graph = m // self.weights.timeline.every, self.weights.graph
        owned = graph.trained(graph.owned(layer))
        before = {p: self.slots.newest[p] for p in owned}
        schedule, tau = self.weights.schedule, self.weights.tau(layer, m)
        remembers = tau > 0 and (schedule.decay is not None or schedule.predicts)
        operations = []
        for number, piece in self._pieces:
            if piece.layer == layer:
                reads = [self.slots.value(slot, layer, update, m) for slot in piece.reads]
                made = zip(piece.writes, piece.program.out_avals, strict=True)
                writes = [self.slots.written(slot, aval, layer, m) for slot, aval in made]
                operations.append(
                    self.expander.operation(Kind.U, layer, m, reads, writes, PieceRun(number))
                )
        if remembers and owned:
            operations += self._remembered(layer, before, m, tau)
        elif owned:
            operations[-1] = replace(operations[-1], forgets=self._forgotten(layer, before))
        return LayerUpdate(layer, update + 1, before, remembers, tuple(operations))

    def _remembered(
        self, layer: int, before: dict[int, int], m: int, tau: int
    ) -> Iterator[Operation]:
        """Yields what PipeMare and XPipe do to remember an update: the mean of all, or the last one."""
        corrects = self.weights.schedule.decay is not None
        kind = ValueKind.DELTA if corrects else ValueKind.APPLIED
        size = {p: self.weights.graph.parameters[p].array.bytes for p in before}
        memory = [Write(Value(kind, p), size[p]) for p in before]
        count = [Write(Value(ValueKind.UPDATES, 0, layer), 4)] if corrects else []
        if memory[0].value not in self.expander.made:
            yield self.expander.operation(Kind.ZERO, layer, m, [], [*memory, *count], ZeroRun(kind))
        old = [Value(ValueKind.PARAMETER, p, version=v) for p, v in before.items()]
        now = [
            Write(Value(ValueKind.PARAMETER, p, version=self.slots.newest[p]), size[p])
            for p in before
        ]
        reads = [*old, *(write.value for write in (*now, *memory, *count))]
        writes = [*now, *memory, *count] if corrects else memory
        yield self.expander.operation(Kind.SETTLE, layer, m, reads, writes, SettleRun(tau))

    def _forgotten(self, layer: int, owned: Iterable[int]) -> tuple[Value, ...]:
        """On the last stage nothing is remembered: what a layer brought there ends."""
        values = [Value(kind, p) for kind in (ValueKind.DELTA, ValueKind.APPLIED) for p in owned]
        gone = tuple(
            v for v in (Value(ValueKind.UPDATES, 0, layer), *values) if v in self.expander.made
        )
        self.expander.made.difference_update(gone)
        return gone
