"""Expanding: a task of a stage becomes the operations of its layers, over values.

    1F2    F(layer 3) F(layer 4)                            what a layer reads and writes follows from the graph,
    1B2    R(layer 3) ZERO(layer 4) B(layer 4) B(layer 3)   what it leaves and recomputes from the layout's fates,
    1I2    R(layer 3) I(layer 4) B(layer 3)                 which weights it reads from the rule of the schedule
    1W2    ZERO(layer 4) W(layer 4)

A layer whose stage drops what it makes is recomputed (R) before the first backward that reads it. In a split backward a
layer that has no halves runs whole: with the first half of its stage if others wait for its cotangents, else with the
second.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, assert_never, runtime_checkable

from jvpipe.ir.buffers import Copy
from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import Array, Layer, LayerGraph, Ref, Signature, Source
from jvpipe.ir.rows import LayerRun, Run, ZeroRun
from jvpipe.ir.values import NONE, Value, ValueKind
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.operation import Delivery, Operation, Write
from jvpipe.lowering.placement import written_state


@runtime_checkable
class Weights(Protocol):
    """The rule by which layers read weights and sum gradients."""

    accumulates: bool
    """Whether several micro-batches belong to an update: their gradients are then added up."""

    def reading(self, p: int, layer: int, m: int, *, back: bool) -> Value:
        """The parameter that a layer's forward, or backward, of a micro-batch reads.

        Args:
            p: the parameter.
            layer: that reads it.
            m: the micro-batch.
            back: of the backward rather than the forward.
        """
        ...

    def shifts(
        self, layer: Layer, m: int, wanted: Iterable[int], *, back: bool
    ) -> Iterator[Operation]:
        """Yields what is computed of a layer's weights before those that are wanted can be read.

        Args:
            layer: whose weights.
            m: the micro-batch.
            wanted: the parameters that will be read.
            back: by the backward rather than the forward.
        """
        ...

    def gradient(self, p: int, layer: int, m: int) -> Value:
        """The sum to which a layer's gradient of a parameter is added.

        Args:
            p: the parameter.
            layer: that reads it.
            m: the micro-batch.
        """
        ...


class OneVersion:
    """The weights of a synchronous step: every micro-batch reads the same, and one update follows."""

    accumulates = True

    def __init__(self, graph: LayerGraph) -> None:
        self._graph = graph

    def reading(self, p: int, layer: int, m: int, *, back: bool) -> Value:
        """The parameter as it was before the step, whoever reads it (`Weights.reading` has the arguments)."""
        return self._graph.parameter(p, version=0)

    def shifts(
        self, layer: Layer, m: int, wanted: Iterable[int], *, back: bool
    ) -> Iterator[Operation]:
        """Yields nothing: weights are read as they are (`Weights.shifts` has the arguments)."""
        return iter(())

    def gradient(self, p: int, layer: int, m: int) -> Value:
        """The one sum of the step (`Weights.gradient` has the arguments)."""
        return Value(ValueKind.GRADIENT, p, layer, version=0)


class Expander:
    """Expands tasks one after another; `made` are the values that there are by then."""

    def __init__(self, graph: LayerGraph, weights: Weights, made: set[Value]) -> None:
        self.graph, self.weights, self.made = graph, weights, made
        self._written = written_state(graph)
        self._recomputed: set[tuple[int, int]] = set()  # layers and micro-batches

    def operation(
        self,
        kind: Kind,
        layer: int,
        m: int,
        reads: Sequence[Value],
        writes: Sequence[Write],
        run: Run = None,
        delivers: Sequence[Delivery] = (),
        forgets: Sequence[Value] = (),
    ) -> Operation:
        """An operation; from here on there is what it writes, and no more what it forgets.

        Args:
            kind: of the operation.
            layer: or NONE.
            m: the micro-batch, or NONE.
            reads: the values that it reads.
            writes: the values that it yields.
            run: tells it from others of its kind.
            delivers: the values that go elsewhere.
            forgets: the values that nobody reads afterwards.
        """
        self.made.update(write.value for write in writes)
        self.made.difference_update(forgets)
        return Operation(
            kind, layer, m, tuple(reads), tuple(writes), run, tuple(delivers), tuple(forgets)
        )

    # Names

    def read_by(self, layer: Layer, ref: Ref, m: int, *, back: bool = False) -> Value:
        """Names a value that a layer reads for a micro-batch; the model state is as the one before left it.

        Args:
            layer: that reads.
            ref: one of its inputs.
            m: the micro-batch.
            back: by its backward rather than its forward.
        """
        match ref.kind:
            case ValueKind.PARAMETER:
                return self.weights.reading(ref.index, layer.id, m, back=back)
            case ValueKind.CONSTANT:
                return Value(ValueKind.CONSTANT, ref.index)
            case ValueKind.STATE if ref.index not in self._written:
                return Value(ValueKind.STATE, ref.index)
            case ValueKind.STATE | ValueKind.BATCH | ValueKind.SEED | ValueKind.TENSOR:
                return Value(ref.kind, ref.index, microbatch=m)
            case _:
                raise AssertionError(f"no layer reads {ref}")

    def written_by(self, ref: Ref, m: int) -> Value:
        """Names a value that a layer writes for a micro-batch; the model state is for the one after."""
        return Value(ref.kind, ref.index, microbatch=m + (ref.kind is ValueKind.STATE))

    def _bytes_of(self, ref: Ref) -> int:
        graph = self.graph
        match ref.kind:
            case ValueKind.TENSOR:
                return graph.tensors[ref.index].array.bytes
            case ValueKind.STATE:
                return graph.state[ref.index].bytes
            case ValueKind.AUX:
                return graph.aux[ref.index].bytes
            case ValueKind.LOSS:
                return graph.loss_bytes
            case _:
                raise AssertionError(f"no layer writes {ref}")

    # Tasks

    def forward(self, layer: Layer, m: int, layout: MicrobatchLayout) -> Iterator[Operation]:
        """A layer's forward; what it makes goes straight to the layers that read it.

        Args:
            layer: that runs.
            m: the micro-batch.
            layout: of the micro-batch.
        """
        yield from self.weights.shifts(layer, m, layer.reading(ValueKind.PARAMETER), back=False)
        reads = [self.read_by(layer, ref, m) for ref in layer.reads]
        writes = [Write(self.written_by(ref, m), self._bytes_of(ref)) for ref in layer.writes]
        copy = Copy.UNUSED if layer.id in layout.fates.recomputed else Copy.OWN
        writes += self._residuals(layer, m, layout, copy)
        delivers = self._deliveries(layer, m)
        yield self.operation(Kind.F, layer.id, m, reads, writes, LayerRun(layout.number), delivers)

    def evaluate(self, layer: Layer, m: int) -> Iterator[Operation]:
        """A forward that leaves nothing for a backward; the model state stays as it is."""
        reads = [
            self.read_by(layer, ref, 0 if ref.kind == ValueKind.STATE else m) for ref in layer.reads
        ]
        writes = [
            Write(
                self.written_by(ref, m),
                self._bytes_of(ref),
                Copy.UNUSED if ref.kind == ValueKind.STATE else Copy.OWN,
            )
            for ref in layer.writes
        ]
        delivers = [d for d in self._deliveries(layer, m) if d.value.kind is not ValueKind.STATE]
        yield self.operation(Kind.E, layer.id, m, reads, writes, None, delivers)

    def backward(self, layer: Layer, m: int, layout: MicrobatchLayout) -> Iterator[Operation]:
        """Yields a layer's whole backward, after recomputing what it needs.

        Args:
            layer: that runs.
            m: the micro-batch.
            layout: of the micro-batch.
        """
        yield from self._backward(Kind.B, layer, m, layout, layout.signatures[layer.id])

    def input_half(self, layer: Layer, m: int, layout: MicrobatchLayout) -> Iterator[Operation]:
        """Yields what a layer does for the cotangents of its inputs, in a backward that is split.

        Args:
            layer: that runs.
            m: the micro-batch.
            layout: of the micro-batch.
        """
        halves = layout.halves.get(layer.id)
        if halves is not None:
            yield from self._backward(Kind.I, layer, m, layout, halves.input, leaves=halves.handed)
        elif layout.signatures[layer.id].returned:
            yield from self.backward(layer, m, layout)

    def weight_half(self, layer: Layer, m: int, layout: MicrobatchLayout) -> Iterator[Operation]:
        """Yields what is left of a layer's backward after that: it adds its gradients.

        Args:
            layer: that runs.
            m: the micro-batch.
            layout: of the micro-batch.
        """
        halves = layout.halves.get(layer.id)
        if halves is not None:
            yield from self._backward(Kind.W, layer, m, layout, halves.weight, takes=halves.handed)
        elif not layout.signatures[layer.id].returned:
            yield from self.backward(layer, m, layout)

    def _backward(
        self,
        kind: Kind,
        layer: Layer,
        m: int,
        layout: MicrobatchLayout,
        signature: Signature,
        takes: Sequence[Array] = (),
        leaves: Sequence[Array] = (),
    ) -> Iterator[Operation]:
        """Yields a backward or a half of it. Cotangents go to the next earlier reader, last to the producer.

        Args:
            kind: B, I or W.
            layer: that runs.
            m: the micro-batch.
            layout: of the micro-batch.
            signature: what it reads and yields.
            takes: what the other half has handed it.
            leaves: what it hands to the other half.
        """
        tensors = self.graph.tensors
        if signature.is_idle:
            return
        for source, i in signature.sources:
            if source == "input":
                yield from self._ensure(layer, layer.reads[i], m, layout)
        if layer.id in layout.fates.recomputed:
            yield from self._recompute(layer, m, layout)
        sums = [
            self.weights.gradient(layer.reads[i].index, layer.id, m) for i in signature.gradients
        ]
        if self.weights.accumulates and sums and sums[0] not in self.made:
            yield self._zeros(layer, m)
        inputs = [layer.reads[i] for source, i in signature.sources if source == "input"]
        wanted = [ref.index for ref in inputs if ref.kind == ValueKind.PARAMETER]
        yield from self.weights.shifts(layer, m, wanted, back=True)
        reads = [self._source(layer, source, m) for source in signature.sources]
        reads += [self._cotangent(layer.writes[i], m) for i in signature.cotangents]
        reads += [self._cotangent(layer.reads[i], m) for i in signature.partial]
        reads += [value for value, *_ in self._handed(layer, m, takes)]
        reads += sums if self.weights.accumulates else []
        writes = [Write(value, self.graph.parameters[value.index].array.bytes) for value in sums]
        returned = [layer.reads[i] for i in signature.returned]
        writes += [
            Write(self._cotangent(ref, m), tensors[ref.index].array.bytes) for ref in returned
        ]
        writes += self._handed(layer, m, leaves)
        delivers = []
        for ref in returned:
            earlier = [r for r in tensors[ref.index].readers if r < layer.id]
            following = earlier[-1] if earlier else tensors[ref.index].producer
            delivers.append(Delivery(self._cotangent(ref, m), (following,)))
        yield self.operation(kind, layer.id, m, reads, writes, LayerRun(layout.number), delivers)

    def losses(self, layer: Layer, batch: range, weight: Value) -> Iterator[Operation]:
        """Once every micro-batch of a step has its loss and aux: their sums; `weight` is what those of weights is.

        Args:
            layer: that has just run.
            batch: the micro-batches of the step.
            weight: the sum of the weights.
        """
        graph = self.graph
        if not (layer.writing(ValueKind.LOSS) or layer.writing(ValueKind.AUX)):
            return
        parts = [(ValueKind.LOSS, i) for i in range(1 + graph.weighted)]
        parts += [(ValueKind.AUX, i) for i in range(len(graph.aux))]
        reads = [Value(kind, i, microbatch=m) for kind, i in parts for m in batch]
        loss, *groups = metrics_of(graph, batch.start)
        if loss in self.made or not self.made.issuperset(reads):
            return
        writes = [
            Write(loss, graph.loss_bytes),
            *([Write(weight, graph.loss_bytes)] if graph.weighted else []),
        ]
        for group, (value, members) in enumerate(zip(groups, graph.aux_groups, strict=True)):
            size = sum(graph.aux[i].bytes for i in members[:1])
            writes.append(Write(value, size * (1 if graph.aux_reduction(group) else len(batch))))
        yield self.operation(Kind.LOSS, graph.loss_layer, NONE, reads, writes)

    # Parts of them

    def _residuals(self, layer: Layer, m: int, layout: MicrobatchLayout, copy: Copy) -> list[Write]:
        residuals = layout.signatures[layer.id].residuals
        return [
            Write(Value(ValueKind.RESIDUAL, i, layer.id, m), a.bytes, copy)
            for i, a in enumerate(residuals)
        ]

    def _handed(self, layer: Layer, m: int, arrays: Sequence[Array]) -> list[Write]:
        return [
            Write(Value(ValueKind.HANDED, i, layer.id, m), a.bytes) for i, a in enumerate(arrays)
        ]

    def _deliveries(self, layer: Layer, m: int) -> list[Delivery]:
        graph = self.graph
        delivers = []
        for ref in layer.writes:
            match ref.kind:
                case ValueKind.TENSOR:
                    delivers.append(
                        Delivery(self.written_by(ref, m), graph.tensors[ref.index].readers)
                    )
                case ValueKind.STATE:
                    delivers.append(
                        Delivery(self.written_by(ref, m), self._state_layers(ref.index))
                    )
                case ValueKind.AUX:
                    delivers.append(Delivery(self.written_by(ref, m), (graph.loss_layer,)))
                case ValueKind.LOSS:
                    pass  # it is summed where it is made
                case _:
                    raise AssertionError(f"no layer writes {ref}")
        return delivers

    def _state_layers(self, k: int) -> tuple[int, ...]:
        reading = [layer.id for layer in self.graph.layers if k in layer.reading(ValueKind.STATE)]
        return tuple(
            reading
            or [layer.id for layer in self.graph.layers if k in layer.writing(ValueKind.STATE)]
        )

    def _cotangent(self, ref: Ref, m: int) -> Value:
        return Value(ValueKind.COTANGENT, ref.index, microbatch=m)

    def _source(self, layer: Layer, source: Source, m: int) -> Value:
        """Names what a backward reads of its forward: an input, an output or a residual."""
        kind, i = source
        match kind:
            case "input":
                return self.read_by(layer, layer.reads[i], m, back=True)
            case "output":
                return self.written_by(layer.writes[i], m)
            case "residual":
                return Value(ValueKind.RESIDUAL, i, layer.id, m)
            case _:
                assert_never(kind)

    def _zeros(self, layer: Layer, m: int) -> Operation:
        """Fresh accumulators for a layer."""
        trained = self.graph.trained(layer.reading(ValueKind.PARAMETER))
        size = {p: self.graph.parameters[p].array.bytes for p in trained}
        writes = [Write(self.weights.gradient(p, layer.id, m), size[p]) for p in trained]
        return self.operation(Kind.ZERO, layer.id, m, [], writes, ZeroRun(ValueKind.GRADIENT))

    def _ensure(
        self, reader: Layer, ref: Ref, m: int, layout: MicrobatchLayout
    ) -> Iterator[Operation]:
        """Recomputes an edge if its stage dropped it."""
        if layout.drops(reader, ref):
            yield from self._recompute(
                self.graph.layers[self.graph.tensors[ref.index].producer], m, layout
            )

    def _recompute(self, layer: Layer, m: int, layout: MicrobatchLayout) -> Iterator[Operation]:
        """Recomputes a layer's forward, once; it leaves what backwards read."""
        if (layer.id, m) in self._recomputed:
            return
        self._recomputed.add((layer.id, m))
        for ref in layer.reads:
            yield from self._ensure(layer, ref, m, layout)
        yield from self.weights.shifts(layer, m, layer.reading(ValueKind.PARAMETER), back=True)
        reads = [self.read_by(layer, ref, m, back=True) for ref in layer.reads]
        writes = [
            Write(
                self.written_by(ref, m),
                self._bytes_of(ref),
                Copy.RECOMPUTED if layout.drops(layer, ref) else Copy.UNUSED,
            )
            for ref in layer.writes
        ]
        writes += self._residuals(layer, m, layout, Copy.OWN)
        yield self.operation(Kind.R, layer.id, m, reads, writes, LayerRun(layout.number))


def metrics_of(graph: LayerGraph, first: int = 0) -> list[Value]:
    """Names the metrics of a step that begins with a micro-batch: the loss, and each group of aux.

    >>> [str(value) for value in metrics_of(LayerGraph((), (), (), aux_groups=((0,),)), 8)]
    ['metric 0 micro-batch 8', 'metric 1 micro-batch 8']
    """
    return [Value(ValueKind.METRIC, i, microbatch=first) for i in range(1 + len(graph.aux_groups))]


def gradient_norm(graph: LayerGraph) -> Value:
    """The metric that an update may add."""
    return Value(ValueKind.METRIC, 1 + len(graph.aux_groups), microbatch=0)
