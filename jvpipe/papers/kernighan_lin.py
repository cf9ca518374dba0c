"""vPipe's cut search: coarsen on backbone vertices, recursive Kernighan-Lin bisection, refinement (Zhao et al., 2022).

Stages are contiguous in the order of the layers, and so are the two sides of every bisection: the only vertices that
may change sides are those at the bound. A pass of Kernighan-Lin, which exchanges vertices until all are locked and
keeps the best state that it went through, is then a walk of the bound, and its result is the best of the bounds that
it passes: the fewest bytes cut, of those that balance the sides' seconds within a tolerance.
"""

from collections.abc import Sequence
from itertools import pairwise

from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.segments import OverJ, Segments

BALANCE_TOLERANCE = 0.1
"""How far a side's seconds may be from its share, in seconds of a mean stage."""
HEAVIEST_VERTEX = 0.25
"""How heavy a coarse vertex may be, in the same unit; a nest that is heavier is not merged as a whole."""


def initial_bounds(segments: Segments) -> tuple[int, ...]:
    """Bounds of the stages, rising from 0 to the number of layers: few bytes are cut, seconds are balanced."""
    problem = segments.problem
    total, crossing = segments.compute_s, segments.crossing_bytes
    mean_s = float(total[-1]) / problem.stages
    fine: list[int] = segments.cuts.tolist()
    coarse = coarse_bounds(problem, fine, total, HEAVIEST_VERTEX * mean_s)

    def bisect(lo: int, hi: int, stages: int) -> list[int]:
        """The bounds after `lo` of the stages between two bounds.

        Args:
            lo: the layer that the first of them begins with.
            hi: the layer after the last one's last.
            stages: how many.
        """
        if stages == 1:
            return [hi]
        left = stages // 2
        share = total[lo] + (total[hi] - total[lo]) * left / stages
        for bounds in (coarse, fine):
            # Each side needs as many fine vertices as it has stages.
            inside = [b for b in fine if lo <= b <= hi]
            able = set(inside[left : len(inside) - (stages - left)])
            middles = [b for b in bounds if b in able]
            if middles:
                break
        nearest = min(abs(total[b] - share) for b in middles)
        balanced = [
            b for b in middles if abs(total[b] - share) <= max(nearest, BALANCE_TOLERANCE * mean_s)
        ]
        middle = min(balanced, key=lambda b: (crossing[b], abs(total[b] - share)))
        return bisect(lo, middle, left) + bisect(middle, hi, stages - left)

    return refine([0, *bisect(0, fine[-1], problem.stages)], fine, coarse, total, crossing)


def coarse_bounds(
    problem: Problem, fine: Sequence[int], total: OverJ, heaviest_s: float
) -> list[int]:
    """Finds the bounds of the coarse graph's vertices.

    A backbone vertex is a layer that no edge passes by; what lies between two of them is a nest, merged into one
    vertex, or into several where its seconds would be more than `heaviest_s`. `total` are running seconds.

    Args:
        problem: what is to be planned.
        fine: where the model may be cut.
        total: running seconds.
        heaviest_s: what a vertex takes at most, if it can be divided.
    """
    layers = len(problem.costs.layers)
    passed_by = [0] * (layers + 1)  # differences, of how many edges pass by each layer
    for edge in problem.costs.edges:
        passed_by[edge.producer + 1] += 1
        passed_by[max(edge.producer + 1, *edge.readers)] -= 1
    backbone, depth = set(), 0
    for layer in range(layers):
        depth += passed_by[layer]
        if depth == 0:
            backbone.add(layer)
    vertices = [0]
    for b, after in pairwise(fine[1:]):
        beside_backbone = b in backbone or b - 1 in backbone
        if beside_backbone or total[after] - total[vertices[-1]] > heaviest_s:
            vertices.append(b)
    return [*vertices, fine[-1]]


def refine(
    bounds: list[int], fine: Sequence[int], coarse: Sequence[int], total: OverJ, crossing: OverJ
) -> tuple[int, ...]:
    """Walks each bound between the coarse vertices beside it, layer by layer, to where it cuts fewest bytes.

    The slower of the two stages beside it may be slower by the tolerance than where they balance best.

    Args:
        bounds: of the stages; they are moved.
        fine: where the model may be cut.
        coarse: the bounds of the coarse vertices.
        total: running seconds.
        crossing: bytes that cross a cut at each layer.
    """
    for s in range(1, len(bounds) - 1):
        lo, b, hi = bounds[s - 1 : s + 2]
        first = max([c for c in coarse if lo < c < b], default=lo + 1)
        last = min([c for c in coarse if b < c < hi], default=hi - 1)
        slower = {
            c: max(total[c] - total[lo], total[hi] - total[c]) for c in fine if first <= c <= last
        }
        enough = min(slower.values()) * (1 + BALANCE_TOLERANCE)
        bounds[s] = min(
            (c for c in slower if slower[c] <= enough), key=lambda c: (crossing[c], slower[c])
        )
    return tuple(bounds)
