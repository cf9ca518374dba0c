"""Bounds the seconds of a step from below, whatever the shape of the pipeline and its cuts.

A shape says how many devices (replicas) each stage has. A step takes at least as long as its
slowest stage. So this file bounds how fast the slowest stage can be with the available devices.

    t(i, j, r)   the seconds per step of layers [i, j) as a stage of r replicas
    T            a cap on these seconds
    rho(i, j)    the fewest replicas r with t(i, j, r) <= T

If all stages keep the cap, a stage of layers [i, j) has at least rho(i, j) replicas. Cuts are a
path from layer 0 to the last layer. If rho is the length of a segment, the length of the shortest
path is the fewest devices that can keep the cap. If there are fewer devices, no plan keeps the cap.
A larger cap needs no more devices, so the least cap is found by halving an interval.
"""

import numpy as np
from jaxtyping import Float, Int

from jvpipe.cost.hardware import Cluster
from jvpipe.planners.joint.effort import SHAPE
from jvpipe.planners.model.grids import between, sums
from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.shapes import Shapes
from jvpipe.planners.model.spans import Grid


def least_step_s(shapes: Shapes) -> float:
    """Bounds the seconds of a step from below, over all shapes and sizes of micro-batches.

    For each size, the bound is the larger of two numbers: the seconds of one micro-batch on all
    stages, and of all micro-batches on the slowest stage. A stage's seconds include its all-reduce,
    less the seconds of one micro-batch if backwards can hide all-reduces. If devices differ, each
    layer counts as on the device that is the fastest for it.

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
        # Two cheap bounds come first. For most sizes they show that the minimum does not change.
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
        cap_s = _least_cap_s(
            stages_s,
            counts,
            shapes.devices,
            high_s,
        )
        least_s = min(least_s, max(through_s, cap_s))
    return float(least_s)


def _fastest(shapes: Shapes) -> Float[np.ndarray, " layers"]:
    """Returns the slowness of each layer on its fastest device, as a multiple of the costs."""
    alike = np.ones(shapes.layers)
    every = [np.array(group.slowness or alike) for group in shapes.apart]
    return np.min(every, axis=0) if every else alike


def _reduce_s(
    cluster: Cluster,
    replicas: int,
    sizes: Grid,
) -> Grid:
    """Bounds the seconds of all-reduces of many sizes from below, by a chord.

    As a function of bytes, the least seconds are the minimum of several straight lines, so they are
    concave. A chord, here from nearly no bytes to the largest size, lies below a concave function.
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
    """Returns a lower bound, near the least cap under which there are enough devices.

    Args:
        stages_s: t(i, j, r) of the module, indexed by number of replicas, start and end.
        counts: the possible numbers of replicas, rising.
        devices: how many devices there are in all.
        high_s: the most that the result may be; larger results are of no use to the caller.
    """

    def is_enough(cap_s: float) -> bool:
        # `counts` rises, so the first count that fits is the fewest replicas, rho.
        fits = stages_s <= cap_s
        first = counts[fits.argmax(0)]
        need = np.where(fits.any(0), first, np.inf)
        # fewest[j] is the fewest devices for the layers before cut j. If the last stage of these
        # layers begins at cut i < j, the stages before it take fewest[i] devices.
        fewest = np.zeros(len(need))
        for j in range(1, len(fewest)):
            fewest[j] = (fewest[:j] + need[:j, j]).min()
        return bool(fewest[-1] <= devices)

    # Halving ends a little below the least cap. Without this test, the best bound of earlier sizes
    # would become a little less with every further size.
    if not is_enough(high_s):
        return high_s
    low_s = 0.0
    for _ in range(SHAPE.bisections):
        cap_s = (low_s + high_s) / 2
        if is_enough(cap_s):
            high_s = cap_s
        else:
            low_s = cap_s
    return low_s
