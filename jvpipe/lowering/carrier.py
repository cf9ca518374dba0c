"""The carrier, which writes the rows that copy values to the places where they are needed.

    case                               row
    another place also reads a value   SEND
    a layer changes places             MOVE for each of its values
    a value's fate has changed         OUT or IN, between the device of its place and the host

Before an operation runs, `bring` and `send` copy the missing values to its place. When the plan
changes, values may also be moved earlier, to save time. A step moves most values early, in this
order (step.py): `relocate` before a new plan begins, `bring_state` after the last task, then
`commit`, which frees the old buffers. A stream calls `keep` at a change of plan, and frees old
buffers one by one (stream/departures.py).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from jvpipe.ir.buffers import Copy, Spot
from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.ir.rows import Row, Run
from jvpipe.ir.task import Task
from jvpipe.ir.values import NONE, VALUES, Value, ValueKind
from jvpipe.lowering.buffer_table import BufferTable
from jvpipe.lowering.placement import Placement
from jvpipe.programs.optimizer_pieces import OptimizerCut


@dataclass
class Block:
    """The rows of a task or, if `task` is None, rows between tasks."""

    task: Task | None
    rows: list[Row] = field(default_factory=list)


class Carrier(BufferTable):
    """A writer of rows that copy values between places, according to the plan entered last.

    Args:
        graph: the layers.
        plan: the plan that is entered first. Its lasting buffers are the first of the table.
        optimizer: the update, which says where its state lies.
        by_host: whether every value that moves goes to the host first. Values go on to their new
            places only after all of them have left their old places.

    Attributes:
        where: the places of layers under the plan entered last.
        blocks: the rows so far.
        moved: pairs of an old buffer and the copy that must arrive before the old buffer is freed.
        persistent: how many buffers of the table exist before the first row.
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
        # Whether a plan entered so far has replicas. If so, a value that is brought to another
        # place also stays at the old place, because a replica there may read it.
        self._replicated = False
        self.enter(plan)
        for buffer in self.where.lasting:
            self.buffer(buffer.value, buffer.place, buffer.bytes, buffer.copy)
        self.persistent = len(self.buffers)

    def enter(self, plan: Plan) -> None:
        """Makes a plan the current one, by which later operations are placed."""
        if id(plan) not in self._placements:
            self._placements[id(plan)] = Placement(self.graph, plan, self.optimizer)
        self.where = self._placements[id(plan)]
        self._replicated |= plan.replicated
        for places in self.where.places.values():
            self.places |= dict.fromkeys(places)

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
            kind: the kind of the row.
            place: the place where the row runs.
            layer: the layer that the row belongs to, or NONE.
            m: the micro-batch, or NONE.
            reads: the numbers of the buffers that it reads.
            writes: the numbers of the buffers that it writes.
            run: the row's details, such as the bounds of a slice.
        """
        row = Row(
            kind,
            place,
            self.where.stage.get(layer, NONE),
            layer,
            m,
            tuple(reads),
            tuple(writes),
            (),
            run,
        )
        self.blocks[-1].rows.append(row)

    def metric(self, value: Value) -> int | None:
        """Returns a buffer that holds a metric, or None if no row has made the metric.

        The buffer is at the loss's current place, unless the last forward that the metric needs ran
        under an earlier plan. In that case the buffer is where that plan has the loss.
        """
        place = self.holder_near(value, self.where.home)
        return None if place is None else self.current[value, place]

    def holder_near(self, value: Value, place: int) -> int | None:
        """Returns a place that holds a value, or None if no place does.

        Args:
            value: the value.
            place: the place to return if it holds the value.
        """
        return place if (value, place) in self.current else self.holder(value)

    def send(
        self,
        value: Value,
        source: int,
        target: int,
        layer: int,
        m: int,
    ) -> int:
        """Returns the buffer of a value at another place, after sending the value if it is missing.

        Args:
            value: the value to copy.
            source: a place that has it.
            target: the place that gets it.
            layer: the layer that the row belongs to.
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
        """Returns the buffer with a value at a place, and moves the value there if it is elsewhere.

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
        assert source is not None, f"no place has {value}"
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
        self._copy(b, source, target, layer, m, new)
        if info.follows:
            self.moved.append((b, new))
        return new

    def _copy(
        self,
        b: int,
        source: int,
        target: int,
        layer: int,
        m: int,
        new: int,
    ) -> None:
        """Appends the rows that copy a buffer to another one, with a row for each leg of the way.

            b, if on the host    IN      the source's device
            source's device      MOVE    the target's device, if it is another
            target's device      OUT     new, if on the host

        A buffer that one leg makes only for the next is freed when the next leg has read it.

        Args:
            b: the buffer to copy, on the device of the source or on that device's host.
            source: the place of `b`.
            target: the place of `new`.
            layer: the layer that the rows concern.
            m: the micro-batch, or NONE.
            new: the copy, on the target's device or on that device's host.
        """
        value, size = self.spots[new].value, self.buffers[b].bytes
        on_device = self.spots[new].copy is not Copy.AWAY
        here = b
        if self.buffers[b].copy.on_host:
            is_there = on_device and source == target
            here = new if is_there else self.fresh(value, source, size, Copy.FETCHED)
            self.row(Kind.IN, source, layer, m, [b], [here])
        there = here
        if source != target:
            there = new if on_device else self.fresh(value, target, size, Copy.FETCHED)
            self.row(Kind.MOVE, source, layer, m, [here], [there])
            if here != b:
                self.row(Kind.FREE, source, layer, m, [here, there], [])
        if there != new:
            self.row(Kind.OUT, target, layer, m, [there], [new])
            if there != b:
                self.row(Kind.FREE, target, layer, m, [there, new], [])

    # Changes of plan

    def keep(self, spots: Collection[Spot], microbatches: int, versions: int) -> None:
        """Forgets the buffers of values that belong to layers, except for the given spots.

        A spot is the name of a buffer: a value, its place, and which of the copies there.

        Args:
            spots: the names to keep, with micro-batches and versions counted from a later step.
            microbatches: the first micro-batch of that step, which is number 0 in `spots`.
            versions: the version at the start of that step, which is number 0 in `spots`.
        """
        for spot, b in list(self.ids.items()):
            if not VALUES[spot.value.kind].follows or spot.copy is Copy.STALE:
                continue
            if spot.shifted(-microbatches, -versions) not in spots:
                self.forget(b)

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
                    raise AssertionError(f"{buffer.value} is not state between steps")
        self.enter(before)

    def commit(self) -> None:
        """Frees the old buffers of all values that have moved, once the copies have arrived.

        Until this call all old buffers exist. With `by_host`, values wait on the host, and go on to
        their new places after the old buffers have been freed.
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
            place = self.buffers[new].place
            self._copy(host, place, place, NONE, NONE, new)
        self.moved, self._arriving = [], []

    def bring_state(self) -> None:
        """Brings the newest model state to every place where the plan has it."""
        for k in range(len(self.graph.state)):
            for place in self.where.holding(k):
                self.bring(self.newest_state(k), place, NONE)

    def newest_state(self, k: int) -> Value:
        """Names a leaf of the model state as the last micro-batch left it."""
        versions = []
        for value, _ in self.current:
            # Parts that replicas have made, whose names have examples, do not count.
            is_whole = value.kind is ValueKind.STATE and value.examples is None
            if is_whole and value.index == k:
                versions.append(value)
        return max(versions, key=lambda value: value.microbatch)

    def lasting(self) -> list[tuple[Spot, int]]:
        """Lists the buffers of the state between steps under the current plan.

        Each entry has the name that a part of the state has between steps, and the number of the
        buffer that holds its newest value.
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
