"""A measured step as a picture shows it: what ran when, which bytes were held meanwhile, and what was sent where."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jvpipe.ir.kinds import KINDS, Link
from jvpipe.ir.rows import AskRun, OfferRun
from jvpipe.ir.span import Hop, Level, Picture, Span
from jvpipe.runtime.engine.monitor import Monitor, Record


def picture(monitor: Monitor, record: Record, labels: Sequence[str] = ()) -> Picture:
    """Returns a closed record as a picture, with the moves before it; waits for its end.

    Bytes are those that the ledger counts, in the order of dispatch: what a row makes is there from
    its start on, and what it frees goes with its end.

    Args:
        monitor: has watched the record.
        record: of a step.
        labels: the names of the layers.
    """
    spans = [_labelled(span, labels) for span in monitor.read(record).spans]
    parts = [record.moves, record] if record.moves else [record]
    levels = (level for part in parts for level in _levels(monitor, part))
    return Picture(tuple(spans), tuple(levels), tuple(_hops(monitor, record)))


def _labelled(span: Span, labels: Sequence[str]) -> Span:
    layer = span.args.get("layer", -1)
    if not 0 <= layer < len(labels):
        return span
    return replace(span, args={**span.args, "layer_name": labels[layer]})


def _levels(monitor: Monitor, record: Record) -> Iterator[Level]:
    """Yields the bytes in each memory, the host's last, whenever they change."""
    held_bytes, names = list(record.held_bytes), monitor.memories
    starts_s = [start_s for start_s, _ in record.times.values() if start_s]
    reached_s = [min(starts_s, default=0.0)] * len(held_bytes)

    def level(memory: int, at_s: float, more_bytes: int = 0) -> Level:
        # Bytes are counted in the order of dispatch, which is not that of time: a level is never
        # drawn before another.
        reached_s[memory] = max(reached_s[memory], at_s)
        return Level(names[memory], reached_s[memory], held_bytes[memory] + more_bytes)

    yield from (level(memory, 0.0) for memory, size in enumerate(held_bytes) if size)
    for index in record.order:
        instruction = record.instructions[index]
        target, source = instruction.target, instruction.source
        temporary_bytes = instruction.temporary_bytes
        start_s, end_s = record.times[index]
        held_bytes[target] += instruction.born_bytes
        if instruction.born_bytes or temporary_bytes:
            yield level(target, start_s, temporary_bytes)
        held_bytes[source] -= instruction.freed_bytes
        if temporary_bytes:
            yield level(target, end_s)
        if instruction.freed_bytes and not (temporary_bytes and source == target):
            yield level(source, end_s)


def _hops(monitor: Monitor, record: Record) -> Iterator[Hop]:
    """Yields both ends of each copy between devices.

    It leaves just before the end of the row that made what it carries, and arrives at the start of
    the first row that reads it: an arrow of the picture begins and ends inside a span.
    """
    origin: dict[int, tuple[str, float]] = {}  # by buffer: the place that made it, and when
    coming: dict[int, str] = {}  # by buffer that no row has read yet: the key of its copy
    for index, row in enumerate(record.lowered.rows):
        start_s, end_s = record.times[index]
        info = KINDS[row.kind]
        if info.link is Link.PEER and not info.watched:
            key = f"{monitor.memories[row.place]} {index}"
            if isinstance(row.run, OfferRun | AskRun):  # both processes find it under this key
                key = f"copy {row.run.number}"
            yield from (Hop(key, *origin[b], arrives=False) for b in row.reads if b in origin)
            coming |= dict.fromkeys(row.writes, key)
        elif index in record.ended:
            place = monitor.memories[row.place]
            keys = [coming.pop(b) for b in row.reads if b in coming]
            yield from (Hop(key, place, start_s, arrives=True) for key in keys)
            just_before_s = end_s - 1e-3 * (end_s - start_s)
            origin |= dict.fromkeys(row.writes, (place, just_before_s))
