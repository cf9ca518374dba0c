"""vPipe's initial cuts: a coarse graph, recursive Kernighan-Lin bisection, and refinement.

Paper: Zhao et al., "vPipe: A Virtualized Acceleration System for Achieving Efficient and Scalable
Pipeline Parallel DNN Training", TPDS 2022, its graph partition.

A pass of Kernighan-Lin exchanges vertices between the two sides of a graph until each vertex has
been moved once, and keeps the best division that it meets. Here the layers of each side are
consecutive, as the layers of a stage are. So only the vertices next to the bound between the sides
can change sides, and a pass moves the bound through all its possible positions. Among the bounds
that balance the sides' seconds within a tolerance, the pass takes the one that cuts the fewest
bytes.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from jvpipe.papers.paper_effort import PAPER
from jvpipe.planners.model.grids import OverJ
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.segments import Segments


def initial_bounds(segments: Segments) -> tuple[int, ...]:
    """Returns bounds of the stages that cut few bytes and balance seconds.

    The first bound is 0, and the last is the number of layers.
    """
    problem = segments.problem
    total = segments.compute_s
    crossing = segments.crossing_bytes
    mean_s = float(total[-1]) / problem.stages
    fine: list[int] = segments.cuts.tolist()
    coarse = coarse_bounds(
        problem,
        fine,
        total,
        heaviest_s=PAPER.heavy * mean_s,
    )

    def bisect(lo: int, hi: int, stages: int) -> list[int]:
        """Cuts the layers between two bounds into stages, and returns where the stages end.

        Args:
            lo: the bound at which the first stage begins.
            hi: the bound at which the last stage ends.
            stages: the number of stages.
        """
        if stages == 1:
            return [hi]
        left = stages // 2
        inside_s = total[hi] - total[lo]
        share = total[lo] + inside_s * left / stages

        def distance(b: int) -> float:
            return abs(total[b] - share)

        # Each side needs at least as many fine vertices (layers between fine bounds) as it has
        # stages.
        inside = [b for b in fine if lo <= b <= hi]
        right = stages - left
        possible = inside[left : len(inside) - right]
        middles = sorted(set(possible).intersection(coarse)) or possible
        # The tolerance is never below the distance of the nearest bound to the share, so at least
        # one bound is balanced.
        nearest = min(map(distance, middles))
        tolerance = max(nearest, PAPER.imbalance * mean_s)
        balanced = [b for b in middles if distance(b) <= tolerance]
        # The bound that cuts the fewest bytes wins. Among equal bounds, the best balanced one wins.
        middle = min(balanced, key=lambda b: (crossing[b], distance(b)))
        return bisect(lo, middle, left) + bisect(middle, hi, right)

    ends = bisect(0, fine[-1], problem.stages)
    return refine(
        [0, *ends],
        fine,
        coarse,
        total,
        crossing,
    )


def coarse_bounds(
    problem: Problem,
    fine: Sequence[int],
    total: OverJ,
    heaviest_s: float,
) -> list[int]:
    """Returns the bounds of the coarse graph's vertices.

    A backbone vertex is a layer that no edge passes by. The layers between two backbone vertices
    are a nest. A nest becomes one vertex, or several if it would take more than `heaviest_s`.

        edges    0-1-2-3-4-5, 1-4       backbone 0, 1, 4, 5: the edge from 1 to 4 passes by 2 and 3
        coarse   0|1|2 3|4|5            a bound at each |

    Args:
        problem: the problem to plan.
        fine: the bounds at which the model may be cut.
        total: the running seconds up to each layer.
        heaviest_s: the most seconds of a vertex. Layers between two neighboring fine bounds are
            never divided, even if they take more.
    """
    # Entry i is the number of edges that begin to pass by at layer i, minus the number of edges
    # that end there.
    passed_by = [0] * (len(problem.costs.layers) + 1)
    for edge in problem.costs.edges:
        first = edge.producer + 1
        end = max(first, *edge.readers)
        passed_by[first] += 1
        passed_by[end] -= 1
    depths = enumerate(accumulate(passed_by))
    backbone = {layer for layer, depth in depths if depth == 0}
    vertices = [0]
    for b, after in pairwise(fine[1:]):
        beside_backbone = b in backbone or b - 1 in backbone
        joined_s = total[after] - total[vertices[-1]]
        if beside_backbone or joined_s > heaviest_s:
            vertices.append(b)
    return [*vertices, fine[-1]]


def refine(
    bounds: list[int],
    fine: Sequence[int],
    coarse: Sequence[int],
    total: OverJ,
    crossing: OverJ,
) -> tuple[int, ...]:
    """Moves each bound, between its coarse neighbors, to where it cuts the fewest bytes.

    The slower of the two stages beside a bound may take up to 1 + `PAPER.imbalance` times as long
    as at the best balance.

    Args:
        bounds: the bounds of the stages, which are changed.
        fine: the bounds at which the model may be cut.
        coarse: the bounds of the coarse vertices.
        total: the running seconds up to each layer.
        crossing: the bytes that cross a cut at each layer.
    """
    for s in range(1, len(bounds) - 1):
        lo, b, hi = bounds[s - 1 : s + 2]
        # A bound stays between its coarse neighbors, and never reaches the bounds of other stages.
        before = [c for c in coarse if lo < c < b]
        behind = [c for c in coarse if b < c < hi]
        first = max(before, default=lo + 1)
        last = min(behind, default=hi - 1)
        slower_s: dict[int, float] = {}
        for c in fine:
            if first <= c <= last:
                left_s = total[c] - total[lo]
                right_s = total[hi] - total[c]
                slower_s[c] = max(left_s, right_s)
        balanced_s = min(slower_s.values())
        allowed_s = balanced_s * (1 + PAPER.imbalance)
        allowed = [c for c in slower_s if slower_s[c] <= allowed_s]
        bounds[s] = min(allowed, key=lambda c: (crossing[c], slower_s[c]))
    return tuple(bounds)
