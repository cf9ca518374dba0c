"""What no plan of replicated stages is below.

Legend: t(i, j, r) is what a micro-batch takes on a segment of r replicas; M micro-batches. With a cap T a segment needs
rho(i, j), the fewest replicas with t <= T. The fewest devices of all segments together are a shortest path over cuts,
whatever the number of devices. T* is the least cap under which they are no more than there are.
"""

import numpy as np

from jvpipe.planners.model.replicas_problem import ReplicaProblem
from jvpipe.planners.model.replicas_stage import Tables
from jvpipe.planners.model.segments import Cuts, between, sums

BISECTIONS = 16
"""T* is found to a part of 2 ** 16 of the seconds of the whole model."""


def replica_counts(problem: ReplicaProblem, size: int) -> tuple[int, ...]:
    """The replica counts that differ: of those with the same largest slice the least.

    Args:
        problem: whose devices there are.
        size: examples of a micro-batch.

    Of 16 examples, 4 or 5 replicas have slices of 4 at most, 8 to 15 slices of 2:

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.cost.files.cluster_file import find_cluster
    >>> from jvpipe.planners.model.replicas_costs import LocalCosts
    >>> costs = LocalCosts((1,), (Costs((LayerCost("block", 1.0, 2.0, (Option(8),)),)),))
    >>> replica_counts(ReplicaProblem(costs, find_cluster("v100-b"), 16, 64), 16)
    (1, 2, 3, 4, 6, 8, 16)
    """
    feeds = problem.pins.feeds
    least = {-(-size // r): r for r in range(min(problem.devices, size), 0, -1) if feeds(r, size)}
    return tuple(sorted(least.values()))


def least_bottleneck_s(tables: Tables, size: int, cuts: Cuts) -> float:
    """T*: no plan's slowest stage is faster, transfers and memory left aside.

    Args:
        tables: of the problem.
        size: examples of a micro-batch.
        cuts: where stages may begin and end.
    """
    counts = np.array(replica_counts(tables.problem, size))
    grids = []
    for r in counts:
        grids.append(between(sums(tables.problem.local.compute_s(-(-size // int(r)))), cuts, cuts))
    t = np.minimum.accumulate(np.array(grids), axis=0)
    t[:, cuts[:, None] >= cuts] = np.inf
    low, high = 0.0, float(t[0, 0, -1])
    for _ in range(BISECTIONS):
        cap = (low + high) / 2
        if _fewest_devices(t <= cap, counts) <= tables.problem.devices:
            high = cap
        else:
            low = cap
    return low


def lower_bound_s(tables: Tables) -> float:
    """Seconds that no step is below: all micro-batches on the slowest stage, or one of them on all, of any size."""
    batch, devices, least_s = tables.problem.batch, tables.problem.devices, np.inf
    for size in tables.problem.sizes:
        counts, count = replica_counts(tables.problem, size), batch // size
        every = np.array([tables.problem.local.compute_s(-(-size // r)) for r in counts])
        through_s = float(every.min(0).sum())
        shared_s = count * float((every * np.array(counts)[:, None]).min(0).sum()) / devices
        if max(through_s, shared_s) < least_s:
            slowest_s = least_bottleneck_s(tables, size, tables.cuts)
            least_s = min(least_s, max(through_s, count * slowest_s))
    return least_s


def _fewest_devices(fits: np.ndarray, counts: np.ndarray) -> float:
    """The devices of the path that needs fewest, where replicas `counts[r]` of segment (i, j) keep the cap."""
    need = np.where(fits.any(0), counts[fits.argmax(0)], np.inf)
    fewest = np.full(need.shape[0], np.inf)
    fewest[0] = 0
    for j in range(1, len(fewest)):
        fewest[j] = (fewest[:j] + need[:j, j]).min()
    return float(fewest[-1])
