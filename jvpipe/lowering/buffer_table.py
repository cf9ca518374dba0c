"""The buffer table while a step is lowered: each buffer under the name that it has by now.

A buffer's number is for good, its name (a `Spot`) is not: an update in place turns version 3 of a
parameter into version 4, and what has moved away is stale. The table keeps names and numbers in
step, both ways:

    ids         name -> number      of all buffers that may be asked for again
    spots       number -> name      of every buffer
    current     (value, place) -> the buffer that a program there reads
"""

from dataclasses import replace

from jvpipe.ir.buffers import Buffer, Copy, Spot
from jvpipe.ir.values import Value


class BufferTable:
    """The buffers of a step. `places` are all places that may hold one, in the order in which they
    became known.

    >>> from jvpipe.ir.values import ValueKind
    >>> table, old = BufferTable(), Value(ValueKind.PARAMETER, 0, version=3)
    >>> table.buffer(old, place=1, size=4)
    0
    >>> new = old._replace(version=4)
    >>> table.rename(0, Spot(new, 1))
    >>> (old, 1) in table.current, table.current[new, 1], str(table.buffers[0].value)
    (False, 0, 'parameter 0 version 4')
    """

    def __init__(self) -> None:
        self.places: dict[int, None] = {}
        self.buffers: list[Buffer] = []
        self.spots: list[Spot] = []
        self.ids: dict[Spot, int] = {}
        self.current: dict[tuple[Value, int], int] = {}

    def buffer(
        self,
        value: Value,
        place: int,
        size: int,
        copy: Copy = Copy.OWN,
    ) -> int:
        """Returns the id of a copy of a value at a place, made if there is none yet.

        Args:
            value: that it is a copy of.
            place: where it lies.
            size: in bytes.
            copy: which of the copies there.
        """
        spot = Spot(value, place, copy)
        if spot not in self.ids:
            self.ids[spot] = len(self.buffers)
            self.buffers.append(Buffer(value, place, size, copy))
            self.spots.append(spot)
        if copy.is_read:
            self.current[value, place] = self.ids[spot]
        return self.ids[spot]

    def fresh(
        self,
        value: Value,
        place: int,
        size: int,
        copy: Copy,
    ) -> int:
        """Returns the id of a new copy of a value at a place, which takes the name of an older one.

        Args:
            value: that it is a copy of.
            place: where it lies.
            size: in bytes.
            copy: which of the copies there.
        """
        self.ids.pop(Spot(value, place, copy), None)
        return self.buffer(value, place, size, copy)

    def rename(self, b: int, spot: Spot) -> None:
        """Gives a buffer another name; what else had that name has lost it.

        Args:
            b: the buffer.
            spot: its new name, at the same place.
        """
        old = self.spots[b]
        # Another buffer may have taken the old name since: then that one keeps it.
        if self.ids.get(old) == b:
            del self.ids[old]
        if self.current.get((old.value, old.place)) == b:
            del self.current[old.value, old.place]
        self.ids[spot] = b
        self.spots[b] = spot
        self.buffers[b] = replace(self.buffers[b], value=spot.value, copy=spot.copy)
        if spot.copy is Copy.OWN:
            self.current[spot.value, spot.place] = b

    def leave(self, b: int) -> None:
        """Marks what is left of a value that has moved: nobody reads it there."""
        spot = self.spots[b]
        if spot.copy is not Copy.AWAY:
            self.rename(b, spot._replace(copy=Copy.STALE))
            return
        self.ids.pop(spot, None)
        self.current.pop((spot.value, spot.place), None)

    def forget(self, spot: Spot) -> None:
        """Takes a name out of the table; its buffer stays."""
        b = self.ids.pop(spot)
        if self.current.get((spot.value, spot.place)) == b:
            del self.current[spot.value, spot.place]

    def holder(self, value: Value) -> int | None:
        """Returns a place that holds a value, if there is one."""
        for place in self.places:
            if (value, place) in self.current:
                return place
        return None
