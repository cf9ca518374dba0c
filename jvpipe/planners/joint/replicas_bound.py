"""What no plan of replicated stages is below.

Legend: t(i, j, r) is what a micro-batch takes on a segment of r replicas; M micro-batches. With a cap T a segment needs
rho(i, j), the fewest replicas with t <= T. The fewest devices of all segments together are a shortest path over cuts,
whatever the number of devices. T* is the least cap under which they are no more than there are.
"""

from functools import cache

import numpy as np

from jvpipe.planners.model.replicas_problem import ReplicaProblem
from jvpipe.planners.model.replicas_stage import Tables, line
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
    >>> from jvpipe.cost.cluster_file import find_cluster
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
    every = (sums(tables.problem.local.compute_s(-(-size // int(r)))) for r in counts)
    return _least_cap_s(
        tables, np.array([between(each, cuts, cuts) for each in every]), counts, cuts
    )


def lower_bound_s(tables: Tables) -> float:
    """Seconds that no step is below, of any size of micro-batches: the first one on all stages, or all on the slowest.

    Every stage's all-reduce has its seconds, too, or what its last backward cannot hide of them.

    Args:
        tables: of the problem.
    """
    problem, least_s = tables.problem, np.inf
    rate_of = cache(lambda r: line(lambda size: problem.cluster.least_reduce_s(r, size)))
    layers = problem.costs.costs[0].layers
    gradients = between(
        sums(x.gradient_bytes or x.parameter_bytes for x in layers), tables.cuts, tables.cuts
    )
    for size in problem.sizes:
        counts, count = replica_counts(problem, size), problem.batch // size
        every = np.array([problem.local.compute_s(-(-size // r)) for r in counts])
        through_s = float(every.min(0).sum())
        shared_s = count * float((every * np.array(counts)[:, None]).min(0).sum()) / problem.devices
        if max(through_s, shared_s) < least_s:
            once_s = np.array([between(sums(each), tables.cuts, tables.cuts) for each in every])
            rates = map(rate_of, counts)
            reduce_s = [
                np.where(gradients > 0, latency_s + byte_s * gradients, 0.0)
                for latency_s, byte_s in rates
            ]
            shown_s = np.maximum(0.0, reduce_s - once_s) if problem.overlaps else np.array(reduce_s)
            steps_s = count * once_s + shown_s
            cap_s = _least_cap_s(tables, steps_s, np.array(counts), tables.cuts, least_s)
            least_s = min(least_s, max(through_s, cap_s))
    return least_s


def _least_cap_s(
    tables: Tables, grids: np.ndarray, counts: np.ndarray, cuts: Cuts, most_s: float = np.inf
) -> float:
    """The least cap under which the segments need no more devices than there are, if it is under `most_s`; `grids[r]`
    for `counts[r]`.
    """
    grids = np.where(cuts[:, None] < cuts, grids, np.inf)
    low, high = 0.0, min(most_s, float(grids[:, 0, -1].min()))
    if _fewest_devices(grids <= high, counts) > tables.problem.devices:
        return high
    for _ in range(BISECTIONS):
        cap = (low + high) / 2
        if _fewest_devices(grids <= cap, counts) <= tables.problem.devices:
            high = cap
        else:
            low = cap
    return low


def _fewest_devices(fits: np.ndarray, counts: np.ndarray) -> float:
    """The devices of the path that needs fewest, where replicas `counts[r]` of segment (i, j) keep the cap."""
    need = np.where(fits.any(0), counts[fits.argmax(0)], np.inf)
    fewest = np.full(need.shape[0], np.inf)
    fewest[0] = 0
    for j in range(1, len(fewest)):
        fewest[j] = (fewest[:j] + need[:j, j]).min()
    return float(fewest[-1])
