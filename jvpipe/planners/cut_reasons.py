"""Why each cut is where it is: what would happen one layer further."""

from itertools import pairwise

from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import StageCost, stage_cost
from jvpipe.util.sizes import format_bytes


def cut_reasons(problem: Problem, decision: Decision) -> list[str]:
    """A line for each cut, from the first to the last: why its layer is on this side."""
    bounds = decision.bounds
    stages = [
        stage_cost(problem, s, i, j, decision.choices) for s, (i, j) in enumerate(pairwise(bounds))
    ]
    return [_reason(problem, decision, stages, s) for s in range(1, len(stages))]


def device_reasons(problem: Problem) -> list[str]:
    """A line that says how devices differ, in the order in which a micro-batch passes them; none if
    they are alike.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (Option(0),)),) * 4)
    >>> problem = Problem(costs, 2, find_schedule("1f1b"), 4).told_apart([(), (2.0,) * 4], [24 * 2**30, 11 * 2**30])
    >>> device_reasons(problem)
    ['micro-batches pass device 0: 24.00 GiB; device 1: 11.00 GiB, layers take 2.00 times as long']
    """
    reasons = []
    for place, group in enumerate(problem.groups):
        limit = problem.limit_of(place)
        times = group.mean_slowness
        facts = [] if limit is None else [format_bytes(limit)]
        facts += [f"layers take {times:.2f} times as long"] if group.slowness else []
        reasons.append(
            f"{problem.name_of(place)}: {', '.join(facts)}" if facts else problem.name_of(place)
        )
    return [f"micro-batches pass {'; '.join(reasons)}"] if reasons else []


def _reason(problem: Problem, decision: Decision, stages: list[StageCost], s: int) -> str:
    """Why the first layer of stage `s` is not the last of the stage before."""
    (i, j, k), costs = decision.bounds[s - 1 : s + 2], problem.costs
    layer = costs.ids[j] if costs.ids else j
    head = f"layer {layer} ({costs.layers[j].name}) goes to stage {s} because "
    if any(min(group) <= j <= max(group) and max(group) > j for group in problem.together):
        return head + "it must share a stage with later layers"
    if k - j == 1:
        return head + f"stage {s} needs a layer"
    slowest_s = max(c.seconds for c in stages)
    # The layer moves to another run of layers, where it cannot go on without an input.
    choices = [c if n != j or c >= 0 else 0 for n, c in enumerate(decision.choices)]
    before = stage_cost(problem, s - 1, i, j + 1, choices)
    limit = problem.limit_of(problem.places[s - 1])
    if limit is not None and before.peak_bytes > limit:
        return head + (
            f"stage {s - 1} would hold {format_bytes(before.peak_bytes)} with it, the limit is {format_bytes(limit)}"
        )
    if before.seconds > slowest_s:
        return head + (
            f"stage {s - 1} would take {1e3 * before.seconds:.2f} ms with it, more than the slowest stage's "
            f"{1e3 * slowest_s:.2f} ms"
        )
    here = stages[s].seconds
    ours = stages[s - 1].seconds
    if before.seconds > max(here, ours):
        return (
            head
            + f"the larger of stages {s - 1} and {s} would grow to {1e3 * before.seconds:.2f} ms"
        )
    return head + "the step would not be faster with it on the stage before"
