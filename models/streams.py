"""Streamed texts, which are never all in memory, with a position from which a run can resume."""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer

from jvpipe.models.batches import Transform
from jvpipe.models.tokens import marks_of
from jvpipe.models.workload import Batches

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Head:
    """The beginning of a stream: the rows to hold out, and the `first` rows after them."""

    held_out: tuple[Row, ...]
    first: tuple[Row, ...]

    @property
    def digest(self) -> str:
        """The SHA-256 digest of all these rows."""
        rows = json.dumps([*self.held_out, *self.first], sort_keys=True, default=str)
        return hashlib.sha256(rows.encode()).hexdigest()


def read_head(rows: Callable[[], Any], name: str, characters: int = 2**20, one_in: int = 8) -> Head:
    """Reads the beginning of a stream.

    Args:
        rows: a function that opens the stream at its beginning.
        name: the name of the stream, for messages.
        characters: after this many characters, reading stops, but not before two rows.
        one_in: one character in `one_in` is held out, rounded up to whole rows.

    Raises:
        ValueError: the stream has fewer than two rows.
    """
    head: list[Row] = []
    ends: list[int] = [0]
    for row in rows():
        head.append(row)
        ends.append(ends[-1] + len(json.dumps(row, default=str)))
        if ends[-1] >= characters and len(head) > 1:
            break
    if len(head) < 2:
        raise ValueError(
            f"'{name}' has {len(head)} rows: give at least two, because one of them is held out"
        )
    # `count` is the smallest number of rows that together have 1 / `one_in` of the characters. All
    # rows together have enough, so `next` finds a number. One row must be left to train on.
    enough = (i for i, end in enumerate(ends) if i and end * one_in >= ends[-1])
    count = min(next(enough), len(head) - 1)
    return Head(tuple(head[:count]), tuple(head[count:]))


class Rows(grain.IterDataset):
    """The rows of a stream without the held-out rows at its beginning, repeated endlessly.

    Args:
        rows: a function that opens the stream as a Hugging Face data set, which has `skip`,
            `state_dict` and `load_state_dict`.
        skipped: the number of held-out rows.
    """

    def __init__(self, rows: Callable[[], Any], skipped: int) -> None:
        super().__init__()
        self._begin = lambda: rows().skip(skipped)

    def __iter__(self) -> "_RowsIterator":
        return _RowsIterator(self._begin)


class _RowsIterator(grain.DatasetIterator):
    """An iterator over rows. Its position is the number of full passes and a place in this pass."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        super().__init__()
        self._begin, self._epoch = begin, 0
        self._rows = begin()
        self._iterator: Iterator[Row] = iter(self._rows)

    def __next__(self) -> Row:
        for row in self._iterator:
            return row
        # `read_head` leaves at least one row, so a new pass is never empty.
        self._epoch += 1
        self._rows = self._begin()
        self._iterator = iter(self._rows)
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Returns the position, for `set_state`."""
        return {"epoch": self._epoch, "rows": copy.deepcopy(self._rows.state_dict())}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at the position `state`."""
        self._epoch, self._rows = state["epoch"], self._begin()
        self._rows.load_state_dict(copy.deepcopy(state["rows"]))
        self._iterator = iter(self._rows)


class PackedTexts(grain.IterDataset):
    """Packs a stream of texts into records of T ids, as `tokens.pack` does with texts in memory."""

    def __init__(self, texts: grain.IterDataset, tokenizer: Tokenizer, tokens: int) -> None:
        super().__init__(texts)
        self._tokenizer, self._tokens = tokenizer, tokens

    def __iter__(self) -> "_PackedIterator":
        return _PackedIterator(iter(self._parent), self._tokenizer, self._tokens)


class _PackedIterator(grain.DatasetIterator):
    """An iterator over records. Its position is a text's place and how many of its ids were used.

    text          │ a a a a a a a │ b b b │ c c c c c c ...
    record        │ ^ a a a a │ ^ a a a b │ ^ b b c c │         ^ the start mark
                                          place ┘   └ used
    """

    def __init__(self, texts: grain.DatasetIterator, tokenizer: Tokenizer, tokens: int) -> None:
        super().__init__(texts)
        self._tokenizer, self._room, self._marks = tokenizer, tokens - 1, marks_of(tokenizer)
        self._place, self._used = texts.get_state(), 0
        self._ids: np.ndarray | None = None

    def __next__(self) -> Int32[np.ndarray, "T"]:
        parts, room = [np.array([self._marks.start], np.int32)], self._room
        # The loop ends because each round fills the record or uses up a text, and each text has at
        # least an end mark.
        while room:
            if self._ids is None:
                self._read()
            assert self._ids is not None
            part = self._ids[self._used : self._used + room]
            parts.append(part)
            room -= len(part)
            self._used += len(part)
            if self._used == len(self._ids):
                self._ids = None
        return np.concatenate(parts)

    def _read(self) -> None:
        # `_place` is the place before the text, because a resumed run must read the text again.
        self._place, self._used = self._parent.get_state(), 0
        ids = self._tokenizer.encode(next(self._parent), add_special_tokens=False).ids
        self._ids = np.array([*ids, self._marks.end], np.int32)

    def get_state(self) -> dict[str, Any]:
        """Returns the place of the text where the last record ends, and its number of used ids."""
        if self._ids is None:
            return {"text": self._parent.get_state(), "used": 0}
        return {"text": self._place, "used": self._used}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at the position `state`."""
        self._parent.set_state(state["text"])
        self._ids = None
        if state["used"]:
            self._read()
            self._used = state["used"]


def stream_batches(
    records: grain.IterDataset, transform: Transform, seed: int, batch_size: int, window: int = 256
) -> Batches:
    """Makes batches of `transform(record, generator)`, shuffled within windows.

    The state of the batches has the place in the stream at which the present window of records
    begins, and the number of the window's records that were used.
    """
    shuffled = grain.experimental.WindowShuffleIterDataset(records, window_size=window, seed=seed)
    return iter(shuffled.seed(seed).random_map(transform).batch(batch_size))
