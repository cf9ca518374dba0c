"""The pen of an asynchronous stream: parameters have versions, gradients belong to one update.

Beside the buffers of a synchronous step: `parameter p d v` is version v; `ahead` and `corrected` are weights predicted
for a forward and corrected for a backward; `delta`, `applied` and `updates` are what PipeMare and XPipe remember.
A parameter that several stages read follows its first reader: its versions are those of that stage.
"""

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jvpipe.ir.buffers import PERSISTENT
from jvpipe.ir.layers import Layer
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import Task
from jvpipe.ir.use import Use
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.pieces import Slot
from jvpipe.schedules.course import Course
from jvpipe.schedules.emit import GLOBAL, Emitter, Key, home, persistent_buffers

_OWNED = ("parameter", "constant", "state", "optimizer", "delta", "applied", "updates")
_WINDOW = 2  # a layer's old place is free so many tasks of each stage after it has left


class VersionedEmitter(Emitter):
    """Writes the rows of a stream."""

    def __init__(self, course: Course, optimizer: OptimizerCut) -> None:
        super().__init__(course.graph, course.form(0).plan, optimizer)
        self.course, self.schedule, self.every = course, course.schedule, course.every
        self.accumulates = self.every > 1
        self.newest = [0] * len(self.graph.parameters)
        self.written = {k for layer in self.graph.layers for k in layer.writing("state")}  # model state that changes
        self.at = 0  # the number of the task whose rows are written
        self._last_read: dict[tuple[int, int, int], int] = {}  # of a version on a device
        self._pieces = [(i, piece) for i, piece in enumerate(optimizer.update)]
        # what was sent after a layer: when, its old place and its new one
        self._moves: deque[tuple[int, int, int]] = deque()
        for buffer in list(self.buffers):
            if buffer.owner == "parameter":
                self.rename(buffer.key, (*buffer.key, 0))

    def _lay(self, plan: Plan) -> None:
        super()._lay(plan)
        self.stages, self.home = len(plan.stages), home(self.graph, self.device)
        self.tied = [len({self.stage[r] for r in p.readers}) > 1 for p in self.graph.parameters]

    def _move(self, key: Key, target: Key, device: int, layer: int, m: int = -1) -> int:
        b = self.ids[key]
        new = super()._move(key, target, device, layer, m)
        if new != b and self.buffers[b].owner in PERSISTENT:
            self._moves.append((self.at, b, new))
        return new

    def depart(self) -> None:
        """Frees what was sent after a layer a few tasks ago, once it has arrived."""
        while self._moves and self._moves[0][0] + _WINDOW * self.stages < self.at:
            _, old, new = self._moves.popleft()
            self.emit("FREE", GLOBAL, -1, [old, new], [], device=self.buffers[old].device)
            self.emit("DROP", GLOBAL, -1, [new], [], device=self.buffers[new].device)  # should nobody need it any more

    def names(self) -> dict[int, Key]:
        """What each buffer is called by now."""
        return {b: key for key, b in self.ids.items()}

    def keep(self, names: Collection[Key], m0: int, v0: int) -> None:
        """Forgets what belongs to layers but for these names, which count from micro-batch m0 and version v0."""
        for key in [key for key in self.ids if key[0] in _OWNED]:
            if relative(key, m0, v0, self.written) not in names:
                del self.ids[key]

    def settle(self, plan: Plan) -> None:
        """Moves what no task would: constants, and state that all layers share."""
        self.enter(plan)
        for buffer in persistent_buffers(self.graph, plan, self.optimizer):
            match buffer.key:
                case ("optimizer", int(j), -1):
                    self.bring_optimizer(j, GLOBAL, buffer.device)
                case ("state", k, *_) if k in self.written:
                    pass
                case ("constant" | "state", *_):
                    self.bring(buffer.key, GLOBAL)

    # Reading

    def version(self, p: int, m: int, *, back: bool) -> int:
        """The version of a parameter that the forward, or the backward, of a micro-batch reads."""
        return self.course.version(self.graph.parameters[p].owner, m, back=back and not self.tied[p])

    def tau(self, stage: int) -> int:
        """The updates between a forward of a stage and its update."""
        return self.stages - 1 - stage

    def plan_reads(self, tasks: Sequence[Task]) -> None:
        """Notes when each version is read for the last time, so that its update may overwrite it."""
        start = self.plan
        for at, (s, kind, m) in enumerate(tasks):
            if kind != "U":
                self.enter(self.course.form(m).plan)
                for layer in self.plan.stages[s].layers:
                    for p in self.graph.layers[layer].reading("parameter"):
                        v = self.version(p, m, back=kind == "B")
                        self._last_read[p, self.device[layer], v] = at
                        self._last_read[p, self._made_on(p, v), v] = at
        self.enter(start)

    def _made_on(self, p: int, v: int) -> int:
        """The device on which a version was made, if its owner has left it; else none, -1."""
        if len(self.course.legs) == 1:
            return -1
        owner = self.graph.parameters[p].owner
        made = self.course.form(max(v * self.every - 1, 0)).plan
        there = made.stages[made.stage_of(owner)].devices[0]
        return there if there != self.device[owner] else -1

    def parameter(self, p: int, layer: int, m: int, *, back: bool) -> Key:
        """The version that the rules say; predicted or corrected first, if they say so."""
        d = self.device[layer]
        if not self.tied[p]:
            if back and self.schedule.decay is not None:
                return self._shifted("corrected", "delta", layer, p, m, -self.tau(self.stage[layer]), back=True)
            if self.schedule.predicts and not back:
                return self._shifted("ahead", "applied", layer, p, m, self.distance(layer, m), back=False)
        return ("parameter", p, d, self.version(p, m, back=back))

    def distance(self, layer: int, m: int) -> int:
        """The updates between the forward and the backward of a micro-batch."""
        return self.course.version(layer, m, back=True) - self.course.version(layer, m, back=False)

    def use(self, kind: str, layer: Layer, m: int) -> Use:
        """What a layer's forward or backward has read."""
        back = kind == "B"
        tied = tuple((p, self.version(p, m, back=back)) for p in layer.reading("parameter") if self.tied[p])
        name = "corrected" if back else "ahead"
        shifts = [p for p in layer.reading("parameter") if (name, p, self.device[layer.id], m) in self.ids]
        shift = (self.tau(self.stage[layer.id]) if back else self.distance(layer.id, m)) if shifts else 0
        return Use(kind, layer.id, m, self.course.version(layer.id, m, back=back), tied, shift)

    def _shifted(self, name: str, by: str, layer: int, p: int, m: int, factor: int, *, back: bool) -> Key:
        """Weights moved along what is remembered of their updates: those of a layer at once, for one micro-batch."""
        d = self.device[layer]
        if (name, p, d, m) in self.ids:
            return (name, p, d, m)
        plain = ("parameter", p, d, self.version(p, m, back=back))
        if not factor or not self.find((by, p, d)):
            return plain
        mine = [q for q in self.graph.layers[layer].reading("parameter") if not self.tied[q]]
        mine = [q for q in mine if (name, q, d, m) not in self.ids]
        reads = [self.bring(("parameter", q, d, self.version(q, m, back=back)), layer, m) for q in mine]
        reads += [self.bring((by, q, d), layer, m) for q in mine]
        writes = [self.new((name, q, d, m), "parameter", self.graph.parameters[q].array.bytes, d) for q in mine]
        self.emit("SHIFT", layer, m, reads, writes, program=factor)
        return (name, p, d, m)

    def send_tied(self, layer: Layer, m: int) -> None:
        """The owner sends each version of a parameter on, with the first micro-batch that reads it."""
        for p in layer.reading("parameter"):
            parameter = self.graph.parameters[p]
            if parameter.owner == layer.id:
                d, v = self.device[layer.id], self.version(p, m, back=False)
                for there in dict.fromkeys(self.device[reader] for reader in parameter.readers):
                    if there != d:
                        self.bring(("parameter", p, d, v), layer.id, m)
                        self.send(("parameter", p, d, v), ("parameter", p, there, v), there, layer.id, m)

    # Updating

    def gradient(self, p: int, layer: int, m: int) -> Key:
        """The accumulator of the update that a micro-batch belongs to."""
        return ("gradient", p, layer, self.device[layer], m // self.every)

    def weigh(self, layer: Layer, m: int) -> None:
        """Once all micro-batches of an update have their weights: the sum."""
        d, g = self.device[layer.id], m // self.every
        if not self.graph.weighted or ("loss", 1) not in [(r.kind, r.index) for r in layer.writes]:
            return
        if (m + 1) % self.every == 0:
            reads = [self.bring(("loss", 1, n, d), layer.id, m) for n in range(g * self.every, m + 1)]
            self.emit("WEIGHT", layer.id, m, reads, [self.new(("weight", d, g), "metric", 4, d)], program=self.every)

    def update(self, s: int, m: int) -> Iterator[tuple[int, int]]:
        """The update of a stage after a micro-batch; yields its layers and the version that it makes of them."""
        g = m // self.every
        for layer in self.plan.stages[s].layers:
            owned = self.graph.owned(layer)
            d, before = self.device[layer], {p: self.newest[p] for p in owned}
            remembers = self.tau(s) > 0 and (self.schedule.decay is not None or self.schedule.predicts)
            kept = remembers or any(self._last_read.get((p, d, v), -1) > self.at for p, v in before.items())
            for number, piece in self._pieces:
                if piece.layer == layer:
                    reads = [self._slot(slot, layer, d, g, m) for slot in piece.reads]
                    made = zip(piece.writes, piece.program.out_avals, strict=True)
                    writes = [self._written(slot, aval, layer, d, m, kept=kept) for slot, aval in made]
                    self.emit("U", layer, m, reads, writes, program=number + len(self._pieces) * kept)
            if remembers and owned:
                self._remember(layer, owned, before, m)
            elif owned:
                self._forget(layer, owned)
            yield layer, g + 1

    def _slot(self, slot: Slot, layer: int, d: int, g: int, m: int) -> int:
        match slot.kind:
            case "gradient":
                source = self.graph.parameters[slot.index].readers[slot.source]
                key = ("gradient", slot.index, source)
                return self.send((*key, self.device[source], g), (*key, d, g), d, source, m)
            case "weight":
                return self.send(("weight", self.home, g), ("weight", d, g), d, self.graph.loss_layer, m)
            case "parameter":
                return self.bring(("parameter", slot.index, d, self.newest[slot.index]), layer, m)
            case "state":
                return self.bring_optimizer(slot.index, layer, d)
            case _:
                return self.ids[slot, d, m]

    def _written(self, slot: Slot, aval: Any, layer: int, d: int, m: int, *, kept: bool) -> int:
        size = math.prod(aval.shape) * aval.dtype.itemsize
        match slot.kind:
            case "parameter":
                p, v = slot.index, self.newest[slot.index]
                self.newest[p] = v + 1
                if kept:
                    return self.new(("parameter", p, d, v + 1), "parameter", size, d)
                return self.rename(("parameter", p, d, v), ("parameter", p, d, v + 1))
            case "state":
                return self.ids["optimizer", slot.index, layer]
            case _:
                return self.new((slot, d, m), "metric", size, d)

    def _remember(self, layer: int, owned: Sequence[int], before: dict[int, int], m: int) -> None:
        """What PipeMare and XPipe keep of an update: the mean of the updates, or the last one."""
        d, corrects = self.device[layer], self.schedule.decay is not None
        name = "delta" if corrects else "applied"
        size = {p: self.graph.parameters[p].array.bytes for p in owned}
        keys: list[Key] = [(name, p, d) for p in owned]
        if not self.find(keys[0]):
            new = [self.new(key, "parameter", size[p], d) for key, p in zip(keys, owned, strict=True)]
            new += [self.new(("updates", layer, d), "parameter", 4, d)] if corrects else []
            self.emit("ZERO", layer, m, [], new, program=-2)
        old = [self.bring(("parameter", p, d, before[p]), layer, m) for p in owned]
        now = [self.ids["parameter", p, d, self.newest[p]] for p in owned]
        memory = [self.bring(key, layer, m) for key in keys]
        count = [self.bring(("updates", layer, d), layer, m)] if corrects else []
        writes = [*now, *memory, *count] if corrects else memory
        self.emit("SETTLE", layer, m, [*old, *now, *memory, *count], writes, program=self.tau(self.stage[layer]))

    def _forget(self, layer: int, owned: Sequence[int]) -> None:
        """On the last stage nothing is remembered: what a layer brought there ends."""
        for key in [("updates", layer, -1), *((kind, p, -1) for kind in ("delta", "applied") for p in owned)]:
            if found := self.find(key):
                b = self.ids.pop(found)
                self.ids["left", self.buffers[b].device, *found] = b

    # Ending

    def refresh(self) -> None:
        """Every device that reads a parameter gets its newest version."""
        for p, parameter in enumerate(self.graph.parameters):
            d, v = self.device[parameter.owner], self.newest[p]
            for there in dict.fromkeys(self.device[reader] for reader in parameter.readers):
                self.bring(("parameter", p, d, v), parameter.owner)
                if there != d:
                    self.send(("parameter", p, d, v), ("parameter", p, there, v), there, parameter.owner)

    def newest_ids(self) -> dict[Key, int]:
        """The buffers that hold what a synchronous step knows, by the names that it has for them."""
        found: dict[Key, tuple[int, int]] = {}
        for key, b in self.ids.items():
            match key:
                case ("parameter", p, d, int(number)):
                    plain: Key = ("parameter", p, d)
                case ("state", k, int(number), d):
                    plain = ("state", k, -1, d)
                case _:
                    plain, number = key, 0
            found[plain] = max(found.get(plain, (number, b)), (number, b))
        plain = persistent_buffers(self.graph, self.plan, self.optimizer)
        return {buffer.key: found[buffer.key][1] for buffer in plain}

    def lasting(self) -> set[int]:
        """The buffers that outlive every step: the newest of each kind, and what is remembered."""
        kinds = ("delta", "applied", "updates")
        return {*self.newest_ids().values(), *(b for key, b in self.ids.items() if key[0] in kinds)}


def relative(key: Key, m0: int, v0: int, written: Collection[int]) -> Key:
    """A buffer's name with micro-batches counted from m0 and versions from v0.

    >>> relative(("host", "residual", 3, 0, 9), 8, 2, ())
    ('host', 'residual', 3, 0, 1)
    """
    match key:
        case ("host" | "back" | "again", *rest):
            return (key[0], *relative(tuple(rest), m0, v0, written))
        case ("left", d, *rest):
            return (key[0], d, *relative(tuple(rest), m0, v0, written))
        case ("parameter", p, d, int(v)):
            return ("parameter", p, d, v - v0)
        case ("state", k, _, _) if k not in written:
            return key
        case ("tensor" | "batch" | "seed" | "state" | "cotangent" | "loss" | "aux", i, int(m), d):
            return (key[0], i, m - m0, d)
        case ("residual" | "unused" | "ahead" | "corrected", a, b, int(m)):
            return (key[0], a, b, m - m0)
        case ("gradient", p, layer, d, int(g)):
            return ("gradient", p, layer, d, g - v0)
        case ("weight", d, int(g)):
            return ("weight", d, g - v0)
        case ("metric" | "weight", *_):
            return key[:-1]  # of the step
        case (Slot() as slot, d, int(m)):
            return (slot, d, m - m0)
        case _:
            return key
