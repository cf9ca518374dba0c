"""Placing: operations become rows on places, and copies stand wherever a value is not where it is read.

    F(layer 3) delivers tensor 7 to layers 4 and 9      ->  1F0[layer 3]  1SEND0[layer 3]
    B(layer 4) reads a sum that lies where it was       ->  MOVE          1B0[layer 4]
    U(layer 3) reads what another layer tells it        ->  SEND          U[layer 3]

This is the one pass that knows places. A value is sent where a copy of it is wanted; what belongs to a layer that has
changed places is moved when it is read there, and what it leaves behind is stale.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jvpipe.ir.buffers import Buffer, Copy, Spot
from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.ir.rows import PieceRun, Row, Run
from jvpipe.ir.task import Task
from jvpipe.ir.values import NONE, VALUES, Value, ValueKind
from jvpipe.lowering.operation import Operation, Write
from jvpipe.lowering.placement import Placement
from jvpipe.programs.optimizer import OptimizerCut


@dataclass
class Block:
    """Rows that belong together: those of a task, or of none."""

    task: Task | None
    rows: list[Row] = field(default_factory=list)


class Placer:
    """Places operations one after another, under the plan that holds for each.

    `spots` are what the buffers are called by now; `moved` are buffers of layers that have moved, with their copies.
    With `by_host` what moves waits on the host until all of it has left.

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
        self, graph: LayerGraph, plan: Plan, optimizer: OptimizerCut, *, by_host: bool = False
    ) -> None:
        self.graph, self.optimizer, self.by_host = graph, optimizer, by_host
        self._placements: dict[int, Placement] = {}
        self._known: dict[int, None] = {}  # the places of all plans so far
        self._replicated = False  # then what belongs to a layer may stay where it came from
        self.enter(plan)
        self.blocks: list[Block] = []
        self.buffers: list[Buffer] = []
        self.spots: list[Spot] = []
        self.ids: dict[Spot, int] = {}
        self.current: dict[tuple[Value, int], int] = {}  # what is read of a value at a place
        self.moved: list[tuple[int, int]] = []
        self._arriving: list[tuple[int, int]] = []  # copies on the host, and what they will be
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
        self._known |= dict.fromkeys(
            place for places in self.where.places.values() for place in places
        )

    def begin(self, task: Task | None = None) -> None:
        """The rows from here on are those of a task, or of none."""
        self.blocks.append(Block(task))

    # Buffers and rows

    def buffer(self, value: Value, place: int, size: int, copy: Copy = Copy.OWN) -> int:
        """The id of a copy of a value at a place, made if there is none yet.

        Args:
            value: that it is a copy of.
            place: where it lies.
            size: in bytes.
            copy: which of the copies there.
        """
        spot = Spot(value, place, copy)
        if spot not in self.ids:
            self.ids[spot] = len(self.buffers)
            self.buffers.append(Buffer(value, place, size, copy))
            self.spots.append(spot)
        if copy.is_read:
            self.current[value, place] = self.ids[spot]
        return self.ids[spot]

    def fresh(self, value: Value, place: int, size: int, copy: Copy) -> int:
        """The id of a new copy of a value at a place, which takes the name of an older one.

        Args:
            value: that it is a copy of.
            place: where it lies.
            size: in bytes.
            copy: which of the copies there.
        """
        self.ids.pop(Spot(value, place, copy), None)
        return self.buffer(value, place, size, copy)

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
        """Appends a row; `layer` and `m` say what it concerns.

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
            Row(kind, place, stage, layer, m, tuple(reads), tuple(writes), (), run)
        )

    def rename(self, b: int, spot: Spot) -> None:
        """The same buffer under another name."""
        old = self.spots[b]
        if self.ids.get(old) == b:
            del self.ids[old]
        if self.current.get((old.value, old.place)) == b:
            del self.current[old.value, old.place]
        self.ids[spot] = b
        self.spots[b] = spot
        self.buffers[b] = replace(self.buffers[b], value=spot.value, copy=spot.copy)
        if spot.copy is Copy.OWN:
            self.current[spot.value, spot.place] = b

    def holder(self, value: Value) -> int | None:
        """A place that holds a value."""
        return next((place for place in self._known if (value, place) in self.current), None)

    def metric(self, value: Value) -> int | None:
        """A buffer of a metric: at home, or where the loss was under an earlier plan, whose forward may come last."""
        home = self.where.home
        place = home if (value, home) in self.current else self.holder(value)
        return None if place is None else self.current[value, place]

    # Copies

    def send(self, value: Value, source: int, target: int, layer: int, m: int) -> int:
        """A copy of a value at another place, made once.

        Args:
            value: to be copied.
            source: a place that has it.
            target: the place that gets it.
            layer: that the row concerns.
            m: the micro-batch, or NONE.
        """
        if (value, target) not in self.current:
            b = self.current[value, source]
            self.row(
                Kind.SEND,
                source,
                layer,
                m,
                [b],
                [self.buffer(value, target, self.buffers[b].bytes)],
            )
            if VALUES[value.kind].passed_on:
                self.rename(b, Spot(value, source, Copy.STALE))
        return self.current[value, target]

    def bring(self, value: Value, target: int, layer: int, m: int = NONE) -> int:
        """A value at a place; what still lies where its layer ran before is moved.

        Args:
            value: that is wanted.
            target: the place that wants it.
            layer: that the row concerns.
            m: the micro-batch, or NONE.
        """
        copy = self.where.resting(value, self.optimizer)
        b = self.current.get((value, target))
        if b is not None and (copy is Copy.AWAY) == (self.spots[b].copy is Copy.AWAY):
            return b
        source = self.holder(value) if b is None else target
        assert source is not None, f"{value} lies nowhere"
        b = self.current[value, source]
        info, size = VALUES[value.kind], self.buffers[b].bytes
        if info.alone and not self._replicated:
            self._leave(b)
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
        if there != new:
            self.row(Kind.OUT, target, layer, m, [there], [new])
            if there != b:
                self.row(Kind.FREE, target, layer, m, [there, new], [])
        if info.follows:
            self.moved.append((b, new))
        return new

    def _copied(self, b: int, source: int, target: int, layer: int, m: int, new: int) -> int:
        """What lies at a place, or on its host, on another device: `new` where that is the copy to be there."""
        value = self.spots[b].value
        size, is_away = self.buffers[b].bytes, self.spots[new].copy is Copy.AWAY
        here = b
        if self.buffers[b].copy is Copy.AWAY:
            if source == target:
                self.row(Kind.IN, source, layer, m, [b], [new])
                return new
            here = self.fresh(value, source, size, Copy.FETCHED)
            self.row(Kind.IN, source, layer, m, [b], [here])
        elif source == target:
            return b
        there = self.fresh(value, target, size, Copy.FETCHED) if is_away else new
        self.row(Kind.MOVE, source, layer, m, [here], [there])
        if here != b:
            self.row(Kind.FREE, source, layer, m, [here, there], [])
        return there

    def _leave(self, b: int) -> None:
        """What is left of a value that has moved: nobody reads it there."""
        spot = self.spots[b]
        if spot.copy is not Copy.AWAY:
            self.rename(b, spot._replace(copy=Copy.STALE))
            return
        self.ids.pop(spot, None)
        self.current.pop((spot.value, spot.place), None)

    # Operations

    def perform(self, op: Operation, *, keeps: bool = False, place: int | None = None) -> None:
        """Writes the row of an operation, after the copies that it needs and before those that it delivers.

        Args:
            op: what is computed.
            keeps: of an update: its parameters are still read, so the new ones take buffers of their own.
            place: where; that of its layer unless given.
        """
        here = self.where.of(op.layer, op.examples) if place is None else place
        reads = [self._read(value, op, here) for value in op.reads]
        writes = [self._write(write, here, keeps=keeps) for write in op.writes]
        fetched = self._fetched(op, [*reads, *writes], reads)
        reads, writes = ([fetched.get(b, b) for b in ids] for ids in (reads, writes))
        run = replace(op.run, keeps=keeps) if isinstance(op.run, PieceRun) else op.run
        self.row(op.kind, here, op.layer, op.microbatch, reads, writes, run)
        self._returned(op, {away: b for away, b in fetched.items() if b in writes})
        for value, layers, examples in op.delivers:
            for target in dict.fromkeys(
                self.where.of(layer, e) for layer in layers for e in examples
            ):
                if target != here:
                    self.bring(value, here, op.layer, op.microbatch)
                    self.send(value, here, target, op.layer, op.microbatch)
        for value in op.forgets:
            if (place := here if (value, here) in self.current else self.holder(value)) is not None:
                self.rename(self.current[value, place], Spot(value, place, Copy.STALE))

    def _read(self, value: Value, op: Operation, here: int) -> int:
        """The buffer that an operation reads; what is not there is fed, sent or moved first."""
        if value.kind is ValueKind.OPTIMIZER:  # a change of plan may have changed its fate alone
            return self.bring(value, here, op.layer, op.microbatch)
        if (value, here) in self.current:
            return self.current[value, here]
        if VALUES[value.kind].fed:
            buffer = self.buffer(value, here, self._fed_bytes(value))
            self.row(Kind.FEED, here, op.layer, op.microbatch, [], [buffer])
            return buffer
        if (
            KINDS[op.kind].gathers and VALUES[value.kind].told
        ):  # all else that it reads belongs to its layer
            return self.send(value, self._teller(value), here, value.layer, op.microbatch)
        return self.bring(value, here, op.layer, op.microbatch)

    def _fetched(
        self, op: Operation, touched: Sequence[int], read: Sequence[int]
    ) -> dict[int, int]:
        """What an operation works on in place of buffers that are away, fetched where it reads them: by those."""
        fetched: dict[int, int] = {}
        for b in dict.fromkeys(touched):
            (value, place, copy), size = self.spots[b], self.buffers[b].bytes
            if copy is Copy.AWAY:
                fetched[b] = self.fresh(value, place, size, Copy.FETCHED)
                if b in read:
                    self.row(Kind.IN, place, op.layer, op.microbatch, [b], [fetched[b]])
        return fetched

    def _returned(self, op: Operation, written: Mapping[int, int]) -> None:
        """What an operation has written of buffers that are away goes there again, in place of them."""
        for away, b in written.items():
            (value, place, _), size = self.spots[away], self.buffers[away].bytes
            new = self.fresh(value, place, size, Copy.AWAY)
            self.row(Kind.OUT, place, op.layer, op.microbatch, [b], [new])

    def _teller(self, value: Value) -> int:
        """The place that tells others a value: that of its layer, or of whichever replica has it."""
        place = self.where.of(value.layer, value.examples)
        where = place if (value, place) in self.current else self.holder(value)
        assert where is not None, f"{value} lies nowhere"
        return where

    def _fed_bytes(self, value: Value) -> int:
        match value.kind:
            case ValueKind.BATCH:
                size = self.graph.batch[value.index].bytes
                return (
                    size
                    if value.examples is None
                    else size // self.graph.examples * value.examples.size
                )
            case ValueKind.SEED:
                return self.graph.seed_bytes
            case _:
                raise AssertionError(f"{value} does not come from the host")

    def _write(self, write: Write, here: int, *, keeps: bool) -> int:
        """The buffer that an operation writes; the next version of a parameter takes the place of the one before."""
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
        """Forgets what belongs to layers but for these spots.

        Args:
            spots: what there is, counted from a later micro-batch and version.
            microbatches: how many come before.
            versions: the same of versions.
        """
        for spot in [spot for spot in self.ids if VALUES[spot.value.kind].follows]:
            if spot.copy is not Copy.STALE and spot.shifted(-microbatches, -versions) not in spots:
                b = self.ids.pop(spot)
                if self.current.get((spot.value, spot.place)) == b:
                    del self.current[spot.value, spot.place]

    def relocate(self, plan: Plan) -> None:
        """Moves what lies on the devices between steps to where a plan has it; model state comes with its reader."""
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
        """Once the copies are there, what they were made of is freed: up to here nothing has left its place."""
        staying = {b for _, b in self.lasting()}
        for old, new in self.moved:
            if old < self.persistent:
                self.row(Kind.FREE, self.buffers[old].place, NONE, NONE, [old, new], [])
        for place in self._known:  # what the new plan has elsewhere, or newer
            gone = [
                b
                for b in range(self.persistent)
                if b not in staying and self.buffers[b].place == place
            ]
            for away in (False, True):
                if ids := [b for b in gone if self.buffers[b].copy.on_host is away]:
                    self.row(Kind.DROP, place, NONE, NONE, ids, [])
        for host, new in self._arriving:
            self._arrive(host, new)
        self.moved, self._arriving = [], []

    def _arrive(self, host: int, new: int) -> None:
        """What waits on the host comes to its place, or to the host of that."""
        (value, place, copy), size = self.spots[new], self.buffers[new].bytes
        if copy is not Copy.AWAY:
            self.row(Kind.IN, place, NONE, NONE, [host], [new])
            return
        there = self.fresh(value, place, size, Copy.FETCHED)
        self.row(Kind.IN, place, NONE, NONE, [host], [there])
        self.row(Kind.OUT, place, NONE, NONE, [there], [new])
        self.row(Kind.FREE, place, NONE, NONE, [there, new], [])

    def bring_state(self) -> None:
        """The model state as it is now, wherever the plan has it."""
        for k in range(len(self.graph.state)):
            for place in self.where.holding(k):
                self.bring(self.newest_state(k), place, NONE)

    def newest_state(self, k: int) -> Value:
        """A leaf of the model state as the last micro-batch left it: the whole, not a replica's part."""
        made = [
            value for value, _ in self.current if value.kind is ValueKind.STATE and value.index == k
        ]
        return max(
            (value for value in made if value.examples is None), key=lambda value: value.microbatch
        )

    def lasting(self) -> list[tuple[Spot, int]]:
        """Lists what lies on the devices between steps under the plan: its name then, and its newest buffer there."""
        newest: dict[tuple[ValueKind, int, int, int], tuple[int, int]] = {}
        for (value, place), b in self.current.items():
            if VALUES[value.kind].lasts and value.examples is None:
                key, number = (
                    (value.kind, value.index, value.layer, place),
                    max(value.version, value.microbatch),
                )
                newest[key] = max(newest.get(key, (number, b)), (number, b))
        plain = [buffer.spot for buffer in self.where.lasting(self.optimizer)]
        return [
            (spot, newest[spot.value.kind, spot.value.index, spot.value.layer, spot.place][1])
            for spot in plain
        ]
