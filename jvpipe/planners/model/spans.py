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

from functools import lru_cache
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

Grid = Float[np.ndarray, "_ _"]
Cuts = Int[np.ndarray, "_"]
Hops = Int[np.ndarray, "4 hops"]
"""The hops of values: from the producer (a) to the first reader (b), and from reader to reader.

The rows are the producer, a, b and the bytes of each hop. A segment that reads a value without
making it is entered by exactly one hop of the value. So the value counts once, however many layers
of the segment read it.
"""


class Spans:
    """Weights w at pairs of layers a < b; pairs with a >= b or w = 0 are dropped.

    Args:
        a: the first layer of each pair.
        b: the second layer of each pair.
        w: the weight of each pair.

    Arrays of unlike shapes are broadcast.
    """

    def __init__(self, a: np.ndarray, b: np.ndarray, w: np.ndarray) -> None:
        a, b, w = map(np.ravel, np.broadcast_arrays(a, b, w))
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
        b = self.b[near]
        w = self.w[near]
        # A pair counts from a row and a column on. The last row is for pairs that never count, and
        # no pair has the last column, because b is before the last end.
        rows = np.searchsorted(starts, self.a[near], "right")
        columns = np.searchsorted(ends, b, "right")
        shape = len(starts) + 1, len(ends)
        cells = rows * len(ends) + columns
        flat = np.bincount(cells, w, shape[0] * shape[1])
        total = flat.reshape(shape)[:-1].cumsum(0).cumsum(1)
        # `total` counts all pairs with a < i and b < j, `passed` those of them with b < i.
        before = np.concatenate([[0.0], np.cumsum(w)])
        passed = before[np.searchsorted(b, starts)]
        return total - passed[:, None]

    def at(self, i: int, n: int) -> Float[np.ndarray, "N"]:
        """Returns, for each of n layers b, the sum of weights of pairs (a, b) with a < i <= b."""
        there = (self.a < i) & (i <= self.b)
        return np.bincount(self.b[there], self.w[there], n).astype(np.float64)


@lru_cache(maxsize=64)
def hops(values: tuple[tuple[int, tuple[int, ...], int], ...]) -> Hops:
    """Lists the hops of values, each given as its producer, its readers and its bytes."""
    every = [
        (producer, a, b, size)
        for producer, readers, size in values
        for a, b in pairwise([producer, *sorted(readers)])
    ]
    return np.array(every, dtype=np.int64).reshape(-1, 4).T
