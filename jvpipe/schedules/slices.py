"""A lowered stream in steps, each with its own buffers: what it begins with, makes, and leaves in flight."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jvpipe.ir.buffers import Lowered
from jvpipe.ir.task import Row
from jvpipe.ir.use import Use
from jvpipe.schedules.emit import Key
from jvpipe.schedules.lower import metric_keys
from jvpipe.schedules.versioned import VersionedEmitter, relative


@dataclass(frozen=True)
class Step:
    """A step of a stream: its rows, the names of what is in flight before and after it, and who read what.

    Its metrics end with the losses of its micro-batches.
    """

    lowered: Lowered
    before: tuple[Key, ...]
    after: tuple[Key, ...]
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class Slices:
    """The rows of a stream between `bounds`; at each bound buffers have the `names` of that moment.

    M: micro-batches of a step; `every`: those of an update. The last slice of a `drained` stream is its end.
    """

    pen: VersionedEmitter
    bounds: Sequence[int]
    names: Sequence[dict[int, Key]]
    uses: Sequence[Sequence[Use]]
    M: int
    every: int
    drained: bool

    @cached_property
    def _last(self) -> dict[int, int]:
        """The last row that touches each buffer."""
        return {b: i for i, row in enumerate(self.pen.rows) for b in (*row.reads, *row.writes)}

    @cached_property
    def _lasting(self) -> set[int]:
        return self.pen.lasting()

    def _base(self, n: int) -> tuple[int, int]:
        """The micro-batch and the version from which slice n counts; the end of a stream counts from itself."""
        step = min(n, len(self.bounds) - 1 - self.drained)
        return step * self.M, step * self.M // self.every

    def _called(self, b: int, n: int) -> Key:
        """A buffer's name in slice n."""
        key = self.names[n].get(b) or self.names[n + 1].get(b) or self.pen.buffers[b].key
        key = key[2:] if key[0] == "left" else key
        return relative(key, *self._base(n), self.pen.written)

    def _alive(self, n: int) -> list[tuple[Key, int]]:
        """What is in flight before slice n, in the order of its names."""
        pen = self.pen
        if n == 0:
            return [(pen.buffers[b].key, b) for b in range(pen.persistent)]
        if self.drained and n == len(self.bounds) - 1:
            return list(pen.newest_ids().items())
        here = (b for b in self.names[n] if b in self._lasting or self._last.get(b, -1) >= self.bounds[n])
        named = ((relative(self.names[n][b], *self._base(n), self.pen.written), b) for b in here)
        return sorted(named, key=lambda item: str(item[0]))

    def step(self, n: int) -> Step:
        """A slice as a step; the last one of a drained stream is its end."""
        pen, M, (m0, v0) = self.pen, self.M, self._base(n)
        rows = pen.rows[self.bounds[n] : self.bounds[n + 1]]
        before, after = self._alive(n), self._alive(n + 1)
        told = metric_keys(pen.graph, "step", n) + [("loss", 0, m, pen.home) for m in range(n * M, n * M + M)]
        metrics = [pen.ids[key] for key in map(pen.find, told) if key]
        touched = dict.fromkeys(b for row in rows for b in (*row.reads, *row.writes))
        ids = {b: i for i, b in enumerate(dict.fromkeys([b for _, b in before] + list(touched)))}
        made = {b for _, b in before} | {b for row in rows for b in row.writes}
        assert all(b in made for row in rows for b in row.reads), "what a row reads is from before, or made here"
        staying = {*metrics, *(b for _, b in after)}
        assert all(b in touched or b in staying for _, b in before), "what nobody touches any more was kept"
        last = {b: i for i, row in enumerate(rows) for b in (*row.reads, *row.writes) if b not in staying}
        dead: list[list[int]] = [[] for _ in rows]
        for b, i in last.items():
            dead[i].append(b)
        lowered = Lowered(
            tuple(renumbered(row, ids, found, m0) for row, found in zip(rows, dead, strict=True)),
            tuple(replace(pen.buffers[b], key=self._called(b, n)) for b in ids),
            len(before),
            tuple(ids[b] for _, b in after),
            tuple(ids[b] for b in metrics),
        )
        uses = tuple(use.moved(-m0, -v0) for use in self.uses[n])
        return Step(lowered, tuple(key for key, _ in before), tuple(key for key, _ in after), uses)


def dropping(drain: Step, last: Step) -> Step:
    """A drain that begins with all that a step leaves: versions that only later steps would have read are dropped."""
    places = {key: i for i, key in enumerate(drain.before)}
    sizes = {key: last.lowered.buffers[b] for key, b in zip(last.after, last.lowered.final, strict=True)}
    assert places.keys() <= sizes.keys(), places.keys() - sizes.keys()
    extra = [replace(sizes[key], key=key) for key in last.after if key not in places]
    old, count = drain.lowered, len(last.after)
    ids = {places[key]: i for i, key in enumerate(last.after) if key in places}
    ids |= {b: b + len(extra) for b in range(len(drain.before), len(old.buffers))}
    dropped = [i for i, key in enumerate(last.after) if key not in places]
    buffers = [replace(sizes[key], key=key) for key in last.after] + list(old.buffers[len(drain.before) :])
    drops = []
    for d in dict.fromkeys(buffer.device for buffer in extra):
        here = tuple(i for i in dropped if buffers[i].device == d)
        drops.append(Row("DROP", d, -1, -1, -1, here, (), here))
    rows = [renumbered(row, ids, row.frees, 0) for row in old.rows]
    final, metrics = (tuple(ids[b] for b in found) for found in (old.final, old.metrics))
    return Step(Lowered((*drops, *rows), tuple(buffers), count, final, metrics), last.after, drain.after, drain.uses)


def renumbered(row: Row, ids: dict[int, int], dead: Sequence[int], m0: int) -> Row:
    """A row over other numbers of buffers, its micro-batch counted from m0; the `dead` buffers end with it."""
    return replace(
        row,
        microbatch=row.microbatch - m0 if row.microbatch >= 0 else row.microbatch,  # -1: of none
        reads=tuple(ids[x] for x in row.reads),
        writes=tuple(ids[x] for x in row.writes),
        frees=tuple(ids[x] for x in dead),
    )
