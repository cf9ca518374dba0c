"""A wrapper of a user's stream of batches, whose position a run can save and restore."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

Tree = Any


class UserBatches:
    """A user's stream of batches, whose position can be saved and restored.

    If the stream has the methods `get_state` and `set_state`, as Grain's iterators do, its own
    state is the position. For any other stream, the position is the number of batches taken so far.
    A resumed run then opens a new stream, which must yield the same batches again, and skips the
    batches taken before. To go back, `set_state` opens the iterable (e.g. a list) again. This is
    impossible if the stream is an iterator.

    Args:
        called: the text of the call that returned the stream, for messages.
        stream: an iterable of batches.

    >>> batches = UserBatches("batches", iter("abc"))
    >>> batches.set_state({"batches": 1})
    >>> next(batches), batches.get_state()
    ('b', {'batches': 2})
    """

    def __init__(self, called: str, stream: Any) -> None:
        try:
            self._opened: Any = iter(stream)
        except TypeError as problem:
            kind = type(stream).__name__
            raise ValueError(
                f"{called} should return an iterator of batches, not {kind}"
            ) from problem
        self._iterator: Any = self._opened
        self._called, self._stream, self._taken = called, stream, 0
        names = ("get_state", "set_state")
        self._keeps_place = all(hasattr(self._iterator, name) for name in names)

    def __iter__(self) -> "UserBatches":
        return self

    def __next__(self) -> Tree:
        try:
            batch = next(self._iterator)
        except StopIteration:
            cure = "make it endless (while True: ...), or train for fewer --steps"
            raise ValueError(f"{self._called} has no more batches: {cure}") from None
        self._taken += 1
        return batch

    def peek(self) -> Tree:
        """Returns the next batch without taking it, so `next` will return the same batch."""
        # If the stream has its own position, it is set back. Otherwise, the batch is put in front.
        before = self.get_state()
        batch = next(self)
        if self._keeps_place:
            self.set_state(before)
        else:
            self._iterator = chain([batch], self._iterator)
        self._taken -= 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the position in the stream as a JSON object. Bytes are encoded as a text."""
        if not self._keeps_place:
            return {"batches": self._taken}
        place = self._iterator.get_state()
        if isinstance(place, bytes):
            return {"place": place.decode("latin-1"), "bytes": True}
        return {"place": place}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a position that `get_state` returned.

        Raises:
            ValueError: this stream has its own position and the saved position is a count, or vice
                versa; or the stream is an iterator that would have to go back.
        """
        saved = "without it" if self._keeps_place else "with one"
        if ("place" in state) != self._keeps_place:
            keeps = "its own position" if self._keeps_place else "no position of its own"
            raise ValueError(
                f"{self._called} has {keeps}, but the run was saved {saved} ({dict(state)}): give "
                "an iterator of the same kind"
            )
        if self._keeps_place:
            place = state["place"]
            self._iterator.set_state(place.encode("latin-1") if state.get("bytes") else place)
            return
        if state["batches"] < self._taken:
            self._reopen(state["batches"])
        while self._taken < state["batches"]:
            next(self)

    def _reopen(self, wanted: int) -> None:
        again = iter(self._stream)
        if again is self._opened:
            raise ValueError(
                f"{self._called} is at batch {self._taken} and cannot go back to {wanted}: give an "
                "iterator with get_state and set_state, or a list of batches"
            )
        self._iterator = self._opened = again
        self._taken = 0
