"""The pen of the lowering: writes rows and, beside them, the table of the buffers that they touch."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from jvpipe.ir.buffers import HOST, PERSISTENT, Buffer, Lowered, Owner
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.ir.task import Row, RowKind
from jvpipe.programs.optimizer import OptimizerCut

Key = tuple[Hashable, ...]
GLOBAL = -1  # stands where a layer would, for what concerns all of them
# where a key names the device
_PLACE: dict[str, int] = dict.fromkeys(("parameter", "constant", "delta", "applied", "updates"), 2)
_PLACE |= dict.fromkeys(("state", "gradient", "loss", "aux"), 3) | {"weight": 1}
_ALONE = ("gradient", "optimizer", "delta", "applied", "updates")  # of these there is one, where its layer runs


class Emitter:
    """Collects rows and buffers; a buffer is named by a key and made once.

    `stage` and `device` say where layers run under the plan of the micro-batch that is written. Where that changes,
    what a layer has left elsewhere is moved when it is read (`bring`).
    """

    def __init__(self, graph: LayerGraph, plan: Plan, optimizer: OptimizerCut) -> None:
        self.graph, self.optimizer = graph, optimizer
        self._places: dict[int, None] = {}  # the devices of all plans so far
        self._lay(plan)
        self.accumulates = True  # several micro-batches per update: their gradients are added up
        self.rows: list[Row] = []
        self.buffers: list[Buffer] = []
        self.ids: dict[Key, int] = {}
        self.reruns: set[tuple[int, int]] = set()  # layers and micro-batches whose forward ran again
        self.moved: dict[Key, Key] = {}  # where a backward finds what a forward left elsewhere
        self.successor: dict[int, int] = {}  # of a persistent buffer: the one that takes its place after the step
        self.leaving: list[tuple[int, int]] = []  # persistent buffers whose layer has moved, and their copies
        self.by_host = False  # what moves waits on the host until all of it has left
        self.arriving: list[tuple[int, int]] = []  # copies on the host, and what they will be
        for buffer in persistent_buffers(graph, plan, optimizer):
            self.new(buffer.key, buffer.owner, buffer.bytes, buffer.device)
        self.persistent = len(self.buffers)

    def enter(self, plan: Plan) -> None:
        """What is written from here on runs under this plan."""
        if plan is not self.plan:
            self._lay(plan)

    def _lay(self, plan: Plan) -> None:
        self.plan = plan
        self.stage = {layer: s for s, stage in enumerate(plan.stages) for layer in stage.layers}
        self.device = {layer: plan.stages[s].devices[0] for layer, s in self.stage.items()}
        self._places |= dict.fromkeys(self.device.values())

    def new(self, key: Key, owner: Owner, size: int, device: int) -> int:
        """The id of a buffer, made if there is none of this name yet."""
        if key not in self.ids:
            self.ids[key] = len(self.buffers)
            self.buffers.append(Buffer(key, owner, size, device))
        return self.ids[key]

    def emit(
        self,
        kind: RowKind,
        layer: int,
        microbatch: int,
        reads: Sequence[int],
        writes: Sequence[int],
        *,
        device: int | None = None,
        program: int = -1,
    ) -> None:
        """Appends a row; it runs on its layer's device unless another is named."""
        where = self.device[layer] if device is None else device
        stage = self.stage.get(layer, -1)
        self.rows.append(Row(kind, where, stage, layer, microbatch, tuple(reads), tuple(writes), (), program))

    def send(self, key: Key, target: Key, device: int, layer: int, microbatch: int = -1) -> int:
        """Copies a buffer to another device under another name, once."""
        if target not in self.ids:
            source = self.buffers[self.ids[key]]
            new = self.new(target, source.owner, source.bytes, device)
            self.emit("SEND", layer, microbatch, [self.ids[key]], [new], device=source.device)
        return self.ids[target]

    def find(self, key: Key) -> Key | None:
        """The name of a buffer that holds what this name says, on its device or on another."""
        if key in self.ids or key[0] not in _PLACE:
            return key if key in self.ids else None
        at = _PLACE[str(key[0])]
        names = ((*key[:at], d, *key[at + 1 :]) for d in self._places)
        return next((name for name in names if name in self.ids), None)

    def bring(self, key: Key, layer: int, m: int = -1) -> int:
        """The buffer of this name; what still lies where its layer ran before is moved."""
        if key in self.ids:
            return self.ids[key]
        found = self.find(key)
        assert found is not None, key
        return self._move(found, key, int(str(key[_PLACE[str(key[0])]])), layer, m)

    def bring_optimizer(self, j: int, holder: int, device: int) -> int:
        """A layer's part of the optimizer's state, on the layer's device."""
        return self._move(("optimizer", j, holder), ("optimizer", j, holder), device, holder)

    def _move(self, key: Key, target: Key, device: int, layer: int, m: int = -1) -> int:
        b = self.ids[key]
        source = self.buffers[b]
        if source.device == device:
            return b
        if key[0] in _ALONE:
            self.ids["left", source.device, *key] = self.ids.pop(key)
        new = self.new(target, source.owner, source.bytes, device)
        if self.by_host:
            host = self.new(("host", *target), source.owner, source.bytes, HOST)
            self.emit("OUT", layer, m, [b], [host], device=source.device)
            self.leaving.append((b, host))
            self.arriving.append((host, new))
        else:
            self.emit("MOVE", layer, m, [b], [new], device=source.device)
            if b < self.persistent:
                self.leaving.append((b, new))
        return new

    def commit(self) -> None:
        """Once the copies are there, what they were made of is freed: up to here nothing has left its place."""
        staying = set(self._staying)
        for old, new in self.leaving:
            self.emit("FREE", GLOBAL, -1, [old, new], [], device=self.buffers[old].device)
        for d in self._places:  # what the new plan has elsewhere, or newer
            gone = [b for b in range(self.persistent) if b not in staying and self.buffers[b].device == d]
            if gone:
                self.emit("DROP", GLOBAL, -1, gone, [], device=d)
        for host, new in self.arriving:
            self.emit("IN", GLOBAL, -1, [host], [new], device=self.buffers[new].device)
        self.leaving, self.arriving = [], []

    def parameter(self, p: int, layer: int, m: int, *, back: bool) -> Key:
        """Where a layer finds a parameter, in the forward of a micro-batch or, `back`, for its backward."""
        return ("parameter", p, self.device[layer])

    def gradient(self, p: int, layer: int, m: int) -> Key:
        """Where the gradients of a micro-batch are added up."""
        return ("gradient", p, layer, self.device[layer])

    def rename(self, old: Key, new: Key) -> int:
        """The same buffer under another name."""
        b = self.ids[new] = self.ids.pop(old)
        self.buffers[b] = replace(self.buffers[b], key=new)
        return b

    @property
    def _staying(self) -> list[int]:
        """What lies on the devices after the step."""
        return [self.ids[buffer.key] for buffer in persistent_buffers(self.graph, self.plan, self.optimizer)]

    def lowered(self, metrics: Sequence[Key]) -> Lowered:
        """The finished step: every buffer is freed at the last row that touches it."""
        final = tuple(self.successor.get(b, b) for b in self._staying)
        named = tuple(self.ids[key] for key in metrics)
        lasting = {*final, *named}
        last = {b: i for i, row in enumerate(self.rows) for b in (*row.reads, *row.writes) if b not in lasting}
        frees: dict[int, list[int]] = {}
        for b, i in last.items():
            frees.setdefault(i, []).append(b)
        rows = tuple(replace(row, frees=tuple(frees.get(i, ()))) for i, row in enumerate(self.rows))
        return Lowered(rows, tuple(self.buffers), self.persistent, final, named)


def persistent_buffers(graph: LayerGraph, plan: Plan, optimizer: OptimizerCut) -> tuple[Buffer, ...]:
    """What lies on the devices between steps: parameters (a copy per device that reads one), optimizer state, model
    state, constants. Replicated optimizer state (step counts) has a copy per layer, so that layers can move.
    """
    device = {layer: stage.devices[0] for stage in plan.stages for layer in stage.layers}
    found: list[Buffer] = []
    for p, parameter in enumerate(graph.parameters):
        reading = dict.fromkeys(device[layer] for layer in parameter.readers)
        found += [Buffer(("parameter", p, d), "parameter", parameter.array.bytes, d) for d in reading]
    places = device | {GLOBAL: home(graph, device)}
    for j, holder in sorted((j, GLOBAL if layer is None else layer) for j, layer in optimizer.holders):
        found.append(Buffer(("optimizer", j, holder), "optimizer", optimizer.state[j].array.bytes, places[holder]))
    for k, array in enumerate(graph.state):
        found += [Buffer(("state", k, -1, d), "state", array.bytes, d) for d in state_places(graph, device, k)]
    for c, array in enumerate(graph.constants):
        using = dict.fromkeys(device[layer.id] for layer in graph.layers if c in layer.reading("constant"))
        found += [Buffer(("constant", c, d), "constant", array.bytes, d) for d in using]
    assert all(buffer.owner in PERSISTENT for buffer in found)
    return tuple(found)


def state_places(graph: LayerGraph, device: dict[int, int], k: int) -> tuple[int, ...]:
    """The devices that hold a leaf of the model state."""
    reading = [layer.id for layer in graph.layers if k in layer.reading("state")]
    writing = [layer.id for layer in graph.layers if k in layer.writing("state")]
    return tuple(dict.fromkeys(device[layer] for layer in (reading or writing or [0])))


def home(graph: LayerGraph, device: dict[int, int]) -> int:
    """The device on which what concerns all layers is computed: that of the loss."""
    return device[graph.loss_layer]
