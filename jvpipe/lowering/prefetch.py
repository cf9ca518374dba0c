"""Prefetching: state that lies on the host comes before the updates that read it, and goes back beside them.

`i<k>` fetches the state of the k-th update of a place (IN), `U<k>` runs it, `o<k>` copies what it wrote back there
(OUT), `f<k>` waits for that and frees it (FREE). The placer writes each update with its copies around it. Here they are
drawn apart, so that both directions of the link are used while a place holds no more than twice the largest state of an
update. As much is fetched before the last forward or backward of the place; later on what leaves makes room.

    placed       ... B7 i0 U0 o0 i1 U1 o1 i2 U2 o2 i3 U3 o3
    prefetched   i0 i1 B7 U0 o0 U1 o1 f0 i2 U2 o2 f1 i3 U3 o3 f2 f3
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jvpipe.ir.buffers import Buffer, Copy
from jvpipe.ir.fates import UPDATES_HELD
from jvpipe.ir.kinds import KINDS, Kind, Link
from jvpipe.ir.rows import Row

BEFORE, AT, AFTER = range(3)
Position = tuple[int, int, int]
"""A group, a row of it, and whether before, at or after it."""


@dataclass
class _Visit:
    """The copies of one update, whose program is the row `at`."""

    at: tuple[int, int]
    ins: list[Row]
    outs: list[Row] = field(default_factory=list)

    @property
    def fetched(self) -> set[int]:
        """What is brought to the place."""
        return {row.writes[0] for row in self.ins}

    @property
    def written(self) -> set[int]:
        """What leaves it."""
        return {row.reads[0] for row in self.outs}

    def frees(self) -> list[Row]:
        """What waits until all has left, and frees it."""
        return [
            replace(row, kind=Kind.FREE, reads=row.reads + row.writes, writes=())
            for row in self.outs
        ]


@dataclass
class _Round:
    """Updates of a place with none of its forwards or backwards between them; `anchor` is the group of the last one."""

    anchor: int | None
    visits: list[_Visit] = field(default_factory=list)

    def position(self, k: int) -> Position:
        """Where rows stand that follow an update; before all of them, behind which copies can hide, for -1."""
        if k >= 0:
            return (*self.visits[k].at, AFTER)
        return (*self.visits[0].at, BEFORE) if self.anchor is None else (self.anchor, 0, BEFORE)

    def copies(self, buffers: Sequence[Buffer]) -> Iterator[tuple[int, int, Row]]:
        """Yields each copy and each FREE with the update that it stands after, and the one that it is for.

        What the next update reads has to come, and waits for whatever leaves; what later ones read comes as far as
        there is room, and waits for nothing that has only begun to leave.
        """
        visits = self.visits
        room = UPDATES_HELD * max(
            sum(buffers[b].bytes for b in visit.fetched | visit.written) for visit in visits
        )
        coming = deque((k, row) for k, visit in enumerate(visits) for row in visit.ins)
        leaving = deque[tuple[int, Row]]()
        for k in range(-1, len(visits)):
            if k >= 0:
                yield from ((k, k, row) for row in visits[k].outs)
                leaving.extend((k, row) for row in visits[k].frees())
                fetched, written = visits[k].fetched, visits[k].written
                room += sum(buffers[b].bytes for b in fetched - written)
                room -= sum(buffers[b].bytes for b in written - fetched)
            while coming:
                of, row = coming[0]
                need = buffers[row.writes[0]].bytes
                while room < need and leaving and (of <= k + 1 or leaving[0][0] < k):
                    gone, free = leaving.popleft()
                    room += buffers[free.reads[0]].bytes
                    yield k, gone, free
                if room < need and of > k + 1:
                    break
                room -= need
                coming.popleft()
                yield k, of, row
        yield from ((len(visits) - 1, gone, free) for gone, free in leaving)


def prefetched(groups: Sequence[Sequence[Row]], buffers: Sequence[Buffer]) -> list[list[Row]]:
    """The rows of some groups, those that fetch state and bring it back drawn apart.

    Args:
        groups: rows that belong together, in the order of their dispatch; no copy leaves them.
        buffers: the table.

    >>> from jvpipe.ir.values import Value, ValueKind
    >>> value = Value(ValueKind.OPTIMIZER, 0, 0)
    >>> here, there = (Buffer(value, 0, 4, copy) for copy in (Copy.FETCHED, Copy.AWAY))
    >>> back, update = Row(Kind.B, 0, 0, 0, 7, (), ()), Row(Kind.U, 0, 0, 0, -1, (0,), (0,))
    >>> copies = Row(Kind.IN, 0, 0, 0, -1, (1,), (0,)), Row(Kind.OUT, 0, 0, 0, -1, (0,), (2,))
    >>> rows = prefetched([[back], [copies[0], update, copies[1]]], [here, there, there])
    >>> " ".join(str(row.kind) for group in rows for row in group)
    'IN B U OUT FREE'
    """
    rounds, moved = _rounds(groups, buffers)
    if not moved:
        return list(map(list, groups))
    made: dict[int, Position] = {}  # where each buffer is written
    for g, group in enumerate(groups):
        made |= {b: (g, i, AT) for i, row in enumerate(group) for b in row.writes}
    added: dict[Position, list[Row]] = {}
    for each in rounds:
        for visit in each.visits:
            made |= {b: (*visit.at, AFTER) for row in visit.outs for b in row.writes}
        for k, of, row in each.copies(buffers):
            at = each.position(k)
            if KINDS[row.kind].link is Link.FROM_HOST and made.get(row.reads[0], at) > at:
                at = (*each.visits[of].at, BEFORE)  # a layer has just moved
            added.setdefault(at, []).append(row)
    return [list(_with(added, g, group, moved)) for g, group in enumerate(groups)]


def _with(
    added: Mapping[Position, Sequence[Row]],
    g: int,
    group: Sequence[Row],
    moved: Collection[tuple[int, int]],
) -> Iterator[Row]:
    """Yields the rows of a group, with what is added, and without what is moved."""
    for i, row in enumerate(group):
        yield from added.get((g, i, BEFORE), ())
        if (g, i) not in moved:
            yield row
        yield from added.get((g, i, AFTER), ())


def _rounds(
    groups: Sequence[Sequence[Row]], buffers: Sequence[Buffer]
) -> tuple[list[_Round], set[tuple[int, int]]]:
    """The rounds of updates of all places, and the rows that are their copies."""
    used = {
        b
        for group in groups
        for row in group
        if _updates(row)
        for b in (*row.reads, *row.writes)
        if buffers[b].copy is Copy.FETCHED
    }
    rounds, moved = list[_Round](), set[tuple[int, int]]()
    newest, anchors = dict[int, _Round](), dict[int, int]()
    coming: dict[int, list[Row]] = {}
    for g, group in enumerate(groups):
        for i, row in enumerate(group):
            info, place = KINDS[row.kind], row.place
            if info.back is not None:
                anchors[place] = g
            elif info.link is Link.FROM_HOST and row.writes[0] in used:
                coming.setdefault(place, []).append(row)
                moved.add((g, i))
            elif info.link is Link.TO_HOST and row.reads[0] in used:
                newest[place].visits[-1].outs.append(row)
                moved.add((g, i))
            elif _updates(row) and not used.isdisjoint((*row.reads, *row.writes)):
                if place not in newest or newest[place].anchor != anchors.get(place):
                    newest[place] = _Round(anchors.get(place))
                    rounds.append(newest[place])
                newest[place].visits.append(_Visit((g, i), coming.pop(place, [])))
    return rounds, moved


def _updates(row: Row) -> bool:
    """Tells whether a row is of a program, and of no forward or backward."""
    return KINDS[row.kind].computes and KINDS[row.kind].back is None
