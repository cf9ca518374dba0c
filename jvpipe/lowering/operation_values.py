"""The values that operations of layers read, write and deliver, by name.

A value's name has its kind and index and, where they matter, its layer, micro-batch and version. It
says what the value is, but not where it lies. Only this file decides how names follow from layers
and micro-batches. So the operation that writes a value and those that read it use the same name.
"""

from collections.abc import Sequence
from typing import assert_never

from jvpipe.ir.buffers import Copy
from jvpipe.ir.layers import Array, Layer, LayerGraph, Ref, Signature, Source
from jvpipe.ir.values import Value, ValueKind
from jvpipe.lowering.operation import Delivery, Write
from jvpipe.lowering.placement import state_layers, written_state
from jvpipe.lowering.weight_rule import Weights


class LayerValues:
    """The names of the values that layers read, write and deliver.

    Args:
        graph: the layers, and the values between them.
        weights: the schedule's rule: which weights a task reads, and where gradients are added.
    """

    def __init__(self, graph: LayerGraph, weights: Weights) -> None:
        self.graph = graph
        self.weights = weights
        self._written = written_state(graph)

    def read_by(self, ref: Ref, m: int, *, back: bool = False) -> Value:
        """Names a value that a layer reads for a micro-batch.

        A layer reads the model state as the micro-batch before `m` left it.

        Args:
            ref: one of the layer's inputs.
            m: the micro-batch.
            back: whether the layer's backward reads the value; if not, its forward does.
        """
        match ref.kind:
            case ValueKind.PARAMETER:
                return self.weights.reading(ref.index, m, back=back)
            case ValueKind.CONSTANT:
                return Value(ValueKind.CONSTANT, ref.index)
            case ValueKind.STATE if ref.index not in self._written:  # one for all micro-batches
                return Value(ValueKind.STATE, ref.index)
            case ValueKind.STATE | ValueKind.BATCH | ValueKind.SEED | ValueKind.TENSOR:
                return Value(ref.kind, ref.index, microbatch=m)
            case _:
                raise AssertionError(f"no layer reads {ref}")

    def written_by(self, ref: Ref, m: int) -> Value:
        """Names a value that a layer writes for a micro-batch.

        The model state that the layer writes is named after the next micro-batch, which reads it.

        Args:
            ref: one of the layer's outputs.
            m: the micro-batch.
        """
        if ref.kind is ValueKind.STATE:
            m += 1
        return Value(ref.kind, ref.index, microbatch=m)

    def cotangent(self, ref: Ref, m: int) -> Value:
        """Names the sum of the cotangents of an edge for a micro-batch."""
        return Value(ValueKind.COTANGENT, ref.index, microbatch=m)

    def source(self, layer: Layer, source: Source, m: int) -> Value:
        """Names an input, an output or a residual of a forward that its backward reads.

        Args:
            layer: the layer.
            source: one of the sources of its backward's signature.
            m: the micro-batch.
        """
        kind, i = source
        match kind:
            case "input":
                return self.read_by(layer.reads[i], m, back=True)
            case "output":
                return self.written_by(layer.writes[i], m)
            case "residual":
                return Value(ValueKind.RESIDUAL, i, layer.id, m)
            case _:
                assert_never(kind)

    def sums(self, layer: Layer, m: int, signature: Signature) -> list[Value]:
        """Names the sums to which a backward adds its gradients.

        Args:
            layer: the layer.
            m: the micro-batch.
            signature: what the backward reads and yields.
        """
        parameters = [layer.reads[i].index for i in signature.gradients]
        return [self.weights.gradient(p, layer.id, m) for p in parameters]

    def write(self, ref: Ref, m: int, copy: Copy = Copy.OWN) -> Write:
        """Returns the write of a value that a layer makes for a micro-batch.

        Args:
            ref: one of the layer's outputs.
            m: the micro-batch.
            copy: which of the value's copies is written.
        """
        return Write.of(self.graph, self.written_by(ref, m), copy)

    def left(
        self,
        kind: ValueKind,
        layer: Layer,
        m: int,
        arrays: Sequence[Array],
        copy: Copy = Copy.OWN,
    ) -> list[Write]:
        """Names the values that one program of a layer leaves for a later program of the layer.

        Args:
            kind: RESIDUAL or HANDED.
            layer: the layer.
            m: the micro-batch.
            arrays: the values' arrays.
            copy: which copies of the values the program makes.
        """
        values = [Value(kind, i, layer.id, m) for i in range(len(arrays))]
        pairs = zip(values, arrays, strict=True)
        return [Write(value, array.bytes, copy) for value, array in pairs]

    def deliveries(self, layer: Layer, m: int) -> list[Delivery]:
        """Lists a forward's outputs for other layers. The loss stays where it is made."""
        graph = self.graph
        delivers = []
        for ref in layer.writes:
            match ref.kind:
                case ValueKind.TENSOR:
                    readers = graph.tensors[ref.index].readers
                case ValueKind.STATE:
                    readers = tuple(state_layers(graph, ref.index))
                case ValueKind.AUX:
                    readers = (graph.loss_layer,)
                case ValueKind.LOSS:
                    continue
                case _:
                    raise AssertionError(f"no layer writes {ref}")
            delivers.append(Delivery(self.written_by(ref, m), readers))
        return delivers
