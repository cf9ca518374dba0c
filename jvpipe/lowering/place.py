"""Placing: operations become rows at places, with copies of the values that are elsewhere.

A place is the number of a device, or of a mesh of devices. A row is one program or one copy.

    operation                                              rows
    F(layer 3) delivers tensor 7 to layers 4 and 9     ->  1F0[layer 3]  1SEND0[layer 3]
    B(layer 4) reads a sum at the layer's old place    ->  MOVE          1B0[layer 4]
    U(layer 3) gathers sums of other layers            ->  SEND          U[layer 3]

In the first line layers 4 and 9 run at one other place, so one SEND serves both.

A value that a layer makes for other layers is sent to the places of these layers at once. A value
that belongs to a layer, such as a weight, is moved if the layer changes places. Before an operation
runs, its place gets all values that it lacks (carrier.py). Operations name values, not places, so
where a layer runs cannot change what it computes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from jvpipe.ir.buffers import Copy, Spot
from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.rows import PieceRun
from jvpipe.ir.task import Task
from jvpipe.ir.values import VALUES, Value, ValueKind
from jvpipe.lowering.carrier import Block, Carrier
from jvpipe.lowering.operation import Operation, Write


class Placer(Carrier):
    """A writer of rows that places operations one after another, under the plan entered last.

    >>> import jax
    >>> from jvpipe.ir.layers import Array, Layer, LayerGraph, Ref, Tensor
    >>> from jvpipe.ir.plan import Plan
    >>> from jvpipe.lowering.operation import Delivery
    >>> from jvpipe.programs.optimizer_pieces import OptimizerCut
    >>> edge, loss = Ref(ValueKind.TENSOR, 0), Ref(ValueKind.LOSS, 0)
    >>> layers = Layer(0, "a", (), (edge,)), Layer(1, "b", (edge,), (loss,))
    >>> graph = LayerGraph(layers, (Tensor(Array("t", (), "float32", 4), 0, (1,), True),), ())
    >>> optimizer = OptimizerCut((), (), (), jax.tree.structure(None), ())
    >>> placer, made = Placer(graph, Plan.from_cuts([1, 1]), optimizer), Value(ValueKind.TENSOR, 0, microbatch=0)
    >>> placer.begin()
    >>> placer.perform(Operation(Kind.F, 0, 0, (), (Write(made, 4),), delivers=(Delivery(made, (1,)),)))
    >>> [str(row) for row in placer.blocks[0].rows], [str(spot) for spot in placer.spots]
    (['0F0[layer 0]', '0SEND0[layer 0]'], ['tensor 0 micro-batch 0 at 0', 'tensor 0 micro-batch 0 at 1'])
    """

    def begin(self, task: Task | None = None) -> None:
        """Begins a block of rows: for a task, or for rows that belong to no task (None)."""
        self.blocks.append(Block(task))

    def perform(
        self,
        op: Operation,
        *,
        keeps: bool = False,
        place: int | None = None,
    ) -> None:
        """Writes an operation's row, with the copies that it needs before and after the row.

        Args:
            op: the operation.
            keeps: for an update, whether the old version of its parameters is still needed. If so,
                the new version gets new buffers. If not, it overwrites the old version.
            place: where the operation runs; the place of its layer unless given.
        """
        # The rows of an operation come in this order:
        #
        #     MOVE, SEND, FEED   what it reads comes to its place (`_read`)
        #     IN                 what lies on the host comes to the device (`_fetched`)
        #     the operation
        #     OUT                results that lie on the host go back (`_return`)
        #     SEND               results for other layers leave at once (`_deliver`)
        here = self.where.of(op.layer, op.examples) if place is None else place
        reads = [self._read(value, op, here) for value in op.reads]
        writes = [self._write(write, here, keeps=keeps) for write in op.writes]
        fetched = self._fetched(op, reads, writes)
        reads = [fetched.get(b, b) for b in reads]
        writes = [fetched.get(b, b) for b in writes]
        run = op.run
        if isinstance(run, PieceRun):
            run = replace(run, keeps=keeps)
        self.row(
            op.kind,
            here,
            op.layer,
            op.microbatch,
            reads,
            writes,
            run,
        )
        written = {away: b for away, b in fetched.items() if b in writes}
        self._return(op, written)
        self._deliver(op, here)
        for value in op.forgets:
            holder = self.holder_near(value, here)
            if holder is not None:
                forgotten = self.current[value, holder]
                self.rename(forgotten, Spot(value, holder, Copy.STALE))

    def _deliver(self, op: Operation, here: int) -> None:
        """Sends the values that an operation delivers to all other places where they are read."""
        layer, m = op.layer, op.microbatch
        for value, readers, examples in op.delivers:
            pairs = product(readers, examples)
            targets = [self.where.of(reader, part) for reader, part in pairs]
            for target in dict.fromkeys(targets):
                if target != here:
                    self.bring(value, here, layer, m)
                    self.send(value, here, target, layer, m)

    def _read(self, value: Value, op: Operation, here: int) -> int:
        """Returns the buffer that an operation reads. A value that lies elsewhere is brought first.

        Batches and seeds are fed from the host. Values that an update or a sum of gradients reads
        from other layers or replicas are sent. Any other value belongs to the operation's layer and
        is moved.

        Args:
            value: the value that is read.
            op: the operation.
            here: the place of the operation.
        """
        layer, m = op.layer, op.microbatch
        # Optimizer state may be here with a new fate. Then `bring` moves it to or from the host.
        if value.kind is ValueKind.OPTIMIZER:
            return self.bring(value, here, layer, m)
        if (value, here) in self.current:
            return self.current[value, here]
        info = VALUES[value.kind]
        if info.fed:
            buffer = self.buffer(value, here, self._fed_bytes(value))
            self.row(Kind.FEED, here, layer, m, [], [buffer])
            return buffer
        if KINDS[op.kind].gathers and info.gathered:
            place = self.where.of(value.layer, value.examples)
            source = self.holder_near(value, place)
            assert source is not None, f"no place has {value}"
            return self.send(value, source, here, value.layer, m)
        return self.bring(value, here, layer, m)  # the value belongs to the layer

    def _fetched(
        self,
        op: Operation,
        reads: Sequence[int],
        writes: Sequence[int],
    ) -> dict[int, int]:
        """Returns, for each buffer that lies on the host, a buffer on the device to use instead.

        If the operation reads the buffer, its contents are fetched. If it only writes the buffer,
        nothing is fetched.

        Args:
            op: the operation.
            reads: the buffers that it reads.
            writes: the buffers that it writes.
        """
        fetched: dict[int, int] = {}
        for b in dict.fromkeys((*reads, *writes)):
            value, place, copy = self.spots[b]
            if copy is not Copy.AWAY:
                continue
            size = self.buffers[b].bytes
            fetched[b] = self.fresh(value, place, size, Copy.FETCHED)
            if b in reads:
                new = [fetched[b]]
                self.row(Kind.IN, place, op.layer, op.microbatch, [b], new)
        return fetched

    def _return(self, op: Operation, written: Mapping[int, int]) -> None:
        """Copies results back to the host, for the buffers that belong there.

        Args:
            op: the operation that has run.
            written: for each buffer on the host, the buffer on the device that was written.
        """
        for away, b in written.items():
            value, place, _ = self.spots[away]
            size = self.buffers[away].bytes
            new = self.fresh(value, place, size, Copy.AWAY)
            self.row(Kind.OUT, place, op.layer, op.microbatch, [b], [new])

    def _fed_bytes(self, value: Value) -> int:
        """Returns the bytes of a value that is fed from the host.

        For a leaf of the batch, only the bytes of the replica's examples count.
        """
        match value.kind:
            case ValueKind.BATCH:
                size = self.graph.batch[value.index].bytes
                if value.examples is None:
                    return size
                bytes_per_example = size // self.graph.examples
                return bytes_per_example * value.examples.size
            case ValueKind.SEED:
                return self.graph.seed_bytes
            case _:
                raise AssertionError(f"{value} does not come from the host")

    def _write(self, write: Write, here: int, *, keeps: bool) -> int:
        """Returns the buffer that an operation writes.

        The next version of a parameter overwrites the version before it, unless `keeps` is true.

        Args:
            write: the value that is written.
            here: the place of the operation.
            keeps: see `perform`.
        """
        value, size, copy = write
        if copy is Copy.OWN and (value, here) in self.current:
            return self.current[value, here]
        if value.kind is ValueKind.PARAMETER and not keeps:
            old = value._replace(version=value.version - 1)
            before = self.current[old, here]
            self.rename(before, Spot(value, here))
            return before
        return self.buffer(value, here, size, copy)
