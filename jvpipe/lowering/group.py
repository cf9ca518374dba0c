"""Grouping: rows of consecutive layers of a task become one row, which one program runs.

    rows of single layers                             rows after grouping
    1F2[layer 3]  1F2[layer 4]  1SEND2                1F2[layers 3 to 4]  1SEND2
    1R2[layer 4]  1B2[layer 4]  1B2[layer 3]          1B2[layers 4 to 3]
    1F2[layer 3]  1SEND2  FEED  1F2[layer 4]          FEED  1F2[layers 3 to 4]  1SEND2

1F2 is the forward of micro-batch 2 on stage 1. If a buffer is made, read and freed within a group,
it is no longer a buffer, but temporary memory of the group's program. Rows that feed the batch and
rows that make fresh accumulators go before the group. Copies of the group's results to other places
go after it. Any other row between the layers ends the group.

This is the last pass of lowering, and no earlier pass knows about groups. Planning, migration,
checkpoints and measurements still work on layers. Grouping does not change the order in which
layers run.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jvpipe.ir.buffers import Lowered
from jvpipe.ir.kinds import KINDS, Grouped, Kind
from jvpipe.ir.rows import GroupRun, Row
from jvpipe.lowering.liveness import freeing


def grouped(lowered: Lowered, joins: Callable[[Row], bool] = lambda row: True) -> Lowered:
    """Returns a step in which consecutive layers of a task are one row.

    Args:
        lowered: the rows of a step that one process runs.
        joins: tells whether a row may share a program with others.

    >>> from jvpipe.ir.buffers import Buffer
    >>> from jvpipe.ir.values import Value, ValueKind
    >>> edges = [Buffer(Value(ValueKind.TENSOR, i, microbatch=0), 0, 4) for i in range(3)]
    >>> rows = Row(Kind.F, 0, 0, 0, 0, (0,), (1,)), Row(Kind.F, 0, 0, 1, 0, (1,), (2,), (1,))
    >>> (row,) = grouped(Lowered(rows, tuple(edges), 1, (0,), (2,))).rows
    >>> print(row, row.reads, row.writes)
    0F0[layers 0 to 1] (0,) (2,)
    """
    rows = list(_gathered(lowered.rows, joins))
    ended = {b for row in lowered.rows for b in row.frees}
    touched: Counter[int] = Counter()
    for row in rows:
        touched.update({*row.reads, *row.writes})
    assert ended <= touched.keys(), "every freed buffer is read or written"
    # A buffer that ends, and that only one row touches, is not needed outside that row.
    passing = {b for b in ended if touched[b] == 1}
    made_within = {b for b in passing if b >= lowered.persistent}
    lasting = frozenset(range(len(lowered.buffers))) - ended
    # A group touches fewer buffers than its parts, so each buffer's last row is looked up again.
    bare = [replace(_without(row, made_within), frees=()) for row in rows]
    return replace(lowered, rows=tuple(freeing(bare, lasting)))


def _without(row: Row, made_within: set[int]) -> Row:
    """Returns a row; if it is a group, its writes lose the buffers that are made within it."""
    if len(row.parts) == 1:
        return row
    return replace(row, writes=tuple(b for b in row.writes if b not in made_within))


class _Key(NamedTuple):
    """The properties that all rows of a group share."""

    stage: int
    microbatch: int
    kind: Kind


@dataclass
class _Group:
    """A group that rows may still join: its parts, and the copies of results that go after it."""

    key: _Key
    parts: list[Row] = field(default_factory=list)
    copies: list[Row] = field(default_factory=list)

    def takes(self, row: Row, key: _Key) -> bool:
        """Tells whether a row can be the group's next part.

        The row would run before the group's copies. So the row must not write a buffer that one
        of the copies reads or writes.
        """
        copied: set[int] = set()
        for copy in self.copies:
            copied.update(copy.reads, copy.writes)
        return key == self.key and copied.isdisjoint(row.writes)

    def precedes(self, row: Row) -> bool:
        """Tells whether the group has to run before a row of another place.

        It has to if the row touches a buffer that the group writes, or writes a buffer that the
        group reads. If both only read a buffer, their order is free.
        """
        for mine in (*self.parts, *self.copies):
            if not {*row.reads, *row.writes}.isdisjoint(mine.writes):
                return True
            if not set(row.writes).isdisjoint(mine.reads):
                return True
        return False

    def rows(self) -> Iterator[Row]:
        """Yields the group's row, and then the copies that go after it."""
        if len(self.parts) > 1:
            yield _one(self.parts, self.key.kind)
        else:
            yield self.parts[0]
        yield from self.copies


def _one(parts: Sequence[Row], kind: Kind) -> Row:
    """Makes one row of several parts.

    The buffers that the row overwrites come first among its writes, in the order of its reads. JAX
    goes through the results and lets each result overwrite the next suitable input. In this order,
    that input is the buffer that is meant for the result.
    """
    # A buffer that an earlier part has written does not come from outside the group.
    written: set[int] = set()
    reads: dict[int, None] = {}
    for part in parts:
        reads |= dict.fromkeys(b for b in part.reads if b not in written)
        written.update(part.writes)
    writes = dict.fromkeys(b for b in reads if b in written)
    for part in parts:
        writes |= dict.fromkeys(part.writes)
    run = GroupRun(tuple(parts))
    return replace(
        parts[0],
        kind=kind,
        reads=tuple(reads),
        writes=tuple(writes),
        run=run,
    )


def _gathered(rows: Sequence[Row], joins: Callable[[Row], bool]) -> Iterator[Row]:
    """Yields groups, and the rows around them.

    At any time each place has at most one group that rows may still join.
    """
    groups: dict[int, _Group] = {}  # by place
    for row, kind in zip(rows, _kinds(rows), strict=True):
        here = row.place
        key = _Key(row.stage, row.microbatch, kind)
        for place, group in tuple(groups.items()):
            is_other_task = group.key[:2] != key[:2]
            if is_other_task or (place != here and group.precedes(row)):
                yield from groups.pop(place).rows()
        group = groups.get(here)
        role = KINDS[row.kind].grouped
        if KINDS[kind].grouped is Grouped.PART and joins(row):
            if group and group.takes(row, key):
                group.parts.append(row)
                continue
            groups[here] = _Group(key, [row])
        elif group and role is Grouped.BEFORE:
            yield row
            continue
        # A copy to another process has a `run`, and ends the group.
        elif group and role is Grouped.AFTER and row.run is None:
            group.copies.append(row)
            continue
        else:
            groups.pop(here, None)
        if group:
            yield from group.rows()
        if here not in groups:
            yield row
    for group in groups.values():
        yield from group.rows()


def _kinds(rows: Sequence[Row]) -> list[Kind]:
    """Returns, for each row, the kind of the group that it would be part of.

    A forward that runs again (R) joins the group of the next part at its place, and gets the kind
    of that part. Any other row has its own kind.
    """
    kinds: list[Kind] = []
    following: dict[int, Kind] = {}  # by place: the kind of the next part of a group
    for row in reversed(rows):
        role = KINDS[row.kind].grouped
        if role is Grouped.PART:
            following[row.place] = row.kind
        with_next = role is Grouped.WITH_NEXT
        kinds.append(following.get(row.place, row.kind) if with_next else row.kind)
    return kinds[::-1]
