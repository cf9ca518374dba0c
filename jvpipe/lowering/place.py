"""Placing: operations become rows on places,
and copies stand wherever a value is not where it is read.

    F(layer 3) delivers tensor 7 to layers 4 and 9      ->  1F0[layer 3]  1SEND0[layer 3]
    B(layer 4) reads a sum that lies where it was       ->  MOVE          1B0[layer 4]
    U(layer 3) gathers what other layers say            ->  SEND          U[layer 3]

This is the only pass that knows places. Values that a layer makes for others are sent to them at
once. What belongs to a layer that has changed places is moved when it is first read at the new one,
and what it leaves behind is stale.
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
    """Rows that belong together: those of a task, or of none."""

    task: Task | None
    rows: list[Row] = field(default_factory=list)


class Placer(BufferTable):
    """Places operations one after another, under the plan that holds for each.

    `blocks` hold the rows. `moved` are buffers of layers that have moved, with their copies. With
    `by_host` whatever moves waits on the host until all of it has left.

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
        self._arriving: list[tuple[int, int]] = []  # copies on the host, and what they will be
        self._placements: dict[int, Placement] = {}  # by the identity of their plan
        self._replicated = False  # then what belongs to a layer may stay where it came from
        self.enter(plan)
        for buffer in self.where.lasting(optimizer):
            self.buffer(buffer.value, buffer.place, buffer.bytes, buffer.copy)
        self.persistent = len(self.buffers)

    # Plans

    def enter(self, plan: Plan) -> None:
        """Places what follows under this plan."""
        if id(plan) not in self._placements:
            self._placements[id(plan)] = Placement(self.graph, plan)
        self.where = self._placements[id(plan)]
        self._replicated |= plan.replicated
        for places in self.where.places.values():
            self.places |= dict.fromkeys(places)

    def begin(self, task: Task | None = None) -> None:
        """Begins a block: the rows from here on are those of a task, or of none."""
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
            layer: that it concerns, or NONE.
            m: the micro-batch, or NONE.
            reads: ids of buffers.
            writes: ids of buffers.
            run: tells it from others of its kind.
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
        """Returns a buffer of a metric, if there is one.

        It lies at home, or where the loss was under an earlier plan, whose last forward may come
        later.
        """
        place = self._holder_near(value, self.where.home)
        return None if place is None else self.current[value, place]

    def _holder_near(self, value: Value, place: int) -> int | None:
        """Returns a place that holds a value: this one, if it does."""
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
        """Returns a copy of a value at another place, made once.

        Args:
            value: to be copied.
            source: a place that has it.
            target: the place that gets it.
            layer: that the row concerns.
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
        """Returns a value at a place; what still lies where its layer ran before is moved.

            place to place          MOVE
            its fate has changed    OUT, or IN           it stays where it is, on the device or its host
            by the host             OUT, later IN        when all that moves has left (`commit`)

        Args:
            value: that is to be there.
            target: the place.
            layer: that the row concerns.
            m: the micro-batch, or NONE.
        """
        copy = self.where.resting(value, self.optimizer)
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
        if there != new:  # it arrived on the device, and rests on its host
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
        """Returns a buffer on the device of the target with what lies at a place, or on its host.

        Args:
            b: the buffer to be copied.
            source: where it lies.
            target: where the copy shall be.
            layer: that the rows concern.
            m: the micro-batch, or NONE.
            new: what the copy shall be in the end; it is returned if that is on the device.
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
        """Writes the row of an operation, after the copies that it needs and before those that it
        delivers.

        Args:
            op: what is computed.
            keeps: of an update: its parameters are still read, so the new ones take buffers of
                their own.
            place: where; that of its layer unless given.
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
        """Sends what an operation delivers to every other place where one of its readers runs."""
        for value, layers, examples in op.delivers:
            targets = [self.where.of(layer, e) for layer in layers for e in examples]
            for target in dict.fromkeys(targets):
                if target != here:
                    self.bring(value, here, op.layer, op.microbatch)
                    self.send(value, here, target, op.layer, op.microbatch)

    def _read(self, value: Value, op: Operation, here: int) -> int:
        """Returns the buffer that an operation reads.

        What is not there is fed, sent or moved first.
        """
        layer, m = op.layer, op.microbatch
        if value.kind is ValueKind.OPTIMIZER:  # a change of plan may have changed its fate alone
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
        return self.bring(value, here, layer, m)  # it belongs to the layer

    def _fetched(
        self,
        op: Operation,
        reads: Sequence[int],
        writes: Sequence[int],
    ) -> dict[int, int]:
        """Returns, by buffer that is away, the one that an operation works on in its place.

        That is fetched if the operation reads it; if it only writes it, it need not come first.
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
        """Copies what an operation has written of buffers that are away back there, in their place.

        Args:
            op: that has run.
            written: by buffer that is away, the one that was written.
        """
        for away, b in written.items():
            value, place, _ = self.spots[away]
            new = self.fresh(value, place, self.buffers[away].bytes, Copy.AWAY)
            self.row(Kind.OUT, place, op.layer, op.microbatch, [b], [new])

    def _fed_bytes(self, value: Value) -> int:
        """Returns the bytes of what comes from the host: of a replica's examples, if it is theirs."""
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

        The next version of a parameter takes the place of the one before, unless that is kept.
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
        """Forgets what belongs to layers, except for these spots.

        Args:
            spots: all values, counted from a later micro-batch and version.
            microbatches: the micro-batch from which they count.
            versions: the version from which they count.
        """
        for spot in list(self.ids):
            if not VALUES[spot.value.kind].follows or spot.copy is Copy.STALE:
                continue
            if spot.shifted(-microbatches, -versions) not in spots:
                self.forget(spot)

    def relocate(self, plan: Plan) -> None:
        """Moves what lies on the devices between steps to where a plan has it.

        Model state comes with its reader.
        """
        before = self.where.plan
        self.enter(plan)
        for buffer in self.where.lasting(self.optimizer):
            match buffer.value.kind:
                case ValueKind.OPTIMIZER:
                    self.bring(buffer.value, buffer.place, buffer.value.layer)
                case ValueKind.PARAMETER | ValueKind.CONSTANT:
                    self.bring(buffer.value, buffer.place, NONE)
                case ValueKind.STATE:
                    pass
                case _:
                    raise AssertionError(
                        f"{buffer.value} does not lie on the devices between steps"
                    )
        self.enter(before)

    def commit(self) -> None:
        """Frees, once the copies are there, what they were made of: up to here nothing has left its
        place.
        """
        staying = {b for _, b in self.lasting()}
        for old, new in self.moved:
            if old < self.persistent:
                place = self.buffers[old].place
                self.row(Kind.FREE, place, NONE, NONE, [old, new], [])
        leaving = [b for b in range(self.persistent) if b not in staying]
        for place in self.places:  # what the new plan has elsewhere, or newer
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
        """Brings what waits on the host to its place, or to the host of that place by way of its
        device.
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
        """Brings the model state as it is now to wherever the plan has it."""
        for k in range(len(self.graph.state)):
            for place in self.where.holding(k):
                self.bring(self.newest_state(k), place, NONE)

    def newest_state(self, k: int) -> Value:
        """Names a leaf of the model state as the last micro-batch left it: the whole, not a
        replica's part.
        """
        versions = []
        for value, _ in self.current:
            # The parts of replicas are named by their examples, the whole has none.
            is_whole = value.kind is ValueKind.STATE and value.examples is None
            if is_whole and value.index == k:
                versions.append(value)
        return max(versions, key=lambda value: value.microbatch)

    def lasting(self) -> list[tuple[Spot, int]]:
        """Lists what lies on the devices between steps under the plan: its name then, and its
        newest buffer there.
        """
        newest: dict[tuple[ValueKind, int, int, int], tuple[int, int]] = {}
        for (value, place), b in self.current.items():
            if not VALUES[value.kind].lasts or value.examples is not None:
                continue
            key = value.kind, value.index, value.layer, place
            # Parameters count versions, model state counts micro-batches; the other is NEVER.
            age = max(value.version, value.microbatch), b
            newest[key] = max(newest.get(key, age), age)
        result = []
        for buffer in self.where.lasting(self.optimizer):
            value, place = buffer.value, buffer.place
            _, b = newest[value.kind, value.index, value.layer, place]
            result.append((buffer.spot, b))
        return result
