"""Prefetching: moves the copies of optimizer state from and to the host, so that they overlap work.

A place (a device) runs one update for each of its layers:

    i<k>   starts to fetch the optimizer state of update k from the host (IN)
    U<k>   runs update k
    o<k>   starts to copy the new state back to the host (OUT)
    f<k>   waits for that copy, and frees the state on the device (FREE)

B7 is the last backward of the place. Rows run from left to right:

    placed       ... B7 i0 U0 o0 i1 U1 o1 i2 U2 o2 i3 U3 o3
    prefetched   i0 i1 B7 U0 o0 U1 o1 f0 i2 U2 o2 f1 i3 U3 o3 f2 f3

The placer writes each update between its own copies. This pass moves the copies, so that both
directions of the link work at the same time. A place holds at most `UPDATES_HELD` (two) times the
state of its largest update. Fetches that fit into this bound start before the place's last forward
or backward. Each later fetch waits until enough state has left the place.

A fetch must stay after the row that puts the state on the host, and before its update. Within these
bounds its position affects only time and memory.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jvpipe.ir.buffers import Buffer, Copy
from jvpipe.ir.fates import UPDATES_HELD
from jvpipe.ir.kinds import KINDS, CopyLink, Kind
from jvpipe.ir.rows import Row

BEFORE, AT, AFTER = range(3)
Position = tuple[int, int, int]
"""A position among rows: the numbers of a list of rows and of a row in it; BEFORE, AT or AFTER."""


class _Copy(NamedTuple):
    """A row that copies or frees state.

    The row copies or frees the state of update number `update` of a `_Round`. It stands after
    update number `after` of the round; if `after` is -1, before all updates.
    """

    after: int
    update: int
    row: Row


@dataclass
class _Visit:
    """An update with its copies. `at` is where it runs: the numbers of the group and of the row."""

    at: tuple[int, int]
    ins: list[Row]
    outs: list[Row] = field(default_factory=list)

    @property
    def fetched(self) -> set[int]:
        """The buffers that the update's copies bring to the place."""
        return {row.writes[0] for row in self.ins}

    @property
    def written(self) -> set[int]:
        """The buffers that are copied to the host after the update."""
        return {row.reads[0] for row in self.outs}

    def frees(self) -> list[Row]:
        """Makes the rows that wait for the copies to the host, and then free the device's."""
        frees = []
        for row in self.outs:
            reads = row.reads + row.writes
            frees.append(replace(row, kind=Kind.FREE, reads=reads, writes=()))
        return frees


@dataclass
class _Round:
    """The updates of a place between two of its forwards or backwards.

    `anchor` is the group with the last forward or backward before them, if there is one.
    """

    anchor: int | None
    visits: list[_Visit] = field(default_factory=list)

    def position(self, k: int) -> Position:
        """Returns the position of rows that follow update k.

        If k is -1, the rows precede all updates. They even precede the last forward or backward,
        which then runs during their copies.
        """
        if k >= 0:
            return (*self.visits[k].at, AFTER)
        if self.anchor is None:
            return (*self.visits[0].at, BEFORE)
        return (self.anchor, 0, BEFORE)

    def copies(self, buffers: Sequence[Buffer]) -> Iterator[_Copy]:
        """Yields each copy and each FREE, in the order of their dispatch.

        In the code, `room` is the number of bytes that the place may still take. In total, the
        place may hold `UPDATES_HELD` times the state of its largest update. If a fetch lacks room,
        FREE rows wait until older state has left:

            state of the next update    must come, so it waits for any state that leaves
            state of a later update     waits only for the state of updates before the last one that
                                        ran, because the last one's has only begun to leave

        The next update's state always fits once all leaving state has left: state comes in the
        order of updates, so the place then holds only parts of that state.

        Args:
            buffers: the table of buffers.
        """
        visits = self.visits

        def total(ids: Collection[int]) -> int:
            return sum(buffers[b].bytes for b in ids)

        room = UPDATES_HELD * max(total(visit.fetched | visit.written) for visit in visits)
        coming: deque[tuple[int, Row]] = deque()
        for k, visit in enumerate(visits):
            coming.extend((k, row) for row in visit.ins)
        leaving: deque[tuple[int, Row]] = deque()
        for k in range(-1, len(visits)):
            if k >= 0:
                visit = visits[k]
                for row in visit.outs:
                    yield _Copy(k, k, row)
                leaving.extend((k, row) for row in visit.frees())
                # Fetched buffers that the update only reads end with it. Buffers that it makes take
                # room. Buffers that it overwrites stay.
                room += total(visit.fetched - visit.written)
                room -= total(visit.written - visit.fetched)
            while coming:
                update, row = coming[0]
                is_next = update <= k + 1
                # A fetch writes one buffer, on the device.
                need = buffers[row.writes[0]].bytes
                while room < need and leaving and (is_next or leaving[0][0] < k):
                    left, free = leaving.popleft()
                    room += buffers[free.reads[0]].bytes
                    yield _Copy(k, left, free)
                if room < need and not is_next:
                    break
                room -= need
                coming.popleft()
                yield _Copy(k, update, row)
        for left, free in leaving:
            yield _Copy(len(visits) - 1, left, free)


def prefetched(groups: Sequence[Sequence[Row]], buffers: Sequence[Buffer]) -> list[list[Row]]:
    """Returns the rows of some groups, with the copies of optimizer state spread out.

    Args:
        groups: lists of rows that belong together, in the order of their dispatch. The copies
            of an update stand in these groups, and move only among them.
        buffers: the table of buffers.

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
    written: dict[int, Position] = {}  # by buffer: the position of the row that makes it
    for g, group in enumerate(groups):
        for i, row in enumerate(group):
            written |= dict.fromkeys(row.writes, (g, i, AT))
    added: dict[Position, list[Row]] = {}
    for updates in rounds:
        for visit in updates.visits:
            for row in visit.outs:
                written |= dict.fromkeys(row.writes, (*visit.at, AFTER))
        for copy in updates.copies(buffers):
            at = updates.position(copy.after)
            row = copy.row
            # The state of a layer that has just moved is fetched only after it has reached its new
            # host.
            is_fetch = KINDS[row.kind].link is CopyLink.FROM_HOST
            if is_fetch and written.get(row.reads[0], at) > at:
                at = (*updates.visits[copy.update].at, BEFORE)
            added.setdefault(at, []).append(row)
    return [list(_with(added, g, group, moved)) for g, group in enumerate(groups)]


def _with(
    added: Mapping[Position, Sequence[Row]],
    g: int,
    group: Sequence[Row],
    moved: Collection[tuple[int, int]],
) -> Iterator[Row]:
    """Yields the rows of a group, with the rows added there and without the rows moved away.

    Args:
        added: the rows to add, by their positions.
        g: the number of the group.
        group: the rows of the group.
        moved: the rows that are moved away, each as the number of its group and of the row in it.
    """
    for i, row in enumerate(group):
        yield from added.get((g, i, BEFORE), ())
        if (g, i) not in moved:
            yield row
        yield from added.get((g, i, AFTER), ())


def _rounds(
    groups: Sequence[Sequence[Row]],
    buffers: Sequence[Buffer],
) -> tuple[list[_Round], set[tuple[int, int]]]:
    """Finds the rounds of updates of all places, and the positions of the rows that copy for them.

    The placer has written each update as IN... U OUT..., all at one place. So a fetch to a place
    belongs to the next update there, and a copy to the host belongs to the update before it.
    """
    in_use: set[int] = set()  # the fetched buffers that updates read or write
    for group in groups:
        for row in group:
            if _is_update(row):
                touched = (*row.reads, *row.writes)
                in_use.update(b for b in touched if buffers[b].copy is Copy.FETCHED)
    rounds: list[_Round] = []
    moved: set[tuple[int, int]] = set()
    newest: dict[int, _Round] = {}  # by place
    anchors: dict[int, int] = {}  # by place: the group of its last forward or backward
    coming: dict[int, list[Row]] = {}  # by place: the fetches for its next update
    for g, group in enumerate(groups):
        for i, row in enumerate(group):
            info = KINDS[row.kind]
            place = row.place
            if info.back is not None:
                anchors[place] = g
            elif info.link is CopyLink.FROM_HOST and row.writes[0] in in_use:
                coming.setdefault(place, []).append(row)
                moved.add((g, i))
            elif info.link is CopyLink.TO_HOST and row.reads[0] in in_use:
                newest[place].visits[-1].outs.append(row)
                moved.add((g, i))
            elif _is_update(row) and not in_use.isdisjoint((*row.reads, *row.writes)):
                anchor = anchors.get(place)
                if place not in newest or newest[place].anchor != anchor:
                    newest[place] = _Round(anchor)
                    rounds.append(newest[place])
                visit = _Visit((g, i), coming.pop(place, []))
                newest[place].visits.append(visit)
    return rounds, moved


def _is_update(row: Row) -> bool:
    """Tells whether a row runs an update, or any other program except a forward or backward."""
    info = KINDS[row.kind]
    return info.computes and info.back is None
