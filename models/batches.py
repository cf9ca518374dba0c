"""The order in which records are seen: shuffled anew each epoch, without end, from any position."""

from collections.abc import Callable, Sequence
from typing import cast

import grain
import numpy as np
from jaxtyping import Int32

from jvpipe.models.workload import Batch, Batches

Transform = Callable[[np.ndarray, np.random.Generator], Batch]


def train_batches(
    records: Int32[np.ndarray, "N ..."],
    transform: Transform,
    seed: int,
    batch_size: int,
    prefetch: int = 4,
) -> Batches:
    """Batches of `transform(record, generator)`.

    The order and each record's generator follow from the seed and the position alone, so that `get_state`, the
    position, is all there is to save. A thread prepares `prefetch` batches ahead.
    """
    rows = cast(Sequence[np.ndarray], records)
    order = (
        grain.MapDataset.source(rows)
        .seed(seed)
        .shuffle()
        .repeat()
        .random_map(transform)
        .batch(batch_size)
    )
    return iter(
        order.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch))
    )


def fixed_batches(
    records: Int32[np.ndarray, "N ..."], transform: Transform, batch_size: int
) -> tuple[Batch, ...]:
    """Whole batches of the records in order, each record under a generator of its own that no seed changes.

    Where the records fill not even one batch, copies whose `weights` are 0 do.
    """
    whole = max(1, len(records) // batch_size) * batch_size
    examples = [
        transform(record, np.random.default_rng(i)) for i, record in enumerate(records[:whole])
    ]
    filler = {**examples[-1], "weights": np.zeros_like(examples[-1]["weights"])}
    examples += [filler] * (whole - len(examples))
    groups = [examples[i : i + batch_size] for i in range(0, whole, batch_size)]
    return tuple(
        {name: np.stack([item[name] for item in group]) for name in examples[0]} for group in groups
    )
