"""Pictures of measured steps: the spans of tasks, the bytes held over time, and the copies."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jvpipe.ir.kinds import KINDS, CopyLink
from jvpipe.ir.rows import AskRun, OfferRun
from jvpipe.ir.span import Hop, Level, Picture, Span
from jvpipe.runtime.engine.monitor import Monitor
from jvpipe.runtime.engine.record import Record


def picture(monitor: Monitor, record: Record, labels: Sequence[str] = ()) -> Picture:
    """Waits for a closed record to end; returns a picture of it and of the moves before it.

    The bytes are the bytes that the ledger counts. A buffer counts from the start of the row that
    makes it until the end of the row that frees it.

    Args:
        monitor: the monitor that has watched the step.
        record: the record of the step.
        labels: the names of the layers.
    """
    measured = monitor.read(record)
    spans = [_labeled(span, labels) for span in measured.spans]
    levels: list[Level] = []
    if record.moves:
        levels += _levels(monitor, record.moves)
    levels += _levels(monitor, record)
    hops = _hops(monitor, record)
    return Picture(tuple(spans), tuple(levels), tuple(hops))


def _labeled(span: Span, labels: Sequence[str]) -> Span:
    """Returns a span, with the name of its layer added if the span has a layer."""
    layer = span.args.get("layer", -1)
    if not 0 <= layer < len(labels):
        return span
    args = {**span.args, "layer_name": labels[layer]}
    return replace(span, args=args)


def _levels(monitor: Monitor, record: Record) -> Iterator[Level]:
    """Yields the bytes in each memory (of a device, or of the host) whenever they change."""
    held_bytes = list(record.held_bytes)
    names = monitor.memories
    starts_s = [start_s for start_s, _ in record.times.values() if start_s]
    first_s = min(starts_s, default=0.0)
    reached_s = [first_s] * len(held_bytes)

    def level(memory: int, at_s: float, more_bytes: int = 0) -> Level:
        """Returns a point of a memory's curve.

        Args:
            memory: the index of the memory.
            at_s: the time; if it is before the last point's time, the last point's time is used.
            more_bytes: the temporary bytes of a running program.
        """
        # Bytes are counted in the order of dispatch, which may differ from the order in time. The
        # curve must not go back in time, so a level is never earlier than the level before it.
        reached_s[memory] = max(reached_s[memory], at_s)
        size = held_bytes[memory] + more_bytes
        return Level(names[memory], reached_s[memory], size)

    for memory, size in enumerate(held_bytes):
        if size:
            yield level(memory, 0.0)
    for index in record.order:
        instruction = record.instructions[index]
        target = instruction.target
        source = instruction.source
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
    """Yields both ends of each arrow that shows a copy between devices.

    An arrow begins just before the end of the row that made the copied value. It ends at the start
    of the first row that reads the copy. So both ends lie inside spans of the picture.
    """
    origin: dict[int, tuple[str, float]] = {}  # by buffer: the place that made it, and when
    coming: dict[int, str] = {}  # by copied buffer that no row has read yet: the key of its copy
    for index, row in enumerate(record.lowered.rows):
        start_s, end_s = record.times[index]
        info = KINDS[row.kind]
        if info.link is CopyLink.PEER and not info.watched:
            key = f"{monitor.memories[row.place]} {index}"
            if isinstance(row.run, OfferRun | AskRun):  # the key is the same in both processes
                key = f"copy {row.run.number}"
            for b in row.reads:
                if b in origin:
                    yield Hop(key, *origin[b], arrives=False)
            coming |= dict.fromkeys(row.writes, key)
        elif index in record.ended:
            place = monitor.memories[row.place]
            for b in row.reads:
                if b in coming:
                    yield Hop(coming.pop(b), place, start_s, arrives=True)
            just_before_s = end_s - 1e-3 * (end_s - start_s)
            origin |= dict.fromkeys(row.writes, (place, just_before_s))
