"""Endless batches of examples that are reshuffled in each epoch and can resume at any position."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import grain
import numpy as np
from jaxtyping import Int32

from jvpipe.ir.lazy_array import LazyArray
from jvpipe.models.workload import Batch

Transform = Callable[[np.ndarray, np.random.Generator], Batch]


def train_batches(
    records: Int32[np.ndarray, "N ..."],
    transform: Transform,
    seed: int,
    batch_size: int,
    prefetch: int = 4,
) -> "ShuffledBatches":
    """Makes shuffled batches of `transform(record, generator)`.

    The order and each record's random generator depend only on the seed and the position in the
    data. So the position, which `get_state` returns, is the whole state. A thread prepares
    `prefetch` batches in advance.
    """
    rows = cast(Sequence[np.ndarray], records)
    # Shuffling comes before repeating, so that each epoch has each record exactly once.
    shuffled = grain.MapDataset.source(rows).seed(seed).shuffle()
    order = shuffled.repeat().random_map(transform)
    return ShuffledBatches(order, batch_size, prefetch)


class ShuffledBatches:
    """An endless iterator over full batches."""

    def __init__(self, order: grain.MapDataset, batch_size: int, prefetch: int) -> None:
        self._order, self._batch_size = order, batch_size
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
        self._batches = iter(order.batch(batch_size).to_iter_dataset(options))

    def __iter__(self) -> "ShuffledBatches":
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """Returns the position, for `set_state`."""
        return self._batches.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at the position `state`."""
        self._batches.set_state(state)

    def lazily(self) -> "LazyBatches":
        """Makes the same batches again, from the first on, but as `jvpipe.LazyArray`."""
        return LazyBatches(self._order, self._batch_size)


class LazyBatches:
    """Batches of `jvpipe.LazyArray`: each process makes only the examples that it reads."""

    def __init__(self, order: grain.MapDataset, batch_size: int) -> None:
        self._order, self._batch_size, self._next = order, batch_size, 0
        self._like: Any = order[0]

    def __iter__(self) -> "LazyBatches":
        return self

    def __next__(self) -> dict[str, LazyArray]:
        first, size = self._next * self._batch_size, self._batch_size
        self._next += 1
        # An example has several leaves. The cache makes the example once for all its leaves.
        example = cache(lambda i: self._order[first + i])

        def leaf(name: str) -> LazyArray:
            like = np.asarray(self._like[name])

            def read(at: slice = slice(None)) -> np.ndarray:
                return np.stack([example(i)[name] for i in range(size)[at]])

            return LazyArray((size, *like.shape), like.dtype, read)

        return {name: leaf(name) for name in self._like}

    def get_state(self) -> dict[str, Any]:
        """Returns the position, for `set_state` of these batches or of `ShuffledBatches`."""
        return {"next_index": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at the position `state`."""
        self._next = state["next_index"]


def fixed_batches(
    records: Int32[np.ndarray, "N ..."], transform: Transform, batch_size: int
) -> tuple[Batch, ...]:
    """Makes full batches of the records in order, the same for every seed.

    Records beyond the last full batch are dropped. If there are too few records for one batch,
    copies of the last example with `weights` of 0 fill the batch.
    """
    whole = max(1, len(records) // batch_size) * batch_size
    examples = []
    for i, record in enumerate(records[:whole]):
        examples.append(transform(record, np.random.default_rng(i)))
    last = examples[-1]
    # All batches have one shape, so that one program evaluates them. The fillers have weight 0, so
    # the weighted mean ignores them.
    filler = {**last, "weights": np.zeros_like(last["weights"])}
    examples += [filler] * (whole - len(examples))
    groups = [examples[i : i + batch_size] for i in range(0, whole, batch_size)]
    return tuple(_stacked(group) for group in groups)


def _stacked(examples: Sequence[Batch]) -> Batch:
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}
