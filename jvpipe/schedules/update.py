"""The end of a synchronous step: the pieces of the update, and the small values and tied copies between them."""

import math
from typing import Any

from jvpipe.programs.pieces import Slot
from jvpipe.schedules.emit import GLOBAL, Emitter, Key, home


def lower_update(pen: Emitter) -> bool:
    """Emits the update; returns whether it yields the norm of the gradient."""
    for program, piece in enumerate(pen.optimizer.update):
        layer = GLOBAL if piece.layer is None else piece.layer
        d = home(pen.graph, pen.device) if piece.layer is None else pen.device[layer]
        reads = [_read(pen, slot, layer, d) for slot in piece.reads]
        writes = [
            _write(pen, slot, aval, layer, d) for slot, aval in zip(piece.writes, piece.program.out_avals, strict=True)
        ]
        pen.emit("U", layer, -1, reads, writes, device=d, program=program)
        for slot in piece.writes:
            if slot.kind == "parameter":
                _refresh(pen, slot.index, layer, d)
    return ("metric", "grad_norm") in pen.ids


def _read(pen: Emitter, slot: Slot, layer: int, d: int) -> int:
    """The buffer that a piece reads; what lies elsewhere is sent first."""
    graph, here = pen.graph, home(pen.graph, pen.device)
    match slot.kind:
        case "gradient":
            source = graph.parameters[slot.index].readers[slot.source]
            key = ("gradient", slot.index, source)
            return pen.send((*key, pen.device[source]), (*key, d), d, source)
        case "weight":
            return pen.send(pen.find(("weight", here)) or (), ("weight", d), d, graph.loss_layer)
        case "partial":
            there = pen.device[slot.source]
            return pen.send((slot, there), (slot, d), d, slot.source)
        case "global":
            return pen.send((slot, here), (slot, d), d, GLOBAL)
        case _:
            return pen.ids[slot_key(slot, layer, d)]


def _write(pen: Emitter, slot: Slot, aval: Any, layer: int, d: int) -> int:
    key = slot_key(slot, layer, d)
    return pen.ids[key] if key in pen.ids else pen.new(key, "metric", math.prod(aval.shape) * aval.dtype.itemsize, d)


def slot_key(slot: Slot, layer: int, d: int) -> Key:
    """The name of the buffer behind a slot of a piece of a layer on device `d`."""
    match slot.kind:
        case "parameter":
            return ("parameter", slot.index, d)
        case "state":
            return ("optimizer", slot.index, layer)
        case "grad_norm":
            return ("metric", "grad_norm")
        case _:
            return (slot, d)


def _refresh(pen: Emitter, p: int, owner: int, d: int) -> None:
    """Sends a tied parameter's new value to the other devices that read it; the old copies end."""
    for reader in pen.graph.parameters[p].readers:
        there = pen.device[reader]
        if there != d:
            new = pen.send(("parameter", p, d), ("parameter", p, there, "new"), there, owner)
            pen.successor[pen.ids["parameter", p, there]] = new
