"""The period of a stream: its rows cut into steps, each with buffers of its own, counted from its own beginning.

    rows       F0 F1 B0 U0 | F2 B1 U1 F3 B2 U2 | F4 B3 U3 F5 B4 U4 | ...
    as a step                F0 B-1 U F1 B0 U  = F0 B-1 U F1 B0 U        from here on every step is like this one

A step begins with what the one before left in flight, named by spots that count from the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jvpipe.ir.buffers import Buffer, Copy, Lowered, Spot
from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.rows import Row
from jvpipe.ir.use import Use
from jvpipe.ir.values import NONE
from jvpipe.lowering.liveness import freeing, last_touches, renumbered


@dataclass(frozen=True)
class Step:
    """A step of a stream: its rows, the names of what is in flight before and after it, and who read what.

    Its metrics end with the losses of its micro-batches.
    """

    lowered: Lowered
    before: tuple[Spot, ...]
    after: tuple[Spot, ...]
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class Unrolled:
    """The rows of some steps of a stream, with the buffers that they touch.

    Step n has the rows from `bounds[n]` to `bounds[n + 1]`; at each bound buffers have the `spots` of that moment.
    `lasting` are buffers that outlive every step. M: micro-batches of a step; `every`: those of an update. If the
    stream ends with the last step, `end` is what is left then.
    """

    graph: LayerGraph
    rows: Sequence[Row]
    buffers: Sequence[Buffer]
    bounds: Sequence[int]
    spots: Sequence[Mapping[int, Spot]]
    uses: Sequence[Sequence[Use]]
    metrics: Sequence[Sequence[int]]
    lasting: frozenset[int]
    M: int
    every: int
    end: Sequence[tuple[Spot, int]] | None = None

    @cached_property
    def _first(self) -> dict[int, int]:
        """The first row that touches each buffer."""
        first: dict[int, int] = {}
        for i, row in enumerate(self.rows):
            for b in (*row.reads, *row.writes):
                first.setdefault(b, i)
        return first

    @cached_property
    def _last(self) -> dict[int, int]:
        return last_touches(self.rows)

    def _base(self, n: int) -> tuple[int, int]:
        """The micro-batch and the version from which step n counts; the end of a stream counts from itself."""
        step = min(n, len(self.bounds) - 1 - (self.end is not None))
        return step * self.M, step * self.M // self.every

    def _spot(self, b: int, n: int) -> Spot:
        """A buffer's name in step n."""
        m0, v0 = self._base(n)
        spot = self.spots[n].get(b) or self.spots[n + 1].get(b) or self.buffers[b].spot
        return (spot._replace(copy=Copy.OWN) if spot.copy is Copy.STALE else spot).shifted(-m0, -v0)

    def _alive(self, n: int) -> list[tuple[Spot, int]]:
        """Lists what is in flight before step n, in the order of its names."""
        if self.end is not None and n == len(self.bounds) - 1:
            return list(self.end)
        if n == 0:
            return [(spot, b) for b, spot in sorted(self.spots[0].items())]
        (m0, v0), bound = self._base(n), self.bounds[n]
        here = [b for b in self.spots[n] if b in self.lasting or self._last.get(b, -1) >= bound]
        swapped = [
            b
            for b, first in self._first.items()
            if self.buffers[b].copy.is_swap and first < bound <= self._last[b]
        ]
        named = [
            (self.spots[n].get(b, self.buffers[b].spot).shifted(-m0, -v0), b)
            for b in (*here, *swapped)
        ]
        return sorted(named)

    def step(self, n: int) -> Step:
        """Step n; the last one of a stream that ends is its end."""
        m0, v0 = self._base(n)
        rows = self.rows[self.bounds[n] : self.bounds[n + 1]]
        before, after, metrics = self._alive(n), self._alive(n + 1), self.metrics[n]
        touched = dict.fromkeys(b for row in rows for b in (*row.reads, *row.writes))
        ids = {b: i for i, b in enumerate(dict.fromkeys([*(b for _, b in before), *touched]))}
        staying = {*metrics, *(b for _, b in after)}
        self._check(before, rows, staying)
        lowered = Lowered(
            tuple(renumbered(freeing(rows, staying), ids, m0)),
            tuple(_renamed(self.buffers[b], self._spot(b, n)) for b in ids),
            len(before),
            tuple(ids[b] for _, b in after),
            tuple(ids[b] for b in metrics),
        )
        uses = tuple(use.moved(-m0, -v0) for use in self.uses[n])
        return Step(
            lowered, tuple(spot for spot, _ in before), tuple(spot for spot, _ in after), uses
        )

    def _check(
        self, before: Sequence[tuple[Spot, int]], rows: Sequence[Row], staying: set[int]
    ) -> None:
        made = {b for _, b in before} | {b for row in rows for b in row.writes}
        assert all(b in made for row in rows for b in row.reads), (
            "what a row reads is from before, or made here"
        )
        touched = {b for row in rows for b in (*row.reads, *row.writes)}
        assert all(b in touched or b in staying for _, b in before), (
            "what nobody touches any more was kept"
        )


def dropping(drain: Step, last: Step) -> Step:
    """Makes a drain begin with all that a step leaves: versions that only later steps would have read are dropped.

    >>> from jvpipe.ir.values import Value, ValueKind
    >>> old, new = (Value(ValueKind.PARAMETER, 0, version=v) for v in (-1, 0))
    >>> spots, buffers = (Spot(old, 0), Spot(new, 0)), (Buffer(old, 0, 4), Buffer(new, 0, 4))
    >>> last = Step(Lowered((), buffers, 2, (0, 1), ()), spots, spots, ())
    >>> drain = Step(Lowered((), buffers[1:], 1, (0,), ()), spots[1:], spots[1:], ())
    >>> [(str(row), row.frees) for row in dropping(drain, last).lowered.rows]
    [('DROP', (0,))]
    """
    at = {spot: i for i, spot in enumerate(drain.before)}
    left = {
        spot: last.lowered.buffers[b]
        for spot, b in zip(last.after, last.lowered.final, strict=True)
    }
    assert at.keys() <= left.keys(), at.keys() - left.keys()
    old, count = drain.lowered, len(last.after)
    extra = [i for i, spot in enumerate(last.after) if spot not in at]
    ids = {at[spot]: i for i, spot in enumerate(last.after) if spot in at}
    ids |= {b: b + len(extra) for b in range(len(drain.before), len(old.buffers))}
    buffers = [_renamed(left[spot], spot) for spot in last.after] + list(
        old.buffers[len(drain.before) :]
    )
    drops = []
    for memory in dict.fromkeys(buffers[i].memory for i in extra):
        here = tuple(i for i in extra if buffers[i].memory == memory)
        drops.append(Row(Kind.DROP, memory, NONE, NONE, NONE, here, (), here))
    rows = renumbered(old.rows, ids)
    final, metrics = (tuple(ids[b] for b in kept) for kept in (old.final, old.metrics))
    return Step(
        Lowered((*drops, *rows), tuple(buffers), count, final, metrics),
        last.after,
        drain.after,
        drain.uses,
    )


def _renamed(buffer: Buffer, spot: Spot) -> Buffer:
    return replace(buffer, value=spot.value, place=spot.place, copy=spot.copy)
