"""What no plan of any shape is below.

Legend: t(i, j, r) is what a micro-batch takes on a segment of r replicas; M micro-batches, G devices.
With a cap T a segment needs rho(i, j), the fewest replicas with t <= T. The fewest devices of all
segments together are a shortest path over cuts, whatever the number of stages. T* is the least cap
under which they are no more than G.
"""

from functools import cache

import numpy as np
from jaxtyping import Bool, Int

from jvpipe.cost.hardware import Link
from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.segments import Cuts, Grid, between, seconds, sums
from jvpipe.planners.model.shapes import Shapes

BISECTIONS = 16
"""T* is found to a part of 2 ** 16 of the seconds of the whole model."""


def least_bottleneck_s(segments: LocalSegments, size: int, counts: tuple[int, ...]) -> float:
    """T* between the coarse cuts: no plan's slowest stage is faster, transfers and memory left aside.

    Args:
        segments: of the model.
        size: examples of a micro-batch.
        counts: of replicas that a stage may have.
    """
    cuts = segments.coarse
    every = (sums(segments.compute_s(segments.share(size, r))) for r in counts)
    grids = np.array([between(each, cuts, cuts) for each in every])
    return _least_cap_s(grids, np.array(counts), cuts, segments.shapes.devices)


def least_step_s(shapes: Shapes) -> float:
    """Counts the seconds that no step is below: the first micro-batch on all stages, or all of them on the slowest.

    Every stage's all-reduce has its seconds, too, or what its last backward cannot hide of them.
    Devices that are unlike are taken for as fast as the fastest is for each layer.

    Args:
        shapes: those that there are.
    """
    segments = LocalSegments(shapes)
    cuts, cluster, least_s = segments.cuts, shapes.cluster, np.inf
    fastest = _fastest(shapes)
    link_of = cache(
        lambda r: _line(cluster.least_reduce_s(r, 1e-12), cluster.least_reduce_s(r, 1e9))
    )
    gradients = between(sums(x.reduced_bytes for x in shapes.model.costs.layers), cuts, cuts)
    for size in shapes.sizes:
        counts, count = segments.counts(size), shapes.batch // size
        shares = [segments.share(size, r) for r in counts]
        every = np.array([segments.compute_s(b) * fastest for b in shares])
        through_s = float(every.min(0).sum())
        devices_s = (every * np.array(counts)[:, None]).min(0).sum()
        shared_s = count * float(devices_s) / shapes.devices
        if max(through_s, shared_s) >= least_s:
            continue
        once_s = np.array([between(sums(each), cuts, cuts) for each in every])
        reduce_s = np.array([seconds(link_of(r), gradients) for r in counts])
        shown_s = np.maximum(0.0, reduce_s - once_s) if shapes.model.overlaps else reduce_s
        steps_s = count * once_s + shown_s
        cap_s = _least_cap_s(steps_s, np.array(counts), cuts, shapes.devices, least_s)
        least_s = min(least_s, max(through_s, cap_s))
    return least_s


def _line(latency_s: float, gigabyte_s: float) -> Link:
    """The link that takes so long for nothing and for 1e9 bytes."""
    byte_s = (gigabyte_s - latency_s) / 1e9
    return Link(1 / byte_s if byte_s > 0 else np.inf, latency_s)


def _fastest(shapes: Shapes) -> np.ndarray:
    """How many times as long the fastest device takes for each layer."""
    alike = np.ones(shapes.layers)
    every = [np.array(group.slowness or alike) for group in shapes.apart]
    return np.min(every, axis=0) if every else alike


def _least_cap_s(
    grids: np.ndarray,
    counts: Int[np.ndarray, " counts"],
    cuts: Cuts,
    devices: int,
    most_s: float = np.inf,
) -> float:
    """The least cap under which segments need no more devices than there are, if it is under `most_s`.

    Args:
        grids: seconds of all segments, for each replica count.
        counts: of replicas, rising.
        cuts: where segments begin and end.
        devices: that there are.
        most_s: nobody asks for more.
    """
    grids = np.where(cuts[:, None] < cuts, grids, np.inf)
    low, high = 0.0, min(most_s, float(grids[:, 0, -1].min()))
    if _fewest_devices(grids <= high, counts) > devices:
        return high
    for _ in range(BISECTIONS):
        cap = (low + high) / 2
        enough = _fewest_devices(grids <= cap, counts) <= devices
        low, high = (low, cap) if enough else (cap, high)
    return low


def _fewest_devices(
    fits: Bool[np.ndarray, "counts n n"], counts: Int[np.ndarray, " counts"]
) -> float:
    """The devices of the path that needs fewest, where replicas `counts[r]` of segment (i, j) keep the cap."""
    need: Grid = np.where(fits.any(0), counts[fits.argmax(0)], np.inf)
    fewest = np.full(need.shape[0], np.inf)
    fewest[0] = 0
    for j in range(1, len(fewest)):
        fewest[j] = (fewest[:j] + need[:j, j]).min()
    return float(fewest[-1])
