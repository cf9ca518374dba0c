"""The batches of a user's model, with a place that is kept in checkpoints."""

import hashlib
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jvpipe import models
from jvpipe.session.batches import shapes_of
from jvpipe.trace.leaves import abstract

Tree = Any


def own_data(
    where: str, model: Any, data_path: Path | None, run_dir: Path, seed: int, batch_size: int
) -> models.Data:
    """What a user's model is trained on.

    Args:
        where: the value of `--model`, for messages.
        model: whose `batches` and `held_out` are read.
        data_path: of `--data`, which such a model does not read.
        run_dir: the folder of the run.
        seed: of the batches.
        batch_size: examples in each.

    Raises:
        ValueError: the batches are none.
    """
    if data_path is not None:
        raise ValueError(
            f"--data {data_path} is for jvpipe's own models; {where} gives its batches itself"
        )
    told = f"--model {where}: batches(seed={seed}, batch_size={batch_size})"
    iterator = _iterator(told, model.batches(seed, batch_size))
    train: Placed | Counted
    if hasattr(iterator, "get_state") and hasattr(iterator, "set_state"):
        train = Placed(told, iterator)
        begin = train.get_state()
        first = next(train)
        train.set_state(begin)
    else:
        train = Counted(told, iterator)
        first = train.peek()
    _check_size(told, first, batch_size)
    held_out = tuple(model.held_out()) if hasattr(model, "held_out") else ()
    return models.Data(train, first, held_out, digest_of(first))


def shapes(where: str, model: Any, batch_size: int) -> Tree:
    """The shapes of a batch of so many examples.

    Args:
        where: how the model was named, for messages.
        model: whose batches they are.
        batch_size: examples per batch.
    """
    told = f"--model {where}: batches(seed=0, batch_size={batch_size})"
    first = Counted(told, _iterator(told, model.batches(0, batch_size))).peek()
    _check_size(told, first, batch_size)
    return abstract(first, "batch leaf")


class Counted:
    """A stream of batches whose place is how many were taken: to go on, the same stream is begun and advanced.

    >>> batches = Counted("batches", iter("abc"))
    >>> batches.set_state({"batches": 1})
    >>> next(batches), batches.get_state()
    ('b', {'batches': 2})
    """

    def __init__(self, told: str, iterator: Iterator[Tree]) -> None:
        self._told, self._iterator, self._taken = told, iterator, 0

    def peek(self) -> Tree:
        """The next batch, which stays the next."""
        batch = next(self)
        self._iterator, self._taken = chain([batch], self._iterator), self._taken - 1
        return batch

    def __iter__(self) -> "Counted":
        return self

    def __next__(self) -> Tree:
        batch = _next(self._told, self._iterator)
        self._taken += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """How many batches were taken."""
        return {"batches": self._taken}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Passes over the batches that were taken before."""
        if set(state) != {"batches"}:
            raise ValueError(
                f"{self._told} keeps no place of its own, and the run was saved with one: {dict(state)}"
            )
        while self._taken < state["batches"]:
            next(self)


class Placed:
    """A stream that keeps its place itself, such as Grain's; where it tells that in bytes, they are text here."""

    def __init__(self, told: str, iterator: Any) -> None:
        self._told, self._iterator = told, iterator

    def __iter__(self) -> "Placed":
        return self

    def __next__(self) -> Tree:
        return _next(self._told, self._iterator)

    def get_state(self) -> dict[str, Any]:
        """What the iterator tells."""
        place = self._iterator.get_state()
        return (
            {"place": place.decode("latin-1"), "bytes": True}
            if isinstance(place, bytes)
            else {"place": place}
        )

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues there."""
        if "place" not in state:
            raise ValueError(
                f"{self._told} keeps a place of its own, and the run was saved without: {dict(state)}"
            )
        place = state["place"]
        self._iterator.set_state(place.encode("latin-1") if state.get("bytes") else place)


def digest_of(batch: Tree) -> str:
    """The SHA-256 of a batch: its containers, and the bytes of its leaves.

    >>> digest_of({"x": np.zeros(2)}) == digest_of({"x": np.zeros(2)}) != digest_of({"x": np.ones(2)})
    True
    """
    digest = hashlib.sha256(str(shapes_of(batch)).encode())
    for leaf in jax.tree.leaves(batch):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def _iterator(told: str, batches: Any) -> Iterator[Tree]:
    try:
        return iter(batches)
    except TypeError as problem:
        raise ValueError(
            f"{told} should give an iterator of batches, not {type(batches).__name__}"
        ) from problem


def _next(told: str, iterator: Iterator[Tree]) -> Tree:
    try:
        return next(iterator)
    except StopIteration:
        cure = "let it go on without end (while True: ...), or train for fewer --steps"
        raise ValueError(f"{told} has come to its end: {cure}") from None


def _check_size(told: str, batch: Tree, batch_size: int) -> None:
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if sizes != {(batch_size,)}:
        counts = sorted(size[0] if size else 0 for size in sizes)
        raise ValueError(
            f"{told} gives arrays whose first axis is {counts}: it counts the examples, {batch_size}"
        )
