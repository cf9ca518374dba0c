"""The rule by which layers read weights and sum gradients, and that rule for a synchronous step.

The expanding pass (expand.py) asks a rule and does not know which. Asynchronous schedules have a
rule of their own (stream/weights.py).
"""

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from jvpipe.ir.layers import Layer, LayerGraph
from jvpipe.ir.values import Value, ValueKind
from jvpipe.lowering.operation import Operation


@runtime_checkable
class Weights(Protocol):
    """The rule by which layers read weights and sum gradients."""

    accumulates: bool
    """Whether an update takes the gradients of several micro-batches, which are then added up."""

    def reading(
        self,
        p: int,
        layer: int,
        m: int,
        *,
        back: bool,
    ) -> Value:
        """Names the version of a parameter that a layer reads for a micro-batch.

        Args:
            p: the parameter.
            layer: the layer that reads it.
            m: the micro-batch.
            back: whether the layer's backward reads it, rather than its forward.
        """
        ...

    def shifts(
        self,
        layer: Layer,
        m: int,
        parameters: Iterable[int],
        *,
        back: bool,
    ) -> Iterator[Operation]:
        """Yields the operations that compute shifted weights for a layer before it reads them.

        Args:
            layer: the layer.
            m: the micro-batch.
            parameters: the parameters that the layer will read.
            back: whether the layer's backward reads them, rather than its forward.
        """
        ...

    def gradient(self, p: int, layer: int, m: int) -> Value:
        """Names the sum to which a layer's gradient of a parameter is added.

        Args:
            p: the parameter.
            layer: the layer that reads the parameter.
            m: the micro-batch.
        """
        ...


class OneVersion:
    """The rule of a synchronous step: all micro-batches read one version, which is then updated."""

    accumulates = True

    def __init__(self, graph: LayerGraph) -> None:
        self._graph = graph

    def reading(
        self,
        p: int,
        layer: int,
        m: int,
        *,
        back: bool,
    ) -> Value:
        """Names the version from before the step (`Weights.reading` has the arguments)."""
        return self._graph.parameter(p, version=0)

    def shifts(
        self,
        layer: Layer,
        m: int,
        parameters: Iterable[int],
        *,
        back: bool,
    ) -> Iterator[Operation]:
        """Yields nothing: no weights are shifted (`Weights.shifts` has the arguments)."""
        return iter(())

    def gradient(self, p: int, layer: int, m: int) -> Value:
        """Names the only sum of the step (`Weights.gradient` has the arguments)."""
        return Value(ValueKind.GRADIENT, p, layer, version=0)
