"""A measured step as a picture shows it: what ran when, who held how much meanwhile, and what was sent where."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jvpipe.ir.kinds import KINDS, Link
from jvpipe.ir.rows import AskRun, OfferRun
from jvpipe.ir.span import Hop, Level, Picture, Span
from jvpipe.runtime.monitor import Monitor, Record


def picture(monitor: Monitor, record: Record, labels: Sequence[str] = ()) -> Picture:
    """Draws a closed record, with the moves before it; waits for its end.

    Bytes are those that the ledger counts, in the order of dispatch; each row's are there from its start on, and what
    it frees goes with its end.

    Args:
        monitor: has its marks.
        record: of a step.
        labels: the names of the layers.
    """
    spans = [_labelled(span, labels) for span in monitor.read(record).spans]
    parts = [record.moves, record] if record.moves else [record]
    levels = (level for part in parts for level in _levels(monitor, part))
    return Picture(tuple(spans), tuple(levels), tuple(_hops(monitor, record)))


def _labelled(span: Span, labels: Sequence[str]) -> Span:
    layer = span.args.get("layer", -1)
    return (
        replace(span, args={**span.args, "layer_name": labels[layer]})
        if 0 <= layer < len(labels)
        else span
    )


def _levels(monitor: Monitor, record: Record) -> Iterator[Level]:
    """The bytes in each memory, the host's last, whenever they change."""
    held, names = list(record.held), monitor.memories
    reached_s = [
        min((start_s for start_s, _ in record.times.values() if start_s), default=0.0)
    ] * len(held)

    def level(memory: int, at_s: float, more: int = 0) -> Level:
        reached_s[memory] = max(reached_s[memory], at_s)
        return Level(names[memory], reached_s[memory], held[memory] + more)

    yield from (level(memory, 0.0) for memory, size in enumerate(held) if size)
    for index in record.order:
        it = record.instructions[index]
        start_s, end_s = record.times[index]
        held[it.target] += it.born_bytes
        if it.born_bytes or it.temporary_bytes:
            yield level(it.target, start_s, it.temporary_bytes)
        held[it.source] -= it.freed_bytes
        if it.temporary_bytes:
            yield level(it.target, end_s)
        if it.freed_bytes and not (it.temporary_bytes and it.source == it.target):
            yield level(it.source, end_s)


def _hops(monitor: Monitor, record: Record) -> Iterator[Hop]:
    """For each copy between devices, where it left, just before the end of what made it, and the start of a reader."""
    made: dict[int, tuple[str, float]] = {}  # buffers: where and when
    coming: dict[int, str] = {}  # buffers that nothing has read yet: the keys of their copies
    for index, row in enumerate(record.lowered.rows):
        start_s, end_s = record.times[index]
        if KINDS[row.kind].link is Link.PEER and not KINDS[row.kind].watched:
            key = f"{monitor.memories[row.place]} {index}"
            if isinstance(row.run, OfferRun | AskRun):  # both processes know it by this
                key = f"copy {row.run.number}"
            yield from (Hop(key, *made[b], arrives=False) for b in row.reads if b in made)
            coming |= dict.fromkeys(row.writes, key)
        elif index in record.ended:
            here = monitor.memories[row.place]
            yield from (
                Hop(coming.pop(b), here, start_s, arrives=True) for b in row.reads if b in coming
            )
            made |= dict.fromkeys(row.writes, (here, end_s - 1e-3 * (end_s - start_s)))
