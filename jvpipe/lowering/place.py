"""Placing: operations become rows on places, with copies of values that lie elsewhere.

A place is the number of a device, or of a mesh of devices. A row is one program or one copy.

    operation                                              rows
    F(layer 3) delivers tensor 7 to layers 4 and 9     ->  1F0[layer 3]  1SEND0[layer 3]
    B(layer 4) reads a sum at the layer's old place    ->  MOVE          1B0[layer 4]
    U(layer 3) gathers sums of other layers            ->  SEND          U[layer 3]

In the first line layers 4 and 9 run at one other place, so one SEND serves both.

A value that a layer makes for other layers is sent to their places at once. A value that belongs to
a layer, such as a weight, is moved if the layer changes places. Before an operation runs, its place
gets all values that it lacks (`bring`). Values may also be moved earlier, to save time. Operations
name values and no places, so where a layer runs cannot change what it computes.

A step moves most values early, in this order (step.py): `relocate` before a new plan begins,
`bring_state` after the last task, then `commit`, which ends the old buffers. A stream calls `keep`
at a change of plan, and ends old buffers one by one (stream/departures.py).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jvpipe.ir.buffers import Copy, Spot
from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.ir.rows import PieceRun, Row, Run
from jvpipe.ir.task import Task
from jvpipe.ir.values import NONE, VALUES, Value, ValueKind
from jvpipe.lowering.buffer_table import BufferTable
from jvpipe.lowering.operation import Operation, Write
from jvpipe.lowering.placement import Placement
from jvpipe.programs.optimizer import OptimizerCut


@dataclass
class Block:
    """Rows that belong together: those of a task or, if `task` is None, rows outside of tasks."""

    task: Task | None
    rows: list[Row] = field(default_factory=list)


class Placer(BufferTable):
    """A writer of rows: it places operations one after another, under the plan entered last.

    `blocks` hold the rows. `moved` has pairs: an old buffer, and the copy that must arrive before
    the old buffer ends. With `by_host`, every value that moves goes to the host first. Values go on
    to their new places only after all of them have left their old places.

    >>> import jax
    >>> from jvpipe.lowering.operation import Delivery
    >>> from jvpipe.ir.layers import Array, Layer, Ref, Tensor
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

    def __init__(
        self,
        graph: LayerGraph,
        plan: Plan,
        optimizer: OptimizerCut,
        *,
        by_host: bool = False,
    ) -> None:
        super().__init__()
        self.graph = graph
        self.optimizer = optimizer
        self.by_host = by_host
        self.blocks: list[Block] = []
        self.moved: list[tuple[int, int]] = []
        self._arriving: list[tuple[int, int]] = []  # copies on the host, with their final buffers
        self._placements: dict[int, Placement] = {}  # by the identity of their plan
        # Whether a plan so far has replicas. If so, a value that is brought to another place also
        # stays where it is, because a replica at the old place may read it.
        self._replicated = False
        self.enter(plan)
        for buffer in self.where.lasting:
            self.buffer(buffer.value, buffer.place, buffer.bytes, buffer.copy)
        self.persistent = len(self.buffers)

    # Plans

    def enter(self, plan: Plan) -> None:
        """Enters a plan: operations are placed under it from here on."""
        if id(plan) not in self._placements:
            self._placements[id(plan)] = Placement(self.graph, plan, self.optimizer)
        self.where = self._placements[id(plan)]
        self._replicated |= plan.replicated
        for places in self.where.places.values():
            self.places |= dict.fromkeys(places)

    def begin(self, task: Task | None = None) -> None:
        """Begins a block of rows: for a task, or for rows that belong to no task (None)."""
        self.blocks.append(Block(task))

    # Rows

    def row(
        self,
        kind: Kind,
        place: int,
        layer: int,
        m: int,
        reads: Sequence[int],
        writes: Sequence[int],
        run: Run = None,
    ) -> None:
        """Appends a row to the block.

        Args:
            kind: of the row.
            place: where it runs.
            layer: the layer that it concerns, or NONE.
            m: the micro-batch, or NONE.
            reads: the numbers of the buffers that it reads.
            writes: the numbers of the buffers that it writes.
            run: what tells it apart from other rows of its kind and layer.
        """
        stage = self.where.stage.get(layer, NONE)
        self.blocks[-1].rows.append(
            Row(
                kind,
                place,
                stage,
                layer,
                m,
                tuple(reads),
                tuple(writes),
                (),
                run,
            )
        )

    def metric(self, value: Value) -> int | None:
        """Returns a buffer that holds a metric, or None if no row has made the metric.

        It is the buffer at the present place of the loss, if that place has one. If not, the last
        forward that the metric needs ran under an earlier plan, and the buffer lies where that plan
        has the loss.
        """
        place = self._holder_near(value, self.where.home)
        return None if place is None else self.current[value, place]

    def _holder_near(self, value: Value, place: int) -> int | None:
        """Returns a place that holds a value, if possible the given one; None if no place does."""
        return place if (value, place) in self.current else self.holder(value)

    # Copies

    def send(
        self,
        value: Value,
        source: int,
        target: int,
        layer: int,
        m: int,
    ) -> int:
        """Returns a copy of a value at another place. Makes the copy if it is missing.

        Args:
            value: the value to copy.
            source: a place that has it.
            target: the place that gets it.
            layer: the layer that the row concerns.
            m: the micro-batch, or NONE.
        """
        if (value, target) not in self.current:
            b = self.current[value, source]
            copy = self.buffer(value, target, self.buffers[b].bytes)
            self.row(Kind.SEND, source, layer, m, [b], [copy])
            if VALUES[value.kind].passed_on:
                self.rename(b, Spot(value, source, Copy.STALE))
        return self.current[value, target]

    def bring(
        self,
        value: Value,
        target: int,
        layer: int,
        m: int = NONE,
    ) -> int:
        """Returns a buffer with a value at a place, and moves the value there if it lies elsewhere.

            case                      rows
            its layer changes places  MOVE
            its fate has changed      OUT or IN, between the device of its place and the host
            `by_host`                 OUT now; IN at `commit`, once everything has left

        Args:
            value: the value.
            target: the place where it must lie.
            layer: the layer that the rows concern.
            m: the micro-batch, or NONE.
        """
        copy = self.where.resting(value)
        b = self.current.get((value, target))
        is_away = copy is Copy.AWAY
        if b is not None and is_away == (self.spots[b].copy is Copy.AWAY):
            return b
        source = self.holder(value) if b is None else target
        assert source is not None, f"{value} lies nowhere"
        b = self.current[value, source]
        info = VALUES[value.kind]
        size = self.buffers[b].bytes
        if info.alone and not self._replicated:
            self.leave(b)
        new = self.fresh(value, target, size, copy)
        if self.by_host:
            host = b
            if self.spots[b].copy is not Copy.AWAY:
                host = self.buffer(value, target, size, Copy.HOST)
                self.row(Kind.OUT, source, layer, m, [b], [host])
            self.moved.append((b, host))
            self._arriving.append((host, new))
            return new
        there = self._copied(b, source, target, layer, m, new)
        if there != new:  # the value is on the device now, but has to lie on the device's host
            self.row(Kind.OUT, target, layer, m, [there], [new])
            if there != b:
                self.row(
                    Kind.FREE,
                    target,
                    layer,
                    m,
                    [there, new],
                    [],
                )
        if info.follows:
            self.moved.append((b, new))
        return new

    def _copied(
        self,
        b: int,
        source: int,
        target: int,
        layer: int,
        m: int,
        new: int,
    ) -> int:
        """Returns a buffer on the target's device that holds what a given buffer holds.

        Args:
            b: the buffer to copy, on the device of the source or on that device's host.
            source: the place of `b`.
            target: the place of the copy.
            layer: the layer that the rows concern.
            m: the micro-batch, or NONE.
            new: the buffer that the value moves to, on the target's device or on that device's
                host. If it lies on the device, it is the result.
        """
        value = self.spots[b].value
        size = self.buffers[b].bytes
        here = b
        if self.buffers[b].copy is Copy.AWAY:
            if source == target:
                self.row(Kind.IN, source, layer, m, [b], [new])
                return new
            here = self.fresh(value, source, size, Copy.FETCHED)
            self.row(Kind.IN, source, layer, m, [b], [here])
        elif source == target:
            return b
        there = new
        if self.spots[new].copy is Copy.AWAY:
            there = self.fresh(value, target, size, Copy.FETCHED)
        self.row(Kind.MOVE, source, layer, m, [here], [there])
        if here != b:
            self.row(Kind.FREE, source, layer, m, [here, there], [])
        return there

    # Operations

    def perform(self, op: Operation, *, keeps: bool = False, place: int | None = None) -> None:
        """Writes an operation's row, between the copies of what it reads and of what it delivers.

        Args:
            op: the operation.
            keeps: for an update, whether the old version of its parameters is still needed. If so,
                the new version gets buffers of its own. If not, it overwrites the old one.
            place: where the operation runs; the place of its layer unless given.
        """
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
            holder = self._holder_near(value, here)
            if holder is not None:
                self.rename(self.current[value, holder], Spot(value, holder, Copy.STALE))

    def _deliver(self, op: Operation, here: int) -> None:
        """Sends the values that an operation delivers to all other places where they are read."""
        for value, layers, examples in op.delivers:
            targets = [self.where.of(layer, e) for layer in layers for e in examples]
            for target in dict.fromkeys(targets):
                if target != here:
                    self.bring(value, here, op.layer, op.microbatch)
                    self.send(value, here, target, op.layer, op.microbatch)

    def _read(self, value: Value, op: Operation, here: int) -> int:
        """Returns the buffer that an operation reads. A value that lies elsewhere is brought first.

        Batches and seeds are fed from the host. Values that an update or a sum of gradients takes
        from other layers or replicas are sent. Any other value belongs to the layer and is moved.
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
            source = self._holder_near(value, place)
            assert source is not None, f"{value} lies nowhere"
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
        """Copies results back to the host, for the buffers that lie there.

        Args:
            op: the operation that has run.
            written: for each buffer on the host, the buffer on the device that was written.
        """
        for away, b in written.items():
            value, place, _ = self.spots[away]
            new = self.fresh(value, place, self.buffers[away].bytes, Copy.AWAY)
            self.row(Kind.OUT, place, op.layer, op.microbatch, [b], [new])

    def _fed_bytes(self, value: Value) -> int:
        """Returns the bytes of a value that is fed from the host.

        For a leaf of the batch, only the bytes of the replica's examples count.
        """
        match value.kind:
            case ValueKind.BATCH:
                size = self.graph.batch[value.index].bytes
                if value.examples is not None:
                    size = size // self.graph.examples * value.examples.size
                return size
            case ValueKind.SEED:
                return self.graph.seed_bytes
            case _:
                raise AssertionError(f"{value} does not come from the host")

    def _write(self, write: Write, here: int, *, keeps: bool) -> int:
        """Returns the buffer that an operation writes.

        The next version of a parameter overwrites the version before it, unless `keeps` is true.
        """
        value, size, copy = write
        if copy is Copy.OWN and (value, here) in self.current:
            return self.current[value, here]
        if value.kind is ValueKind.PARAMETER and not keeps:
            before = self.current[value._replace(version=value.version - 1), here]
            self.rename(before, Spot(value, here))
            return before
        return self.buffer(value, here, size, copy)

    # Changes of plan

    def keep(self, spots: Collection[Spot], microbatches: int, versions: int) -> None:
        """Forgets the buffers of values that belong to layers, except for the given spots.

        A spot is the name of a buffer: a value, its place, and which of the copies there.

        Args:
            spots: the names to keep, with micro-batches and versions counted from a later step.
            microbatches: the first micro-batch of that step, which is number 0 in `spots`.
            versions: the version at the start of that step, which is number 0 in `spots`.
        """
        for spot in list(self.ids):
            if not VALUES[spot.value.kind].follows or spot.copy is Copy.STALE:
                continue
            if spot.shifted(-microbatches, -versions) not in spots:
                self.forget(spot)

    def relocate(self, plan: Plan) -> None:
        """Moves parameters, constants and optimizer state to their places under a plan.

        Model state stays: it moves later, when its reader first runs at the new place or in
        `bring_state`.
        """
        before = self.where.plan
        self.enter(plan)
        for buffer in self.where.lasting:
            match buffer.value.kind:
                case ValueKind.OPTIMIZER | ValueKind.PARAMETER | ValueKind.CONSTANT:
                    self.bring(buffer.value, buffer.place, buffer.value.layer)
                case ValueKind.STATE:
                    pass
                case _:
                    raise AssertionError(f"{buffer.value} does not lie on the devices at rest")
        self.enter(before)

    def commit(self) -> None:
        """Ends the old buffers of everything that has moved, once the copies have arrived.

        Until this call every old buffer exists. With `by_host`, values wait on the host. They go on
        to their new places after the old buffers have ended.
        """
        staying = {b for _, b in self.lasting()}
        for old, new in self.moved:
            if old < self.persistent:
                place = self.buffers[old].place
                self.row(Kind.FREE, place, NONE, NONE, [old, new], [])
        leaving = [b for b in range(self.persistent) if b not in staying]
        for place in self.places:  # the new plan has these values elsewhere or in newer buffers
            for on_host in (False, True):
                ids = []
                for b in leaving:
                    buffer = self.buffers[b]
                    if buffer.place == place and buffer.copy.on_host is on_host:
                        ids.append(b)
                if ids:
                    self.row(Kind.DROP, place, NONE, NONE, ids, [])
        for host, new in self._arriving:
            self._arrive(host, new)
        self.moved, self._arriving = [], []

    def _arrive(self, host: int, new: int) -> None:
        """Brings a value that waits on the host to its new place.

        A value that has to lie on the host of the new place passes through the device there.
        """
        value, place, copy = self.spots[new]
        if copy is not Copy.AWAY:
            self.row(Kind.IN, place, NONE, NONE, [host], [new])
            return
        there = self.fresh(value, place, self.buffers[new].bytes, Copy.FETCHED)
        self.row(Kind.IN, place, NONE, NONE, [host], [there])
        self.row(Kind.OUT, place, NONE, NONE, [there], [new])
        self.row(Kind.FREE, place, NONE, NONE, [there, new], [])

    def bring_state(self) -> None:
        """Brings the newest model state to every place where the plan has it."""
        for k in range(len(self.graph.state)):
            for place in self.where.holding(k):
                self.bring(self.newest_state(k), place, NONE)

    def newest_state(self, k: int) -> Value:
        """Names a leaf of the model state as the last micro-batch left it."""
        versions = []
        for value, _ in self.current:
            # Parts that replicas have made do not count. Their names have examples.
            is_whole = value.kind is ValueKind.STATE and value.examples is None
            if is_whole and value.index == k:
                versions.append(value)
        return max(versions, key=lambda value: value.microbatch)

    def lasting(self) -> list[tuple[Spot, int]]:
        """Lists the values that lie on the devices between steps under the present plan.

        Each is listed as its name between steps and its newest buffer.
        """
        newest: dict[tuple[ValueKind, int, int, int], tuple[int, int]] = {}
        for (value, place), b in self.current.items():
            if not VALUES[value.kind].lasts or value.examples is not None:
                continue
            key = value.kind, value.index, value.layer, place
            # No value that lasts has both a version and a micro-batch. The missing number is NEVER,
            # which is below all others.
            age = max(value.version, value.microbatch), b
            newest[key] = max(newest.get(key, age), age)
        result = []
        for buffer in self.where.lasting:
            value, place = buffer.value, buffer.place
            _, b = newest[value.kind, value.index, value.layer, place]
            result.append((buffer.spot, b))
        return result
