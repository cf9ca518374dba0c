"""Prefetching: state that lies on the host comes before the updates that read it, and goes back beside them.

`i<k>` fetches the state of the k-th update of a place (IN), `U<k>` runs it, `o<k>` copies what it wrote back there
(OUT), `f<k>` waits for that and frees it (FREE). The placer writes each update with its copies around it. Here they are
drawn apart, so that both directions of the link are used while a place holds the state of two updates at most; the
first two are fetched before the last forward or backward of the place.

    placed       ... B7 i0 U0 o0 i1 U1 o1 i2 U2 o2 i3 U3 o3
    prefetched   i0 i1 B7 U0 o0 U1 o1 f0 i2 U2 o2 f1 i3 U3 o3 f2 f3
"""

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

    def positions(self, k: int) -> Position:
        """Where what the k-th update reads is fetched: once there is room for it."""
        if k < UPDATES_HELD:
            return (*self.visits[0].at, BEFORE) if self.anchor is None else (self.anchor, 0, BEFORE)
        return (*self.visits[k - 1].at, AFTER)


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
        for k, visit in enumerate(each.visits):
            made |= {b: (*visit.at, AFTER) for row in visit.outs for b in row.writes}
            wanted = each.positions(k)
            ready = all(made.get(b, wanted) <= wanted for row in visit.ins for b in row.reads)
            added.setdefault(wanted if ready else (*visit.at, BEFORE), []).extend(visit.ins)
            last = k + 1 == len(each.visits)
            left = each.visits[
                max(0, k + 1 - UPDATES_HELD) : k + 1 if last else k + 2 - UPDATES_HELD
            ]
            frees = [row for gone in left for row in gone.frees()]
            added.setdefault((*visit.at, AFTER), []).extend([*visit.outs, *frees])
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
