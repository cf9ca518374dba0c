"""Finds sums and maxima over many segments at once, from a number for each layer.

A segment [i, j) is the layers i to j - 1. A `Grid` has a row for each start i and a column for each
end j. For three layers with the numbers 1, 2 and 4, with starts 0, 1 and 2 and ends 1, 2 and 3:

    sums        0  1  3  7              prefix sums: entry j is the sum over the first j layers

    between     1  3  7                 sums over each segment: sums[j] - sums[i]
                .  2  6
                .  .  4

    most_of     1  2  4                 the largest number of any layer of each segment
                .  2  4
                .  .  4

A dot marks an entry with j <= i, which means nothing.
"""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Float, Int

from jvpipe.cost.hardware import Link
from jvpipe.planners.model.spans import Cuts, Grid

OverJ = Float[np.ndarray, "J"]


def sums(values: Iterable[float]) -> OverJ:
    """Makes prefix sums: entry j is the sum over the first j layers, for j = 0, 1, ..."""
    every = np.fromiter(values, np.float64)
    return np.concatenate([[0.0], np.cumsum(every)])


def between(
    total: Float[np.ndarray, "N"],
    starts: Cuts,
    ends: Int[np.ndarray, "J"],
) -> Grid:
    """Returns sums over each segment, from prefix sums.

    Args:
        total: prefix sums, as `sums` makes them.
        starts: where segments begin.
        ends: where they end.
    """
    return total[ends] - total[starts][:, None]


def most_of(layers: np.ndarray, starts: Cuts, ends: Cuts) -> Grid:
    """Finds, for each segment, the largest number of any of its layers.

    Args:
        layers: a number of at least 0 for each layer.
        starts: where segments begin.
        ends: where they end.
    """
    # There is a column for each layer, because the largest number may be between two ends.
    every = ends_up_to(starts, ends)
    inside = every > starts[:, None]
    in_segments = np.where(inside, layers[every - 1], 0.0)
    return most_up_to(in_segments, starts, ends)


def most_up_to(at_work: Grid, starts: Cuts, ends: Cuts) -> Grid:
    """Finds, for each segment, the largest entry of any of its layers.

    Args:
        at_work: the result of `Segments.at_work`, or a grid like it: a row for each start, a column
            for each layer, and 0 for the layers before the start.
        starts: where segments begin.
        ends: where they end.
    """
    # The layers before a segment are 0 in its row, so a running maximum along the row is the
    # maximum over the segment: one pass for all segments with the same start.
    so_far = np.maximum.accumulate(at_work, axis=1)
    # Column 0 is layer starts[0]. An end at or before it has no segment; any column would do.
    lasts = np.maximum(ends - starts[0] - 1, 0)
    return so_far[:, lasts]


def ends_up_to(starts: Cuts, ends: Cuts) -> Cuts:
    """Lists the cuts after each layer from the first start up to the last end; at least one."""
    first = int(starts[0]) + 1
    return np.arange(first, max(int(ends[-1]), first) + 1)


def link_seconds(link: Link, sizes: np.ndarray) -> np.ndarray:
    """Counts the seconds of transfers on a link; `sizes` are their bytes, 0 for no transfer."""
    seconds = link.latency_s + sizes / link.bytes_per_s
    return np.where(sizes > 0, seconds, 0.0)


def reduce_s(
    link: Link,
    reduced_bytes: OverJ,
    backward_s: OverJ | None,
    starts: Cuts,
    ends: Cuts,
) -> Grid:
    """Returns lower bounds of the seconds that each segment's all-reduce adds to a step.

    If all-reduces overlap with backwards, both are assumed to begin together. The part that does
    not overlap is then the latency or, if larger, the excess of the all-reduce over the backwards.
    It may be longer, because a layer's gradients are reduced only after the layer's backward.

    Args:
        link: the all-reduce as a link.
        reduced_bytes: prefix sums of the bytes of the layers' gradients.
        backward_s: prefix sums of the seconds of the layers' backwards; None: nothing overlaps.
        starts: where segments begin.
        ends: where they end.
    """
    whole_s = link_seconds(link, between(reduced_bytes, starts, ends))
    if backward_s is None:
        return whole_s
    longer_s = np.maximum(whole_s - between(backward_s, starts, ends), link.latency_s)
    return np.where(whole_s > 0, longer_s, 0.0)
