"""The parts of values that replicas work on: their names, their sizes, and their examples.

Replicas are the places that run the same stage, each on a slice of every micro-batch.
"""

from collections.abc import Sequence

from jvpipe.ir.examples import Batching, Examples, Over, Spread
from jvpipe.ir.values import Value, ValueKind
from jvpipe.lowering.placement import Placement

Slice = Examples | None
"""The examples of a replica; None stands for all examples, if the stage has one place."""


class ReplicaParts:
    """The parts of values that replicas have: their names, sizes and examples.

    Args:
        where: the replicas of each layer.
        batching: how edges (tensors between layers) and aux depend on the examples.
    """

    def __init__(self, where: Placement, batching: Batching) -> None:
        self.where = where
        self.batching = batching
        self.graph = where.graph

    def named(self, value: Value, examples: Slice) -> Value:
        """Names the part of a value that belongs to some examples.

        A value that is the same for all examples has no parts, so its own name is returned.

        Args:
            value: the whole value.
            examples: the examples of the part.
        """
        match value.kind:
            case ValueKind.PARAMETER | ValueKind.CONSTANT | ValueKind.SEED:  # the same for all
                return value
            case ValueKind.STATE:  # each replica reads the whole leaf
                return value
            # An edge may be the same for all examples. Its cotangent still has parts: each replica
            # computes the part that follows from its examples.
            case ValueKind.TENSOR if self.batching.tensors[value.index].over is Over.NONE:
                return value
            case (
                ValueKind.TENSOR
                | ValueKind.BATCH
                | ValueKind.COTANGENT
                | ValueKind.RESIDUAL
                | ValueKind.HANDED
                | ValueKind.GRADIENT
                | ValueKind.LOSS
                | ValueKind.AUX
            ):
                return value._replace(examples=examples)
            case _:
                raise AssertionError(f"how replicas share {value} is not defined")

    def spread(self, value: Value) -> Spread:
        """Tells how an edge, its cotangent or a leaf of aux depends on the examples.

        Values of other kinds are never cut or joined by examples. For them the result is MIXED.
        """
        match value.kind:
            case ValueKind.TENSOR | ValueKind.COTANGENT:
                return self.batching.tensors[value.index]
            case ValueKind.AUX:
                return self.batching.aux[value.index]
            case (
                ValueKind.BATCH
                | ValueKind.RESIDUAL
                | ValueKind.HANDED
                | ValueKind.GRADIENT
                | ValueKind.LOSS
                | ValueKind.PARAMETER
                | ValueKind.CONSTANT
                | ValueKind.SEED
                | ValueKind.STATE
            ):
                return Spread(Over.MIXED)
            case _:
                raise AssertionError(f"how {value} depends on examples is not defined")

    def part_bytes(self, value: Value, size: int, examples: Slice) -> int:
        """Returns the bytes of the part of a value that belongs to some examples.

        Args:
            value: the whole value.
            size: the bytes of the whole value.
            examples: the examples of the part.
        """
        if examples is None or self.spread(value).over is not Over.ALONG:
            return size
        return size // self.graph.examples * examples.size

    def is_shared(self, value: Value) -> bool:
        """Tells whether a value is a leaf of the model state that replicas make in parts.

        Such parts have to be joined. Each replica makes any other leaf as a whole.
        """
        if value.kind is not ValueKind.STATE:
            return False
        return self.batching.state[value.index] is not None

    def whole(self, examples: Slice) -> Examples:
        """Returns the range of a slice, also for None, which stands for all examples."""
        return examples or Examples(0, self.graph.examples)

    def overlap(self, a: Slice, b: Slice) -> Slice:
        """Returns the examples that two slices share; there must be at least one.

        Args:
            a: a slice.
            b: a slice that shares an example with it.
        """
        x = self.whole(a)
        y = self.whole(b)
        shared = Examples(max(x.start, y.start), min(x.stop, y.stop))
        everything = self.whole(None)
        return None if shared == everything else shared

    def meeting(self, examples: Slice, layer: int) -> list[Slice]:
        """Finds the slices of a layer's replicas that share examples with a slice.

        Args:
            examples: the slice.
            layer: the layer.
        """
        mine = self.whole(examples)
        meeting = []
        for other in self.where.slices(layer):
            theirs = self.whole(other)
            if theirs.start < mine.stop and mine.start < theirs.stop:
                meeting.append(other)
        return meeting

    def share(self, examples: Slice) -> float:
        """Returns the fraction of all examples that a slice has."""
        return self.whole(examples).size / self.graph.examples

    def source(self, value: Value, layer: int) -> int:
        """Returns the layer that sends a given layer an edge, or its cotangents summed so far.

        Args:
            value: the edge, or its cotangent.
            layer: the layer that gets it.
        """
        tensor = self.graph.tensors[value.index]
        if value.kind is ValueKind.TENSOR:
            return tensor.producer
        # The next later reader has added its own cotangent to those of all readers after it.
        return next(reader for reader in tensor.readers if reader > layer)

    def makers(self, value: Value) -> Sequence[Slice]:
        """Returns the slices whose replicas make a loss or a leaf of aux.

        A leaf that is the same for all examples is taken from the first replica alone.
        """
        graph = self.graph
        writers = (layer.id for layer in graph.layers if value.index in layer.writing(value.kind))
        slices = self.where.slices(next(writers, graph.loss_layer))
        return slices[:1] if self.spread(value).over is Over.NONE else slices
