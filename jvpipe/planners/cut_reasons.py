"""Explains the place of each cut: what would happen if the cut were one layer later.

With the later cut, the first layer of a stage would be the last layer of the stage before.
`_reason` gives the first of these reasons that applies, or else says that the planner chose so:

    the layer must share a stage with later layers, or is the only layer of its stage
    the stage before would exceed its memory limit
    the stage before would take longer than the slowest stage takes now
    the stage before would take longer than the slower of the two stages takes now

If devices have several stages, the seconds and bytes are those of devices.
"""

import numpy as np

from jvpipe.planners.model.problem import RECOMPUTE, Decision, Problem
from jvpipe.planners.model.stage_cost import Stages, device_bytes, evaluate_decision, stage_cost
from jvpipe.util.sizes import ROUNDING, format_bytes


def cut_reasons(problem: Problem, decision: Decision) -> list[str]:
    """Explains each cut in a line, first to last: why the cut does not lie one layer later.

    Args:
        problem: the problem that the plan solves.
        decision: the cuts and fates of the plan.
    """
    stages = evaluate_decision(problem, decision).stages
    return [_reason(problem, decision, stages, s) for s in range(1, len(stages))]


def device_reasons(problem: Problem) -> list[str]:
    """Describes in a line the devices of all places, in the order in which micro-batches pass them.

    The list is empty if the problem has no groups: each place has one device, and all are alike.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (Option(0),)),) * 4)
    >>> problem = Problem(costs, 2, find_schedule("1f1b"), 4)
    >>> problem = problem.told_apart([(), (2.0,) * 4], [24 * 2**30, 11 * 2**30])
    >>> device_reasons(problem)
    ['micro-batches pass device 0: 24.00 GiB; device 1: 11.00 GiB, layers take 2.00 times as long']
    """
    reasons = []
    for place, group in enumerate(problem.groups):
        limit = problem.limit_of(place)
        facts = [] if limit is None else [format_bytes(limit)]
        if group.slowness:
            facts.append(f"layers take {group.mean_slowness:.2f} times as long")
        name = problem.name_of(place)
        reasons.append(f"{name}: {', '.join(facts)}" if facts else name)
    return [f"micro-batches pass {'; '.join(reasons)}"] if reasons else []


def _reason(
    problem: Problem,
    decision: Decision,
    stages: Stages,
    s: int,
) -> str:
    """Explains why the first layer of stage `s` is not the last layer of the stage before."""
    # The stage before has layers [i, j), and stage s has [j, k). The cut moves from j to j + 1.
    i, j, k = decision.bounds[s - 1 : s + 2]
    costs = problem.costs
    layer = costs.ids[j] if costs.ids else j
    head = f"layer {layer} ({costs.layers[j].name}) goes to stage {s} because "
    if any(min(group) <= j < max(group) for group in problem.together):
        return head + "it must share a stage with later layers"
    if k - j == 1:
        return head + f"stage {s} needs a layer"
    # If layer j has a negative choice, it is recomputed, perhaps together with the layers after
    # it. The moved cut would separate layer j from these. To keep it simple, layer j is counted
    # as keeping its values, and layer j + 1 at least as keeping its input.
    choices = list(decision.choices)
    choices[j] = max(choices[j], 0)
    choices[j + 1] = max(choices[j + 1], RECOMPUTE)
    before = stage_cost(problem, s - 1, i, j + 1, choices)
    place, next_place = problem.places[s - 1 : s + 1]
    limit = problem.limit_of(place)
    moved = [*stages[: s - 1], before, *stages[s:]]
    if next_place == place:  # both stages are on one device, which keeps the layer
        moved[s] = stage_cost(problem, s, j + 1, k, choices)
    several = problem.schedule.chunks > 1
    name = problem.name_of if several else "stage {}".format
    who = name(s - 1)
    held_bytes = device_bytes(problem, moved)[place]
    if limit is not None and held_bytes > limit:
        size, allowed = format_bytes(held_bytes), format_bytes(limit)
        return f"{head}{who} would hold {size} with it, the limit is {allowed}"
    now_s = _busy_s(problem, stages)
    moved_s = _busy_s(problem, moved)[place]
    would = f"would take {1e3 * moved_s:.2f} ms"
    longer_s = moved_s * (1 - ROUNDING)  # a difference as small as rounding errors is not a reason
    slowest_s = max(now_s)
    if longer_s > slowest_s:
        kind = "device" if several else "stage"
        slowest = f"the slowest {kind}'s {1e3 * slowest_s:.2f} ms"
        return f"{head}{who} {would} with it, more than {slowest}"
    slower_s = max(now_s[place], now_s[next_place])
    if longer_s > slower_s:
        now = f"now {1e3 * slower_s:.2f} ms"
        return f"{head}the slower of {who} and {name(s)} {would}, {now}"
    # Only a simulation would show whether the step would be longer.
    return f"{head}the planner chose so: {who} could hold it, and {would}"


def _busy_s(problem: Problem, stages: Stages) -> list[float]:
    """Returns each device's seconds per micro-batch: the sum over its stages, which take turns."""
    return np.bincount(problem.places, [stage.seconds for stage in stages]).tolist()
