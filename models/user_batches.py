"""A user's stream of batches, whose position a run can save and find again."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

Tree = Any


class UserBatches:
    """A user's stream of batches, whose position can be saved and restored.

    A stream with the methods `get_state` and `set_state`, such as Grain's, has its own notion of a
    position. For any other stream, the position is the number of batches taken so far. A
    resumed run skips as many batches of a new stream, which must yield the same ones again.

    Args:
        called: the call that returned the stream, for messages.
        stream: an iterable of batches.

    >>> batches = UserBatches("batches", iter("abc"))
    >>> batches.set_state({"batches": 1})
    >>> next(batches), batches.get_state()
    ('b', {'batches': 2})
    """

    def __init__(self, called: str, stream: Any) -> None:
        try:
            self._iterator: Any = iter(stream)
        except TypeError as problem:
            kind = type(stream).__name__
            raise ValueError(
                f"{called} should give an iterator of batches, not {kind}"
            ) from problem
        self._called, self._taken = called, 0
        names = ("get_state", "set_state")
        self._keeps_place = all(hasattr(self._iterator, name) for name in names)

    def __iter__(self) -> "UserBatches":
        return self

    def __next__(self) -> Tree:
        try:
            batch = next(self._iterator)
        except StopIteration:
            cure = "let it go on without end (while True: ...), or train for fewer --steps"
            raise ValueError(f"{self._called} has come to its end: {cure}") from None
        self._taken += 1
        return batch

    def peek(self) -> Tree:
        """Returns the next batch without taking it: `next` will return the same batch."""
        # A stream with a position of its own is set back. In any other stream, the batch is put
        # back in front.
        before = self.get_state()
        batch = next(self)
        if self._keeps_place:
            self.set_state(before)
        else:
            self._iterator = chain([batch], self._iterator)
        self._taken -= 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the position in the stream, in values that JSON can hold; bytes become a text."""
        if not self._keeps_place:
            return {"batches": self._taken}
        place = self._iterator.get_state()
        if isinstance(place, bytes):
            return {"place": place.decode("latin-1"), "bytes": True}
        return {"place": place}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a position that `get_state` returned.

        Raises:
            ValueError: this stream has a position of its own and the saved position is a
                count, or the other way around.
        """
        saved = "without" if self._keeps_place else "with one"
        if ("place" in state) != self._keeps_place:
            keeps = "a place" if self._keeps_place else "no place"
            raise ValueError(
                f"{self._called} keeps {keeps} of its own, and the run was saved {saved}: "
                f"{dict(state)}"
            )
        if self._keeps_place:
            place = state["place"]
            self._iterator.set_state(place.encode("latin-1") if state.get("bytes") else place)
            return
        while self._taken < state["batches"]:
            next(self)
