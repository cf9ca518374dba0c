"""Sums weights at pairs of layers over segments, such as the bytes of values on their way."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

Grid = Float[np.ndarray, "_ _"]
Cuts = Int[np.ndarray, "_"]


class Spans:
    """Weights w at pairs of layers a < b, which count for the segments [i, j) with a < i <= b < j.

    An example: layer a makes (or reads) a value of w bytes, and layer b is the next to read it. A
    segment that has b but not a receives these bytes.
    """

    def __init__(self, a: Cuts, b: Cuts, w: Cuts) -> None:
        there = np.flatnonzero((w != 0) & (a < b))
        order = there[np.argsort(b[there], kind="stable")]
        self.a = a[order]
        self.b = b[order]
        self.w = w[order].astype(np.float64)

    def over(self, starts: Cuts, ends: Cuts) -> Grid:
        """Sums the weights that count for every segment."""
        # Pairs that end before the first start or behind the last end count for no segment.
        near = slice(*np.searchsorted(self.b, (starts[0], ends[-1])))
        a = self.a[near]
        b = self.b[near]
        w = self.w[near]
        rows = np.searchsorted(starts, a, "right")
        columns = np.searchsorted(ends, b, "right")
        there = (rows < len(starts)) & (columns < len(ends))
        shape = len(starts), len(ends)
        cells = rows * len(ends) + columns
        flat = np.bincount(
            cells[there],
            w[there],
            shape[0] * shape[1],
        )
        total = flat.reshape(shape).cumsum(0).cumsum(1)
        # `total` is a prefix sum over both ends: it counts all pairs with a < i and b < j. Pairs
        # with b < i lie before the segment, and are subtracted.
        before = np.concatenate([[0.0], np.cumsum(w)])
        passed = before[np.searchsorted(b, starts)]
        return total - passed[:, None]

    def at(self, i: int, n: int) -> Float[np.ndarray, "N"]:
        """Returns for each of n layers b the weights that count for a segment from i with b."""
        there = (self.a < i) & (i <= self.b)
        return np.bincount(
            self.b[there],
            self.w[there],
            n,
        ).astype(np.float64)


@dataclass(frozen=True, eq=False)
class Hops:
    """The hops of values: from the producer (a) to the first reader (b), and from reader to reader.

    Each attribute is an array with one entry for each hop.
    """

    producer: Cuts
    a: Cuts
    b: Cuts
    bytes: Cuts

    @staticmethod
    def of(values: Iterable[tuple[int, Iterable[int], int]]) -> "Hops":
        """Makes the hops of values, each given as its producer, its readers and its bytes."""
        every = list(values)
        pairs = tuple((producer, tuple(readers)) for producer, readers, _ in every)
        producer, a, b, value = _ways(pairs)
        sizes = np.array([size for _, _, size in every], dtype=np.int64)
        return Hops(producer, a, b, sizes[value])

    @property
    def longest(self) -> int:
        """The most layers that a hop passes."""
        return int((self.b - self.a).max(initial=0))

    @property
    def reach(self) -> int:
        """The most layers from a producer to a reader of its value."""
        return int((self.b - self.producer).max(initial=0))

    def at(self, there: np.ndarray) -> "Hops":
        """Picks some of the hops, by a mask."""
        return Hops(
            self.producer[there],
            self.a[there],
            self.b[there],
            self.bytes[there],
        )

    def spans(self) -> Spans:
        """Makes the spans whose weights are the bytes of these hops."""
        return Spans(self.a, self.b, self.bytes)


@lru_cache(maxsize=64)
def _ways(values: tuple[tuple[int, tuple[int, ...]], ...]) -> Int[np.ndarray, "4 hops"]:
    """Lists the hops of values: for each hop its producer, a, b, and the index of its value."""
    hops = []
    for value, (producer, readers) in enumerate(values):
        way = [producer, *sorted(readers)]
        hops += [(producer, a, b, value) for a, b in pairwise(way)]
    return np.array(hops, dtype=np.int64).reshape(-1, 4).T


def joined_spans(parts: Sequence[tuple[Cuts, Cuts, Cuts]]) -> Spans:
    """Joins parts, each given as its a, b and w, to one `Spans`."""
    nothing = np.empty(0, dtype=np.int64)
    columns = zip((nothing,) * 3, *parts, strict=True)
    return Spans(*map(np.concatenate, columns))
