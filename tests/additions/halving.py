"""Half of the layers that are left for each stage, everything kept."""

from jvpipe.planners.model.problem import Decision, Problem


def halving(problem: Problem) -> Decision:
    """Halves what is left; at least a layer stays for each stage to come."""
    layers, bounds = len(problem.costs.layers), [0]
    for s in range(problem.stages - 1):
        left = layers - bounds[-1]
        bounds.append(bounds[-1] + max(1, min(left // 2, left - (problem.stages - 1 - s))))
    return Decision.keeping_all([*bounds, layers])
