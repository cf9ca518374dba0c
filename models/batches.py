"""The order in which records are seen: shuffled anew each epoch, without end, from any position."""

from collections.abc import Callable

import grain
import numpy as np
from jaxtyping import Int32

from jvpipe.models.workload import Batch, Batches

Transform = Callable[[np.ndarray, np.random.Generator], Batch]


def train_batches(
    records: Int32[np.ndarray, "N T"], transform: Transform, seed: int, batch_size: int, prefetch: int = 4
) -> Batches:
    """Batches of `transform(record, generator)`.

    The order and each record's generator follow from the seed and the position alone, so that `get_state`, the
    position, is all there is to save. A thread prepares `prefetch` records' worth of batches ahead.
    """
    order = grain.MapDataset.source(records).seed(seed).shuffle().repeat().random_map(transform).batch(batch_size)
    return iter(order.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)))


def fixed_batches(records: Int32[np.ndarray, "N T"], transform: Transform, batch_size: int) -> tuple[Batch, ...]:
    """Every record once, each under a generator of its own that no seed changes.

    The last batch is filled with copies whose `weights` are 0.
    """
    found = [transform(record, np.random.default_rng(i)) for i, record in enumerate(records)]
    filler = {**found[-1], "weights": np.zeros_like(found[-1]["weights"])}
    found += [filler] * (-len(found) % batch_size)
    groups = [found[i : i + batch_size] for i in range(0, len(found), batch_size)]
    return tuple({name: np.stack([item[name] for item in group]) for name in found[0]} for group in groups)
