"""The buffer table of a step that is being lowered: the number and the current name of each buffer.

A buffer has a number, which never changes, and a name, which may change. The name is a `Spot`: a
value, a place, and which of the value's copies it is. Names change in two ways. An update in place
turns version 3 of a parameter into version 4. A value that moves leaves its old buffer behind; the
old buffer is renamed to the copy STALE, so that no program reads it. Three mappings tie numbers to
names:

    ids         name -> number              for the buffers that can be found by name
    spots       number -> name              for every buffer
    current     (value, place) -> number    for the copy that a program at the place reads
"""

from dataclasses import replace

from jvpipe.ir.buffers import Buffer, Copy, Spot
from jvpipe.ir.values import Value


class BufferTable:
    """The buffers of a step, with their names.

    `places` are the places that may hold a buffer, in the order in which plans named them. If
    several places hold a value, `holder` returns the first of them.

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
        """Returns the number of the buffer for a copy of a value; makes a missing buffer.

        Args:
            value: the value.
            place: where the copy lies.
            size: the bytes of the copy.
            copy: which of the value's copies at the place.
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
        """Makes a new buffer for a copy of a value at a place, and returns its number.

        An older buffer of the same name loses the name.

        Args:
            value: the value.
            place: where the copy lies.
            size: the bytes of the copy.
            copy: which of the value's copies at the place.
        """
        self.ids.pop(Spot(value, place, copy), None)
        return self.buffer(value, place, size, copy)

    def rename(self, b: int, spot: Spot) -> None:
        """Gives a buffer a new name. Another buffer that has this name loses it.

        Args:
            b: the buffer.
            spot: its new name, at the same place.
        """
        self.forget(b)
        self.ids[spot] = b
        self.spots[b] = spot
        self.buffers[b] = replace(self.buffers[b], value=spot.value, copy=spot.copy)
        if spot.copy is Copy.OWN:
            self.current[spot.value, spot.place] = b

    def leave(self, b: int) -> None:
        """Marks the buffer that a moved value leaves behind, so that no program reads it."""
        spot = self.spots[b]
        if spot.copy is not Copy.AWAY:
            self.rename(b, spot._replace(copy=Copy.STALE))
            return
        # A stale buffer is counted as memory of the device. This buffer lies on the host, so it
        # does not become stale, but loses its name.
        self.forget(b)

    def forget(self, b: int) -> None:
        """Removes a buffer's name. The buffer remains, but can no longer be found by name."""
        spot = self.spots[b]
        # If another buffer has the name by now, that buffer keeps the name.
        if self.ids.get(spot) == b:
            del self.ids[spot]
        if self.current.get((spot.value, spot.place)) == b:
            del self.current[spot.value, spot.place]

    def holder(self, value: Value) -> int | None:
        """Returns a place that holds a value, or None if no place does."""
        for place in self.places:
            if (value, place) in self.current:
                return place
        return None
