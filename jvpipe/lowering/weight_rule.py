"""The rule of a synchronous step for the weights that layers read and the sums of their gradients.

The expanding pass (expand.py) calls the methods of a rule. For a stream (a run without a flush
between its steps), a subclass overrides every method (stream/weights.py).
"""

from collections.abc import Iterable, Iterator

from jvpipe.ir.layers import Layer, LayerGraph
from jvpipe.ir.values import Value, ValueKind
from jvpipe.lowering.operation import Operation


class Weights:
    """The rule for the weights that layers read and the sums to which they add gradients.

    In a synchronous step all micro-batches read one version, which is then updated.

    Args:
        graph: the layers.
        accumulates: whether an update takes the gradients of several micro-batches, which are then
            added up.
    """

    def __init__(self, graph: LayerGraph, *, accumulates: bool = True) -> None:
        self.graph = graph
        self.accumulates = accumulates

    def reading(self, p: int, m: int, *, back: bool) -> Value:
        """Names the version of a parameter that a layer reads for a micro-batch.

        Args:
            p: the parameter.
            m: the micro-batch.
            back: whether the layer's backward reads it; if not, its forward does.
        """
        return self.graph.parameter(p, version=0)

    def shifts(
        self,
        layer: Layer,
        m: int,
        parameters: Iterable[int],
        *,
        back: bool,
    ) -> Iterator[Operation]:
        """Yields the operations that compute shifted weights for a layer before it reads them.

        A synchronous step shifts no weights.

        Args:
            layer: the layer.
            m: the micro-batch.
            parameters: the parameters that the layer will read.
            back: whether the layer's backward reads them; if not, its forward does.
        """
        return iter(())

    def gradient(self, p: int, layer: int, m: int) -> Value:
        """Names the sum to which a layer's gradient of a parameter is added.

        A synchronous step has one sum for each reader of the parameter.

        Args:
            p: the parameter.
            layer: the layer that reads the parameter.
            m: the micro-batch.
        """
        return Value(ValueKind.GRADIENT, p, layer, version=0)
