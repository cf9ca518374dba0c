"""The rule by which layers read weights and sum gradients; here the one of a synchronous step.

An asynchronous schedule has another one (stream/weights.py). Expanding asks the rule and knows
neither.
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
    """Whether several micro-batches belong to an update: their gradients are then added up."""

    def reading(
        self,
        p: int,
        layer: int,
        m: int,
        *,
        back: bool,
    ) -> Value:
        """Names the version of a parameter that a layer's forward, or backward, of a micro-batch
        reads.

        Args:
            p: the parameter.
            layer: that reads it.
            m: the micro-batch.
            back: of the backward rather than the forward.
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
        """Yields what is computed of a layer's weights before they can be read.

        Args:
            layer: whose weights.
            m: the micro-batch.
            parameters: those that will be read.
            back: by the backward rather than the forward.
        """
        ...

    def gradient(self, p: int, layer: int, m: int) -> Value:
        """Names the sum to which a layer's gradient of a parameter is added.

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

    def reading(
        self,
        p: int,
        layer: int,
        m: int,
        *,
        back: bool,
    ) -> Value:
        """Names the parameter as it was before the step, whoever reads it (`Weights.reading` has
        the arguments).
        """
        return self._graph.parameter(p, version=0)

    def shifts(
        self,
        layer: Layer,
        m: int,
        parameters: Iterable[int],
        *,
        back: bool,
    ) -> Iterator[Operation]:
        """Yields nothing: weights are read as they are (`Weights.shifts` has the arguments)."""
        return iter(())

    def gradient(self, p: int, layer: int, m: int) -> Value:
        """Names the one sum of the step (`Weights.gradient` has the arguments)."""
        return Value(ValueKind.GRADIENT, p, layer, version=0)
