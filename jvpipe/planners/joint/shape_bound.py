"""A lower bound on the step of any plan of any shape.

Legend: t(i, j, r) are the seconds of a step on the segment of layers [i, j), as a stage of r
replicas. Under a cap T on these seconds, the segment needs rho(i, j) replicas, the fewest with
t <= T. The fewest devices for the whole model are then the length of a shortest path over cuts,
with rho as the lengths of segments; the number of stages is free. The least cap under which that
length is at most the number of devices is a lower bound, because every plan's slowest stage takes
at least that long.
"""

import numpy as np
from jaxtyping import Float, Int

from jvpipe.cost.hardware import Cluster
from jvpipe.planners.joint.effort import SHAPE
from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.segments import Grid, between, sums
from jvpipe.planners.model.shapes import Shapes


def least_step_s(shapes: Shapes) -> float:
    """Bounds a step from below: one micro-batch on all stages, or all of them on the slowest.

    The seconds of a stage include its all-reduce, or the part that its last backward cannot hide.
    Unlike devices count as being as fast, for each layer, as the fastest of them.

    Args:
        shapes: the possible shapes.
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
        # Two cheap bounds come first. They show for most sizes that these cannot lower the minimum.
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
    """Returns for each layer how many times as long as the costs the fastest device takes."""
    alike = np.ones(shapes.layers)
    every = [np.array(group.slowness or alike) for group in shapes.apart]
    return np.min(every, axis=0) if every else alike


def _reduce_s(cluster: Cluster, replicas: int, sizes: Grid) -> Grid:
    """Bounds an all-reduce from below, by a chord of its least seconds over bytes.

    The least seconds are the least of several straight lines, so they are concave in the bytes: a
    chord from no bytes to the most bytes lies below them.
    """
    most_bytes = max(float(sizes.max()), 1.0)
    few_s = cluster.least_reduce_s(replicas, 1e-12)
    many_s = cluster.least_reduce_s(replicas, most_bytes)
    chord_s = few_s + sizes * (many_s - few_s) / most_bytes
    return np.where(sizes > 0, chord_s, 0.0)


def _least_cap_s(
    stages_s: Float[np.ndarray, "counts n n"],
    counts: Int[np.ndarray, " counts"],
    devices: int,
    high_s: float,
) -> float:
    """Finds nearly the least cap under which there are enough devices; never more than that cap.

    Args:
        stages_s: the seconds t of all segments, for each number of replicas.
        counts: the numbers of replicas, rising.
        devices: the number of all devices.
        high_s: an upper end of the interval that is halved.
    """
    low_s = 0.0
    for _ in range(SHAPE.bisections):
        cap_s = (low_s + high_s) / 2
        # `counts` rises, so that the first count that fits is the fewest replicas, rho.
        fits = stages_s <= cap_s
        first = counts[fits.argmax(0)]
        need = np.where(fits.any(0), first, np.inf)
        fewest = np.zeros(len(need))
        for j in range(1, len(fewest)):
            fewest[j] = (fewest[:j] + need[:j, j]).min()
        if fewest[-1] <= devices:
            high_s = cap_s
        else:
            low_s = cap_s
    return low_s
