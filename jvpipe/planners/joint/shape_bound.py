"""What no plan of any shape is below.

Legend: t(i, j, r) is what a micro-batch takes on a segment of r replicas; M micro-batches, G
devices. With a cap T a segment needs rho(i, j), the fewest replicas with t <= T. The fewest devices
of all segments together are a shortest path over cuts, whatever the number of stages. T* is the
least cap under which they are no more than G.
"""

import numpy as np
from jaxtyping import Float, Int

from jvpipe.cost.hardware import Cluster
from jvpipe.planners.joint.effort import SHAPE
from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.segments import Grid, between, sums
from jvpipe.planners.model.shapes import Shapes


def least_step_s(shapes: Shapes) -> float:
    """Bounds a step: one micro-batch on all stages, or all of them on the slowest.

    Every stage's all-reduce has its seconds, too, or what its last backward cannot hide of them.
    Devices that are unlike are taken for as fast as the fastest is for each layer.

    Args:
        shapes: those that there are.
    """
    segments = LocalSegments(shapes)
    fastest = _fastest(shapes)
    least_s = np.inf
    reduced = sums(layer.reduced_bytes for layer in shapes.model.costs.layers)
    gradients = between(reduced, segments.cuts, segments.cuts)
    for size in shapes.sizes:
        replicas = segments.counts(size)
        counts = np.array(replicas)
        m = shapes.batch // size
        every = [segments.compute_s(segments.share(size, r)) * fastest for r in replicas]
        through_s = np.min(every, axis=0).sum()
        work_s = np.min(every * counts[:, None], axis=0).sum()
        shared_s = m * work_s / shapes.devices
        # Two cheap bounds first: most sizes need no bisection.
        if max(through_s, shared_s) >= least_s:
            continue
        once_s = np.array([between(sums(x), segments.cuts, segments.cuts) for x in every])
        reduce_s = np.array([_reduce_s(shapes.cluster, r, gradients) for r in replicas])
        late_s = reduce_s
        if shapes.model.overlaps:
            late_s = np.maximum(0.0, reduce_s - once_s)
        inside = segments.cuts[:, None] < segments.cuts
        stages_s = np.where(inside, m * once_s + late_s, np.inf)
        whole_s = stages_s[:, 0, -1].min()
        high_s = float(min(least_s, whole_s))
        cap_s = _least_cap_s(stages_s, counts, shapes.devices, high_s)
        least_s = min(least_s, max(through_s, cap_s))
    return float(least_s)


def _fastest(shapes: Shapes) -> Float[np.ndarray, " layers"]:
    """Returns how many times as long the fastest device takes for each layer."""
    alike = np.ones(shapes.layers)
    every = [np.array(group.slowness or alike) for group in shapes.apart]
    return np.min(every, axis=0) if every else alike


def _reduce_s(cluster: Cluster, replicas: int, sizes: Grid) -> Grid:
    """Bounds an all-reduce from below: the chord of its least for few and for many bytes."""
    few_s = cluster.least_reduce_s(replicas, 1e-12)
    many_s = cluster.least_reduce_s(replicas, 1e9)
    chord_s = few_s + sizes * (many_s - few_s) / 1e9
    return np.where(sizes > 0, chord_s, 0.0)


def _least_cap_s(
    stages_s: Float[np.ndarray, "counts n n"],
    counts: Int[np.ndarray, " counts"],
    devices: int,
    high_s: float,
) -> float:
    """Finds the least cap below `high_s` under which there are enough devices for all segments.

    Args:
        stages_s: seconds of all segments, for each replica count.
        counts: of replicas, rising.
        devices: that there are.
        high_s: nobody asks for more.
    """
    low_s = 0.0
    for _ in range(SHAPE.bisections):
        cap_s = (low_s + high_s) / 2
        # Counts rise, so the first that fits is the fewest replicas; then a shortest path over the
        # cuts.
        fits = stages_s <= cap_s
        first = counts[fits.argmax(0)]
        need = np.where(fits.any(0), first, np.inf)  # rho
        fewest = np.zeros(len(need))
        for j in range(1, len(fewest)):
            fewest[j] = (fewest[:j] + need[:j, j]).min()
        if fewest[-1] <= devices:
            high_s = cap_s
        else:
            low_s = cap_s
    return low_s
