"""Operations: the work of programs on values, before the placing pass gives them places."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from jvpipe.ir.buffers import Copy
from jvpipe.ir.examples import Examples
from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.rows import AddRun, Run
from jvpipe.ir.values import Value, ValueKind
from jvpipe.lowering.graph_arrays import graph_array


class Write(NamedTuple):
    """A value that an operation yields, its bytes, and which of the value's copies it is."""

    value: Value
    bytes: int
    copy: Copy = Copy.OWN

    @staticmethod
    def of(graph: LayerGraph, value: Value, copy: Copy = Copy.OWN) -> "Write":
        """Returns the write of a whole value whose size the graph knows.

        Args:
            graph: the layers.
            value: the value, of all examples.
            copy: which of the value's copies is written.
        """
        if value.kind is ValueKind.LOSS:
            return Write(value, graph.loss_bytes, copy)
        array = graph_array(graph, value.kind, value.index)
        assert array is not None, f"the graph does not know the size of {value}"
        return Write(value, array.bytes, copy)


class Delivery(NamedTuple):
    """A value that is sent, as soon as it exists, to the places where some layers run.

    `examples` says which replicas of a layer get the value: those that work on these slices of a
    micro-batch. None stands for the first replica, or for the only one.
    """

    value: Value
    layers: tuple[int, ...]
    examples: tuple[Examples | None, ...] = (None,)


@dataclass(frozen=True, slots=True)
class Operation:
    """One computation of a layer for a micro-batch.

    Attributes:
        kind: the kind of the row that it becomes.
        layer: the layer; NONE if it concerns all layers.
        microbatch: the micro-batch; NONE if it concerns a whole step.
        reads: the values that it reads. A value that is also written is updated in place.
        writes: the values that it yields.
        run: the details of its row, such as the bounds of a slice.
        delivers: the values that are sent, as soon as they exist, to layers that may run elsewhere.
        forgets: the values that no later operation reads.
        examples: the slice of the replica that runs it; None stands for the first replica.

    >>> from jvpipe.ir.values import ValueKind
    >>> edge = Value(ValueKind.TENSOR, 7, microbatch=0)
    >>> forward = Operation(Kind.F, 3, 0, (), (Write(edge, 4),), delivers=(Delivery(edge, (4, 9)),))
    >>> f"{forward.kind}{forward.microbatch} of layer {forward.layer} makes {forward.writes[0].value}"
    'F0 of layer 3 makes tensor 7 micro-batch 0'
    """

    kind: Kind
    layer: int
    microbatch: int
    reads: tuple[Value, ...]
    writes: tuple[Write, ...]
    run: Run = None
    delivers: tuple[Delivery, ...] = ()
    forgets: tuple[Value, ...] = ()
    examples: Examples | None = None


def reducing_copies(replicas: int) -> int:
    """Counts the copies of a layer's gradients, besides its own, that a replica needs for the sum.

    Gradients are added up in the order of the replicas, at the replica that updates the layer:

        at replica 1    its own: g1    besides: g0, and the sum g0 + g1
        at replica 2    its own: g2    besides: g0, g1, and the sum g0 + g1

    >>> [reducing_copies(replicas) for replicas in (1, 2, 3, 8)]
    [0, 2, 3, 3]
    """
    return min(replicas, 3) if replicas > 1 else 0


def summed(
    graph: LayerGraph,
    layer: int,
    m: int,
    parts: Sequence[Sequence[Value]],
    sums: Sequence[Value],
) -> Iterator[Operation]:
    """Yields the operations that add up the gradients of several replicas, in the replicas' order.

        REDUCE   sums  = first + second
        REDUCE   sums += third

    The first REDUCE adds the gradients of two replicas. Each later REDUCE adds those of one more
    replica in place. So only two replicas' gradients are copied at a time. The order of summation
    never depends on which replica is faster.

    Args:
        graph: the layers.
        layer: the layer whose gradients they are.
        m: the micro-batch, or NONE.
        parts: the gradients of each replica.
        sums: the names of the sums.
    """
    if not sums:
        return
    writes = [Write.of(graph, total) for total in sums]
    first, *others = parts
    before, run = first, None
    for part in others:
        reads = tuple(chain(*zip(before, part, strict=True)))
        yield Operation(
            Kind.REDUCE,
            layer,
            m,
            reads,
            tuple(writes),
            run,
        )
        before, run = sums, AddRun()  # from now on in place
