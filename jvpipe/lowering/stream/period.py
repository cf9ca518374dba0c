"""The period of a stream: the stream's rows are cut into steps, and each step has its own numbers.

In each step, micro-batches and versions count from the beginning of the step. This example has the
rows of a stage, first with the numbers of the stream, then with the numbers of each step:

    stream     F0 F1 B0 U0 | F2 B1  U1 F3 B2 U2 | F4 B3  U3 F5 B4 U4 | ...
    steps      F0 F1 B0 U  | F0 B-1 U  F1 B0 U  | F0 B-1 U  F1 B0 U  | ...

A step begins with the buffers that the step before it left in flight. Buffers get new numbers in
each step, too: first those in flight, in the order of their names, then the others in the order in
which rows touch them. So two steps that do the same compare equal. Only steps that differ are
kept: two in this drawing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jvpipe.ir.buffers import Buffer, Copy, Lowered, Spot
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import Row
from jvpipe.ir.use import Use
from jvpipe.ir.values import NEVER, NONE
from jvpipe.lowering.liveness import freeing, last_touches, renumbered


@dataclass(frozen=True)
class StreamStep:
    """A step of a stream.

    `lowered` has its rows. Its metrics are those of the step, followed by the losses of the
    micro-batches. `before` and `after` are the names of the buffers that exist before and after the
    step. `uses` are the versions of weights that its layers read or made.
    """

    lowered: Lowered
    before: tuple[Spot, ...]
    after: tuple[Spot, ...]
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class Unrolled:
    """The rows of some steps of a stream, with the buffers that they touch.

    Attributes:
        rows: the rows of all steps.
        buffers: the table of buffers.
        bounds: the rows at which steps begin, then the number of all rows. Step n has the rows from
            `bounds[n]` up to but not including `bounds[n + 1]`.
        spots: for each bound, the names that buffers have there.
        uses: for each step, the versions that its layers read or made.
        metrics: for each step, the buffers of its metrics.
        lasting: the buffers that outlive every step.
        M: the number of micro-batches of a step.
        every: the number of micro-batches of an update.
        end: if the last step drains the stream, the buffers that are left, with their names.
    """

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
        """For each buffer, the number of the first row that touches it."""
        first: dict[int, int] = {}
        for i, row in enumerate(self.rows):
            for b in (*row.reads, *row.writes):
                first.setdefault(b, i)
        return first

    @cached_property
    def _last(self) -> dict[int, int]:
        """For each buffer, the number of the last row that touches it."""
        return last_touches(self.rows)

    def _shift(self, n: int) -> tuple[int, int]:
        """Returns the differences between step n's own numbers and those of the stream.

        They are added to the stream's micro-batches and versions. The drain of a stream is a step
        without forwards. It counts from the micro-batch that would come next.
        """
        last = len(self.bounds) - 1 - (self.end is not None)
        m = min(n, last) * self.M
        return -m, -(m // self.every)

    def _spot(self, b: int, n: int) -> Spot:
        """Names a buffer in step n, with the numbers of the step.

        The result is the buffer's name before the step if it has one there, otherwise its name
        after the step, and otherwise its name in the table.
        """
        before = self.spots[n].get(b)
        after = self.spots[n + 1].get(b)
        spot = before or after or self.buffers[b].spot
        if spot.copy is Copy.STALE:
            spot = spot._replace(copy=Copy.OWN)
        return spot.shifted(*self._shift(n))

    def _alive(self, n: int) -> list[tuple[Spot, int]]:
        """Lists the buffers in flight before step n, with their names, in the order of the names.

        A buffer is in flight if a later row touches it, or if it outlives every step. Copies that
        swaps have made are not in `spots`. They are in flight if rows before and after the bound
        touch them.
        """
        if self.end is not None and n == len(self.bounds) - 1:
            return list(self.end)
        named = self.spots[n]
        bound = self.bounds[n]
        if n == 0:
            return [(spot, b) for b, spot in sorted(named.items())]
        lasting = self.lasting
        alive = {b for b in named if b in lasting or self._last.get(b, -1) >= bound}
        for b, first in self._first.items():
            if self.buffers[b].copy.is_swap and first < bound <= self._last[b]:
                alive.add(b)
        shift = self._shift(n)
        names = {b: named.get(b, self.buffers[b].spot) for b in alive}
        return sorted((spot.shifted(*shift), b) for b, spot in names.items())

    def step(self, n: int) -> StreamStep:
        """Cuts out step n. If the stream ends, the last step is its drain."""
        shift = self._shift(n)
        begin, end = self.bounds[n : n + 2]
        rows = self.rows[begin:end]
        before = self._alive(n)
        after = self._alive(n + 1)
        metrics = self.metrics[n]
        # Equal steps must get equal numbers. So buffers in flight are numbered in the order of
        # their names, and the others in the order in which rows touch them.
        numbered = dict.fromkeys(b for _, b in before)
        for row in rows:
            numbered |= dict.fromkeys((*row.reads, *row.writes))
        ids = {b: i for i, b in enumerate(numbered)}
        staying = {*metrics, *(b for _, b in after)}
        self._check(before, rows, staying)
        microbatches, _ = shift
        own = [_shifted(row, microbatches) for row in freeing(rows, staying)]
        buffers = [_renamed(self.buffers[b], self._spot(b, n)) for b in ids]
        lowered = Lowered(
            rows=tuple(renumbered(own, ids)),
            buffers=tuple(buffers),
            persistent=len(before),
            final=tuple(ids[b] for _, b in after),
            metrics=tuple(ids[b] for b in metrics),
        )
        return StreamStep(
            lowered,
            before=tuple(spot for spot, _ in before),
            after=tuple(spot for spot, _ in after),
            uses=tuple(use.moved(*shift) for use in self.uses[n]),
        )

    def _check(
        self,
        before: Sequence[tuple[Spot, int]],
        rows: Sequence[Row],
        staying: set[int],
    ) -> None:
        """Asserts that a step reads only what exists, and needs all that it begins with.

        Args:
            before: the buffers that exist before the step, with their names.
            rows: the rows of the step.
            staying: the buffers that exist after the step.
        """
        begun = {b for _, b in before}
        read = {b for row in rows for b in row.reads}
        written = {b for row in rows for b in row.writes}
        assert read <= begun | written, "a row reads only buffers that exist"
        assert begun <= read | written | staying, "a step begins only with needed buffers"


def dropping(drain: StreamStep, last: StreamStep) -> StreamStep:
    """Returns a drain that begins with all buffers that the last step leaves.

    The last step was lowered as if the stream went on, so it also leaves versions that only later
    steps would have read. The drain was lowered without these versions. It now drops them first:

        last step leaves    w-1   w0   t0               buffers 0, 1 and 2
        drain               DROP w-1   then its rows    buffers 1 and 2; those that it makes: 3 ...

    Args:
        drain: the step that drains the stream, lowered from a stream that ends with it.
        last: the step before the drain, lowered from a stream that goes on.

    >>> from jvpipe.ir.values import Value, ValueKind
    >>> old, new = (Value(ValueKind.PARAMETER, 0, version=v) for v in (-1, 0))
    >>> spots, buffers = (Spot(old, 0), Spot(new, 0)), (Buffer(old, 0, 4), Buffer(new, 0, 4))
    >>> last = StreamStep(Lowered((), buffers, 2, (0, 1), ()), spots, spots, ())
    >>> drain = StreamStep(Lowered((), buffers[1:], 1, (0,), ()), spots[1:], spots[1:], ())
    >>> [(str(row), row.frees) for row in dropping(drain, last).lowered.rows]
    [('DROP', (0,))]
    """
    old, inherited = drain.lowered, len(drain.before)
    at = {spot: b for b, spot in enumerate(drain.before)}
    left = zip(last.after, last.lowered.final, strict=True)
    missing = at.keys() - {*last.after}
    assert not missing, f"{missing} was left by no step"
    # First come the buffers that the last step leaves, in that step's order, then those that the
    # drain makes.
    buffers = [_renamed(last.lowered.buffers[b], spot) for spot, b in left]
    buffers += old.buffers[inherited:]
    unread = [i for i, spot in enumerate(last.after) if spot not in at]
    # The new number of each of the drain's buffers.
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
                NEVER,
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
    return StreamStep(lowered, last.after, drain.after, drain.uses)


def _shifted(row: Row, microbatches: int) -> Row:
    """Returns a row whose micro-batch has a number that is larger by `microbatches`.

    A row without a micro-batch gets `NEVER`, because micro-batches of earlier steps are below 0.
    """
    m = row.microbatch
    return replace(row, microbatch=NEVER if m == NONE else m + microbatches)


def _renamed(buffer: Buffer, spot: Spot) -> Buffer:
    """Returns a buffer with another name."""
    return replace(
        buffer,
        value=spot.value,
        place=spot.place,
        copy=spot.copy,
    )
