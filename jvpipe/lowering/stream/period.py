"""The period of a stream: its rows cut into steps, each with buffers of its own,
counted from its own beginning.

    rows       F0 F1 B0 U0 | F2 B1 U1 F3 B2 U2 | F4 B3 U3 F5 B4 U4 | ...
    as a step                F0 B-1 U F1 B0 U  = F0 B-1 U F1 B0 U        from here on every step is like this one

A step begins with what the one before left in flight. Its buffers are numbered again: those first,
in the order of their names, then the others as the rows touch them. Names count micro-batches and
versions from the step's first ones. So two steps that do the same are equal, and a stream needs as
many lowered steps as differ.
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
    """A step of a stream: its rows, the names of what is in flight before and after it, and who
    read what.

    Its metrics end with the losses of its micro-batches.
    """

    lowered: Lowered
    before: tuple[Spot, ...]
    after: tuple[Spot, ...]
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class Unrolled:
    """The rows of some steps of a stream, with the buffers that they touch.

    Step n has the rows from `bounds[n]` to `bounds[n + 1]`; at each bound buffers have the `spots`
    of that moment. `lasting` are buffers that outlive every step. M: micro-batches of a step;
    `every`: those of an update. If the stream ends with the last step, `end` is what is left then.
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
        """By buffer, the first row that touches it."""
        first: dict[int, int] = {}
        for i, row in enumerate(self.rows):
            for b in (*row.reads, *row.writes):
                first.setdefault(b, i)
        return first

    @cached_property
    def _last(self) -> dict[int, int]:
        """By buffer, the last row that touches it."""
        return last_touches(self.rows)

    def _base(self, n: int) -> tuple[int, int]:
        """Returns the micro-batch and the version from which step n counts.

        The end of a stream is a step without forwards; it counts from the micro-batch that would
        come next.
        """
        last = len(self.bounds) - 1 - (self.end is not None)
        m = min(n, last) * self.M
        return m, m // self.every

    def _spot(self, b: int, n: int) -> Spot:
        """Names a buffer in step n: as it was called before the step, else after it, else when it
        was new.
        """
        m0, v0 = self._base(n)
        spot = self.spots[n].get(b) or self.spots[n + 1].get(b) or self.buffers[b].spot
        if spot.copy is Copy.STALE:
            spot = spot._replace(copy=Copy.OWN)
        return spot.shifted(-m0, -v0)

    def _alive(self, n: int) -> list[tuple[Spot, int]]:
        """Lists what is in flight before step n, in the order of its names.

        That is what a later row touches, or what outlives every step. Swapped copies have no names
        in the table of spots, so they are found by the rows before and after the bound.
        """
        if self.end is not None and n == len(self.bounds) - 1:
            return list(self.end)
        named = self.spots[n]
        bound = self.bounds[n]
        if n == 0:
            return [(spot, b) for b, spot in sorted(named.items())]
        m0, v0 = self._base(n)
        alive = []
        for b, spot in named.items():
            if b in self.lasting or self._last.get(b, -1) >= bound:
                alive.append((spot.shifted(-m0, -v0), b))
        for b, first in self._first.items():
            if self.buffers[b].copy.is_swap and first < bound <= self._last[b]:
                spot = named.get(b, self.buffers[b].spot)
                alive.append((spot.shifted(-m0, -v0), b))
        return sorted(alive)

    def step(self, n: int) -> Step:
        """Cuts step n out; the last one of a stream that ends is its end."""
        m0, v0 = self._base(n)
        # The rows of step n, between two bounds.
        begin, end = self.bounds[n : n + 2]
        rows = self.rows[begin:end]
        before = self._alive(n)
        after = self._alive(n + 1)
        metrics = self.metrics[n]
        # Equal steps get equal numbers: what was there before by name, then as it is touched.
        numbered = dict.fromkeys(b for _, b in before)
        for row in rows:
            numbered |= dict.fromkeys((*row.reads, *row.writes))
        ids = {b: i for i, b in enumerate(numbered)}
        staying = {*metrics, *(b for _, b in after)}
        self._check(before, rows, staying)
        lowered = Lowered(
            rows=tuple(renumbered(freeing(rows, staying), ids, m0)),
            buffers=tuple(_renamed(self.buffers[b], self._spot(b, n)) for b in ids),
            persistent=len(before),
            final=tuple(ids[b] for _, b in after),
            metrics=tuple(ids[b] for b in metrics),
        )
        return Step(
            lowered,
            before=tuple(spot for spot, _ in before),
            after=tuple(spot for spot, _ in after),
            uses=tuple(use.moved(-m0, -v0) for use in self.uses[n]),
        )

    def _check(
        self,
        before: Sequence[tuple[Spot, int]],
        rows: Sequence[Row],
        staying: set[int],
    ) -> None:
        """Asserts that a step is whole: it reads only what exists, and keeps nothing that is never
        read.
        """
        begun = {b for _, b in before}
        read = {b for row in rows for b in row.reads}
        written = {b for row in rows for b in row.writes}
        assert read <= begun | written, "what a row reads is from before, or made here"
        assert begun <= read | written | staying, "what nobody touches any more was kept"


def dropping(drain: Step, last: Step) -> Step:
    """Makes a drain begin with all that a step leaves: versions that only later steps would have
    read are dropped.

        step leaves     w-1   w0   t0               buffers 0 1 2
        drain           DROP w-1   then its rows    buffers 1 2, and 3... that it makes itself

    Args:
        drain: the end of a stream, as if it had been known from the beginning that it comes.
        last: the step after which it comes, as if the stream went on for ever.

    >>> from jvpipe.ir.values import Value, ValueKind
    >>> old, new = (Value(ValueKind.PARAMETER, 0, version=v) for v in (-1, 0))
    >>> spots, buffers = (Spot(old, 0), Spot(new, 0)), (Buffer(old, 0, 4), Buffer(new, 0, 4))
    >>> last = Step(Lowered((), buffers, 2, (0, 1), ()), spots, spots, ())
    >>> drain = Step(Lowered((), buffers[1:], 1, (0,), ()), spots[1:], spots[1:], ())
    >>> [(str(row), row.frees) for row in dropping(drain, last).lowered.rows]
    [('DROP', (0,))]
    """
    old, inherited = drain.lowered, len(drain.before)
    at = {spot: b for b, spot in enumerate(drain.before)}
    left = zip(last.after, last.lowered.final, strict=True)
    missing = at.keys() - {*last.after}
    assert not missing, f"{missing} was left by no step"
    # The buffers are those that the step leaves, in its order, then those that the drain makes.
    buffers = [_renamed(last.lowered.buffers[b], spot) for spot, b in left]
    buffers += old.buffers[inherited:]
    unread = [i for i, spot in enumerate(last.after) if spot not in at]
    # From the numbers of the drain to the new ones.
    ids = {at[spot]: i for i, spot in enumerate(last.after) if spot in at}
    ids |= {b: b + len(unread) for b in range(inherited, len(old.buffers))}
    drops = []  # a row for each memory
    for memory in dict.fromkeys(buffers[i].memory for i in unread):
        here = tuple(i for i in unread if buffers[i].memory == memory)
        drops.append(
            Row(
                Kind.DROP,
                memory,
                NONE,
                NONE,
                NONE,
                here,
                (),
                here,
            )
        )
    lowered = Lowered(
        rows=(*drops, *renumbered(old.rows, ids)),
        buffers=tuple(buffers),
        persistent=len(last.after),
        final=tuple(ids[b] for b in old.final),
        metrics=tuple(ids[b] for b in old.metrics),
    )
    return Step(lowered, last.after, drain.after, drain.uses)


def _renamed(buffer: Buffer, spot: Spot) -> Buffer:
    return replace(
        buffer,
        value=spot.value,
        place=spot.place,
        copy=spot.copy,
    )
