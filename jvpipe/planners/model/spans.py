"""Counts the bytes of values that enter segments of layers, for many segments at once.

A segment [i, j) is the layers i to j - 1. A value that layer a makes and layer b reads enters the
segments that have b but not a. So it is a weight w at the pair (a, b), which counts for [i, j) if
a < i <= b < j:

    layer      0  1  2  3  4  5  6
    value         a--------b             a = 1, b = 4
    segment          [i-------)j         i = 2, j = 5: counts

The sum over all pairs with a < i and b < j is a prefix sum in two dimensions. It also includes all
pairs with b < i, because for these a < b < i < j. They lie before the segment and must not count,
so their sum is subtracted. With n pairs, S starts and E ends, all segments together take
O(n log n + S E).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

Grid = Float[np.ndarray, "_ _"]
Cuts = Int[np.ndarray, "_"]


class Spans:
    """Weights w at pairs of layers a < b; pairs with a >= b or w = 0 are dropped.

    Args:
        a: the first layer of each pair.
        b: the second layer of each pair.
        w: the weight of each pair.
    """

    def __init__(self, a: Cuts, b: Cuts, w: Cuts) -> None:
        there = np.flatnonzero((w != 0) & (a < b))
        # Pairs are sorted by b, so that `over` finds those near its segments by bisection.
        order = there[np.argsort(b[there], kind="stable")]
        self.a = a[order]
        self.b = b[order]
        self.w = w[order].astype(np.float64)

    def over(self, starts: Cuts, ends: Cuts) -> Grid:
        """Sums the weights that count for each segment; a row per start and a column per end.

        Args:
            starts: where segments begin, in ascending order.
            ends: where they end, in ascending order.
        """
        # A pair whose b is before the first start, or not before the last end, never counts.
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
        # `total` counts all pairs with a < i and b < j, `passed` those of them with b < i.
        before = np.concatenate([[0.0], np.cumsum(w)])
        passed = before[np.searchsorted(b, starts)]
        return total - passed[:, None]

    def at(self, i: int, n: int) -> Float[np.ndarray, "N"]:
        """Returns, for each of n layers b, the sum of weights of pairs (a, b) with a < i <= b."""
        there = (self.a < i) & (i <= self.b)
        return np.bincount(
            self.b[there],
            self.w[there],
            n,
        ).astype(np.float64)


@dataclass(frozen=True, eq=False)
class Hops:
    """The hops of values: from the producer (a) to the first reader (b), and from reader to reader.

    A segment that reads a value without making it is entered by exactly one hop of the value. So
    the value counts once, however many layers of the segment read it. Each attribute is an array
    with one entry for each hop.
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
        """The largest distance from a to b, in layers."""
        return int((self.b - self.a).max(initial=0))

    @property
    def reach(self) -> int:
        """The largest distance from a producer to a reader of its value, in layers."""
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
    """Joins parts, each given as its arrays a, b and w, into one `Spans`."""
    nothing = np.empty(0, dtype=np.int64)
    columns = zip((nothing,) * 3, *parts, strict=True)
    return Spans(*map(np.concatenate, columns))
