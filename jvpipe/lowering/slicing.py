"""Slicing: an operation of a replicated stage becomes one operation per replica, on its examples.

A replica is one of several places that run the same stage, each on a slice of every micro-batch. In
the table, stage A (layer 3) has two replicas, with examples 0:2 and 2:4. Stage B (layer 4) has one
replica. Tensor 7 goes from layer 3 to layer 4.

    operation                           becomes
    F(layer 3) makes tensor 7           F(layer 3, 0:2)  F(layer 3, 2:4)
    F(layer 4) reads tensor 7           CONCAT(0:2, 2:4)  F(layer 4)
    F(layer 4) reads a sum or a mean    REDUCE(0:2, 2:4)  F(layer 4)       a weighted sum
    B(layer 4) delivers cotangent 7     B(layer 4)  SLICE 0:2  SLICE 2:4
    U(layer 3)                          REDUCE  U(layer 3)                 at one replica, for both
    F(layer 3) makes model state        F(layer 3, 0:2)  F(layer 3, 2:4)  REDUCE
                                                                           at the first, for both

exchange.py describes how values between stages are cut, sent and joined. A part is named by its
examples and never by its replica. A value that depends on no example keeps its name, and every
replica makes the same value. Each replica adds up its own gradients over the micro-batches of an
update. Then REDUCE adds up the replicas' sums, in ascending order of their slices. It runs at the
replica that updates the layer. After the update, this replica sends the new parameters to the
others. So the order of summation depends on the plan, and never on which replica is faster.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from jvpipe.ir.examples import Batching, Examples, Over
from jvpipe.ir.kinds import KINDS, Kind, Runs
from jvpipe.ir.layers import Array
from jvpipe.ir.rows import LayerRun, StateRun
from jvpipe.ir.values import NONE, Value, ValueKind
from jvpipe.lowering.exchange import Exchange
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.operation import Delivery, Operation, Write, reducing_copies, summed
from jvpipe.lowering.placement import Placement
from jvpipe.lowering.replica_parts import Slice


class Slicing(Exchange):
    """A function that divides operations among replicas; it is called on operations in their order.

    Args:
        where: the replicas of each layer.
        batching: how edges (tensors between layers) and aux depend on the examples.
        layouts: the layouts of micro-batches by their numbers; empty for an evaluation.
    """

    def __init__(
        self,
        where: Placement,
        batching: Batching,
        layouts: Mapping[int, MicrobatchLayout] | None = None,
    ) -> None:
        super().__init__(where, batching)
        self._layouts = layouts or {}

    def __call__(self, op: Operation) -> Iterator[Operation]:
        """Yields one operation per replica.

        A replica's operation follows the operations that join its inputs, and precedes those that
        cut its results into parts.
        """
        match op.kind:
            case Kind.F | Kind.B | Kind.I | Kind.W | Kind.R | Kind.E | Kind.ZERO:
                for number, examples in enumerate(self.where.slices(op.layer)):
                    yield from self.joins(op, examples)
                    direct, cut = self.delivered(op, number, examples)
                    yield self._replica(op, examples, direct)
                    yield from cut
                if op.kind is Kind.F:
                    yield from self._remembered(op)
            case Kind.LOSS:
                reads: list[Value] = []
                for value in op.reads:
                    reads += [self.named(value, examples) for examples in self.makers(value)]
                yield replace(op, reads=tuple(reads))
            case Kind.U:
                delivers: list[Delivery] = []
                for value, layers, _ in op.delivers:
                    delivers += self.to_all_replicas(value, layers)
                examples = None
                if op.layer != NONE:
                    replica = self.where.updating_replica[op.layer]
                    examples = self.where.slices(op.layer)[replica]
                yield replace(op, examples=examples, delivers=tuple(delivers))
            case _:
                raise AssertionError(f"how replicas share {op.kind} is not defined")

    def reduced(self, layers: Sequence[int]) -> Iterator[Operation]:
        """Yields the operations that add up the gradients of a stage's replicas, last layer first.

        The gradients of a parameter are added up at the replica that updates it. If the parameter
        is tied and another stage owns it, the number of the layer selects the replica, so that the
        work is spread over replicas.

        Args:
            layers: the layers of the stage.
        """
        graph, where = self.graph, self.where
        for layer in reversed(layers):
            slices = where.slices(layer)
            if len(slices) == 1:
                continue
            by_replica: dict[int, list[int]] = {}
            read = graph.layers[layer].reading(ValueKind.PARAMETER)
            for p in graph.trained(read):
                owner = graph.parameters[p].owner
                replica = layer % len(slices)
                if where.stage[owner] == where.stage[layer]:
                    replica = where.updating_replica[owner]
                by_replica.setdefault(replica, []).append(p)
            for replica, parameters in sorted(by_replica.items()):
                sums = [Value(ValueKind.GRADIENT, p, layer, version=0) for p in parameters]
                parts = [[total._replace(examples=part) for total in sums] for part in slices]
                for op in summed(graph, layer, NONE, parts, sums):
                    yield replace(op, examples=slices[replica])

    def reducing_bytes(self, layer: int) -> int:
        """Counts the bytes that a replica needs, besides its own, to add up a layer's gradients."""
        copies = reducing_copies(len(self.where.slices(layer)))
        read = self.graph.layers[layer].reading(ValueKind.PARAMETER)
        trained = self.graph.trained(read)
        arrays = [self.graph.parameters[p].array for p in trained]
        return copies * sum(array.bytes for array in arrays)

    def left_bytes(self, op: Operation) -> int:
        """Returns the fewest bytes that a backward (B or W) frees at any replica.

        The bytes are those of the values that only this backward reads: residuals for B, and handed
        values for W.

        Args:
            op: the backward of all replicas.
        """
        is_half = KINDS[op.kind].between
        kind = ValueKind.HANDED if is_half else ValueKind.RESIDUAL
        slices = self.where.slices(op.layer)
        left = [self._left(op, kind, examples) for examples in slices if examples is not None]
        # The caller can rely on the smallest number at every replica.
        sizes = [sum(array.bytes for array in arrays) for arrays in left]
        return min(sizes, default=0)

    def _left(self, op: Operation, kind: ValueKind, examples: Examples) -> Sequence[Array]:
        """Returns the residuals, or the handed values, that a replica's layer leaves.

        Their bytes need not be in proportion to the number of examples.

        Args:
            op: an operation of the layer.
            kind: RESIDUAL or HANDED.
            examples: the examples of the replica.
        """
        assert isinstance(op.run, LayerRun)
        sliced = self._layouts[op.run.layout].sliced[examples]
        if kind is ValueKind.HANDED:
            return sliced.halves[op.layer].handed
        return sliced.signatures[op.layer].residuals

    def spots(self, layer: int, value: Value) -> list[tuple[Value, int]]:
        """Lists the parts of a value that the replicas of a layer have, each with its place.

        Args:
            layer: the layer.
            value: the whole value.
        """
        parts = []
        for examples in self.where.slices(layer):
            parts.append((self.named(value, examples), self.where.of(layer, examples)))
        return parts

    def _part(self, op: Operation, write: Write, examples: Slice) -> Write:
        """Names the part of a layer's result that one of its replicas writes.

        Args:
            op: the operation of all replicas.
            write: the whole result.
            examples: the examples of the replica.
        """
        value, size, copy = write
        if examples is not None and value.kind in (ValueKind.RESIDUAL, ValueKind.HANDED):
            size = self._left(op, value.kind, examples)[value.index].bytes
        part = self.named(value, examples)
        if self.is_shared(value):
            part = value._replace(examples=examples)
        return Write(part, self.part_bytes(value, size, examples), copy)

    # Operations

    def _replica(
        self,
        op: Operation,
        examples: Slice,
        delivers: Sequence[Delivery],
    ) -> Operation:
        """Makes the operation of one replica.

        Args:
            op: the operation of all replicas.
            examples: the examples of the replica.
            delivers: the values that the replica delivers whole.
        """
        run = op.run
        if examples is not None and KINDS[op.kind].runs is Runs.LAYER:
            layout = run.layout if isinstance(run, LayerRun) else 0
            run = LayerRun(layout, examples)
        reads = [self.named(value, examples) for value in op.reads]
        writes = [self._part(op, write, examples) for write in op.writes]
        return replace(
            op,
            reads=tuple(reads),
            writes=tuple(writes),
            run=run,
            delivers=tuple(delivers),
            examples=examples,
        )

    def _remembered(self, op: Operation) -> Iterator[Operation]:
        """Yields the operation that joins the replicas' parts of the model state.

        The result is the state for the next micro-batch. All replicas that read the state get it.
        The replicas of this layer also get it, because their backward may read the state if the
        loss depends on it.

        Args:
            op: the forward of all replicas.
        """
        slices = self.where.slices(op.layer)
        writes = [write for write in op.writes if self.is_shared(write.value)]
        if not writes or len(slices) == 1:
            return
        readers = {value: layers for value, layers, _ in op.delivers}
        reads: list[Value] = []
        parts: list[Value] = []
        delivers: list[Delivery] = []
        for value, *_ in writes:
            spread = self.batching.state[value.index]
            if spread and spread.over is Over.ADDED:  # each replica adds to the previous state
                reads.append(value._replace(microbatch=op.microbatch))
            mine = [value._replace(examples=e) for e in slices]
            reads += mine
            parts += mine
            delivers += self.to_all_replicas(value, (op.layer, *readers[value]))
        yield Operation(
            Kind.REDUCE,
            op.layer,
            op.microbatch,
            reads=tuple(reads),
            writes=tuple(writes),
            run=StateRun(),
            delivers=tuple(delivers),
            forgets=tuple(parts),
            examples=slices[0],
        )
