"""Expanding: a task of a stage becomes operations of the stage's layers, on values.

A task is a stage, a kind and a micro-batch: 1F2 is the forward of micro-batch 2 on stage 1. An
operation is the work of one program. The values that it reads and writes are not yet assigned to
places (devices). In this example stage 1 has layers 3 and 4. Layer 3 is recomputed and has no
weights to train, and its backward has no halves. Micro-batch 2 is the first that runs backward, so
layer 4 has no accumulator of gradients yet:

    task   operations, in the order in which they run
    1F2    F(layer 3) F(layer 4)
    1B2    R(layer 3) ZERO(layer 4) B(layer 4) B(layer 3)
    1I2    R(layer 3) I(layer 4) B(layer 3)
    1W2    ZERO(layer 4) W(layer 4)

Three things determine an operation. The graph says which values a layer reads and writes. The fates
of the micro-batch's tensors say which values the layer leaves for its backward and which are
recomputed. The rule of the schedule says which version of the weights the layer reads.

If a stage drops outputs of a layer, the layer runs again (R) before the first backward that reads
them. If a stage's backward is split, a layer without halves still runs its backward as a whole. If
this backward returns cotangents, it runs with the first half (I), because other layers wait for
them. Otherwise it runs with the second half (W).

The order of summation is the same for every plan. Gradients are added to one accumulator, which
ZERO makes, in the order in which the micro-batches run backward. Cotangents of an edge (a tensor
between layers) are added from the edge's last reader to its first. A different order would round
differently, so results would depend on the plan.
"""

from collections.abc import Iterator, Sequence

from jvpipe.ir.buffers import Copy
from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.layers import Layer, LayerGraph, Ref, Signature
from jvpipe.ir.rows import LayerRun, Run, ZeroRun
from jvpipe.ir.values import NONE, Value, ValueKind
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.operation import Delivery, Operation, Write
from jvpipe.lowering.operation_values import LayerValues
from jvpipe.lowering.weight_rule import Weights


class Expander(LayerValues):
    """The maker of operations: it takes tasks one by one and tracks which values exist.

    Args:
        graph: the layers, and the values between them.
        weights: the schedule's rule: which weights a task reads, and where gradients are added.
        existing: the values made so far and not yet forgotten; each operation updates this set.
    """

    def __init__(self, graph: LayerGraph, weights: Weights, existing: set[Value]) -> None:
        super().__init__(graph, weights)
        self.existing = existing
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
    ) -> Operation:
        """Makes an operation, and adds what it writes to `existing`.

        Args:
            kind: the kind of the operation.
            layer: the layer that runs, or NONE.
            m: the micro-batch, or NONE.
            reads: the values that it reads.
            writes: the values that it yields.
            run: the details of its row, such as the bounds of a slice.
            delivers: the values to send to layers that may run at other places.
        """
        self.existing.update(write.value for write in writes)
        return Operation(
            kind,
            layer,
            m,
            reads=tuple(reads),
            writes=tuple(writes),
            run=run,
            delivers=tuple(delivers),
        )

    # Tasks

    def forward(self, layer: Layer, m: int, layout: MicrobatchLayout) -> Iterator[Operation]:
        """Yields a layer's forward, whose outputs are sent at once to the layers that read them.

        Args:
            layer: the layer that runs.
            m: the micro-batch.
            layout: the plan, fates and programs of the micro-batch.
        """
        yield from self.weights.shifts(
            layer,
            m,
            layer.reading(ValueKind.PARAMETER),
            back=False,
        )
        reads = [self.read_by(ref, m) for ref in layer.reads]
        writes = [self.write(ref, m) for ref in layer.writes]
        # If the layer will be recomputed, these residuals are unused: R makes them again.
        copy = Copy.UNUSED if layer.id in layout.fates.recomputed else Copy.OWN
        residuals = layout.signatures[layer.id].residuals
        writes += self.left(ValueKind.RESIDUAL, layer, m, residuals, copy)
        delivers = self.deliveries(layer, m)
        run = LayerRun(layout.number)
        yield self.operation(
            Kind.F,
            layer.id,
            m,
            reads,
            writes,
            run,
            delivers,
        )

    def evaluate(self, layer: Layer, m: int) -> Iterator[Operation]:
        """Yields a forward that leaves nothing for a backward.

        The model state stays as it is: every micro-batch reads the state from before the
        evaluation, and no operation reads the state that the program writes.

        Args:
            layer: the layer that runs.
            m: the micro-batch.
        """
        reads = []
        for ref in layer.reads:
            reader = 0 if ref.kind is ValueKind.STATE else m
            reads.append(self.read_by(ref, reader))
        writes = []
        for ref in layer.writes:
            copy = Copy.UNUSED if ref.kind is ValueKind.STATE else Copy.OWN
            writes.append(self.write(ref, m, copy))
        deliveries = self.deliveries(layer, m)
        delivers = [x for x in deliveries if x.value.kind is not ValueKind.STATE]
        yield self.operation(
            Kind.E,
            layer.id,
            m,
            reads,
            writes,
            None,
            delivers,
        )

    def backward(
        self,
        kind: Kind,
        layer: Layer,
        m: int,
        layout: MicrobatchLayout,
    ) -> Iterator[Operation]:
        """Yields a layer's backward, or the half that a task runs.

        The first half (I) gives the cotangents of the layer's inputs. The second half (W) adds the
        gradients of its weights. A layer without halves runs its whole backward with one of the
        two: with I if it returns cotangents, or else with W.

        Args:
            kind: the kind of the task: B, I or W.
            layer: the layer that runs.
            m: the micro-batch.
            layout: the plan, fates and programs of the micro-batch.
        """
        whole = layout.signatures[layer.id]
        halves = layout.halves.get(layer.id)
        between = KINDS[kind].between  # 1 for I, -1 for W, 0 for B
        if between and halves:
            half = halves.input if between > 0 else halves.weight
            yield from self._backward(kind, layer, m, layout, half)
        elif not between or bool(whole.returned) == (between > 0):
            yield from self._backward(Kind.B, layer, m, layout, whole)

    def _backward(
        self,
        kind: Kind,
        layer: Layer,
        m: int,
        layout: MicrobatchLayout,
        signature: Signature,
    ) -> Iterator[Operation]:
        """Yields a backward or one half of it, after the forwards that are recomputed for it.

        The program takes and yields arrays in these orders, which are those of programs/layer.py:

            reads     sources, cotangents, partial sums of cotangents, handed values, gradient sums
            writes    gradient sums, cotangents of the inputs, handed values

        Args:
            kind: B, I or W.
            layer: the layer that runs.
            m: the micro-batch.
            layout: the plan, fates and programs of the micro-batch.
            signature: what the program reads and yields.
        """
        if signature.is_idle:
            return
        yield from self._before_backward(layer, m, layout, signature)
        sums = self.sums(layer, m, signature)
        halves = layout.halves.get(layer.id)
        handed = self.left(ValueKind.HANDED, layer, m, halves.handed) if halves else []
        between = KINDS[kind].between
        reads = [self.source(layer, source, m) for source in signature.sources]
        reads += [self.cotangent(layer.writes[i], m) for i in signature.cotangents]
        reads += [self.cotangent(layer.reads[i], m) for i in signature.partial]
        if between < 0:
            reads += [write.value for write in handed]
        if self.weights.accumulates:
            reads += sums
        writes = [Write.of(self.graph, value) for value in sums]
        delivers = []
        for i in signature.returned:
            ref = layer.reads[i]
            tensor = self.graph.tensors[ref.index]
            cotangent = self.cotangent(ref, m)
            writes.append(Write.of(self.graph, cotangent))
            # The sum so far goes to the next earlier reader or, if there is none, to the producer.
            earlier = [reader for reader in tensor.readers if reader < layer.id]
            delivers.append(Delivery(cotangent, (max(earlier, default=tensor.producer),)))
        if between > 0:
            writes += handed
        run = LayerRun(layout.number)
        yield self.operation(
            kind,
            layer.id,
            m,
            reads,
            writes,
            run,
            delivers,
        )

    def _before_backward(
        self,
        layer: Layer,
        m: int,
        layout: MicrobatchLayout,
        signature: Signature,
    ) -> Iterator[Operation]:
        """Yields the operations that a backward needs first.

        They recompute dropped values, make accumulators of gradients, and correct the weights if
        the schedule does so (PipeMare).

        Args:
            layer: the layer that runs.
            m: the micro-batch.
            layout: the plan, fates and programs of the micro-batch.
            signature: what the backward reads and yields.
        """
        inputs = [layer.reads[i] for source, i in signature.sources if source == "input"]
        for ref in inputs:
            yield from self._ensure(layer, ref, m, layout)
        if layer.id in layout.fates.recomputed:
            yield from self._recompute(layer, m, layout)
        sums = self.sums(layer, m, signature)
        if self.weights.accumulates and sums and sums[0] not in self.existing:
            yield self._zeros(layer, m)
        parameters = [ref.index for ref in inputs if ref.kind == ValueKind.PARAMETER]
        yield from self.weights.shifts(layer, m, parameters, back=True)

    def losses(self, layer: Layer, batch: range, weight: Value) -> Iterator[Operation]:
        """Yields the operation that reduces the losses and aux of a step, once all of them exist.

        Args:
            layer: the layer whose forward has just run.
            batch: the micro-batches of the step.
            weight: the name of the sum of the losses' weights.
        """
        graph = self.graph
        if not (layer.writing(ValueKind.LOSS) or layer.writing(ValueKind.AUX)):
            return
        parts = [(ValueKind.LOSS, i) for i in range(1 + graph.weighted)]
        parts += [(ValueKind.AUX, i) for i in range(len(graph.aux))]
        reads = [Value(kind, i, microbatch=m) for kind, i in parts for m in batch]
        loss, *groups = metrics_of(graph, batch.start)
        if loss in self.existing or not self.existing.issuperset(reads):
            return
        writes = [Write(loss, graph.loss_bytes)]
        if graph.weighted:
            writes.append(Write(weight, graph.loss_bytes))
        for group, (value, members) in enumerate(zip(groups, graph.aux_groups, strict=True)):
            size = graph.aux[members[0]].bytes if members else 0
            if graph.aux_reduction(group) is None:  # the leaves of all micro-batches are stacked
                size *= len(batch)
            writes.append(Write(value, size))
        yield self.operation(
            Kind.LOSS,
            graph.loss_layer,
            NONE,
            reads,
            writes,
        )

    def _zeros(self, layer: Layer, m: int) -> Operation:
        """Makes the operation that makes new accumulators of gradients for a layer."""
        trained = self.graph.trained(layer.reading(ValueKind.PARAMETER))
        sums = [self.weights.gradient(p, layer.id, m) for p in trained]
        writes = [Write.of(self.graph, value) for value in sums]
        run = ZeroRun(ValueKind.GRADIENT)
        return self.operation(Kind.ZERO, layer.id, m, [], writes, run)

    def _ensure(
        self,
        reader: Layer,
        ref: Ref,
        m: int,
        layout: MicrobatchLayout,
    ) -> Iterator[Operation]:
        """Yields the forwards that recompute an edge, if the reader's stage has dropped the edge.

        Args:
            reader: the layer that reads the edge.
            ref: an input of that layer.
            m: the micro-batch.
            layout: the plan, fates and programs of the micro-batch.
        """
        if layout.drops(reader, ref):
            producer = self.graph.tensors[ref.index].producer
            yield from self._recompute(self.graph.layers[producer], m, layout)

    def _recompute(self, layer: Layer, m: int, layout: MicrobatchLayout) -> Iterator[Operation]:
        """Yields a layer's forward again, for later backwards, at most once per micro-batch.

        If inputs of the layer were also dropped, the layers that make them run again first. The
        recursion ends, because the producer of an input is an earlier layer.

        Args:
            layer: the layer.
            m: the micro-batch.
            layout: the plan, fates and programs of the micro-batch.
        """
        if (layer.id, m) in self._recomputed:
            return
        self._recomputed.add((layer.id, m))
        for ref in layer.reads:
            yield from self._ensure(layer, ref, m, layout)
        yield from self.weights.shifts(
            layer,
            m,
            layer.reading(ValueKind.PARAMETER),
            back=True,
        )
        reads = [self.read_by(ref, m, back=True) for ref in layer.reads]
        writes = []
        for ref in layer.writes:
            copy = Copy.RECOMPUTED if layout.drops(layer, ref) else Copy.UNUSED
            writes.append(self.write(ref, m, copy))
        residuals = layout.signatures[layer.id].residuals
        writes += self.left(ValueKind.RESIDUAL, layer, m, residuals)
        run = LayerRun(layout.number)
        yield self.operation(Kind.R, layer.id, m, reads, writes, run)


def metrics_of(graph: LayerGraph, first: int = 0) -> list[Value]:
    """Names a step's metrics (the loss and each group of aux) by the step's first micro-batch.

    >>> [str(value) for value in metrics_of(LayerGraph((), (), (), aux_groups=((0,),)), 8)]
    ['metric 0 micro-batch 8', 'metric 1 micro-batch 8']
    """
    count = 1 + len(graph.aux_groups)  # the loss, then a metric per group
    return [Value(ValueKind.METRIC, i, microbatch=first) for i in range(count)]


def gradient_norm(graph: LayerGraph) -> Value:
    """Names the norm of the gradient, a metric that an update may add."""
    return Value(ValueKind.METRIC, 1 + len(graph.aux_groups), microbatch=0)
