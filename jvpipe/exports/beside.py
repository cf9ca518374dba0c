"""Compares another system's plan with jvpipe's, by simulating both with the same costs.

The other system's plan is read from a file in one of the formats of this folder.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from jvpipe.cost.costs import Costs
from jvpipe.exports.format import not_kept
from jvpipe.ir.plan import Fate, Plan
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision, Problem
from jvpipe.planners.model.stage_cost import device_bytes, evaluate_decision
from jvpipe.planners.model.stage_simulation import simulated_step_s
from jvpipe.schedules import find_schedule
from jvpipe.schedules.auto import given_lists, read_lines
from jvpipe.util.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class Judged:
    """The simulated seconds of a plan's step, and the peak bytes of the fullest device."""

    step_s: float
    peak_bytes: int


def judged(problem: Problem, plan: Plan, state_s: float = 0.0) -> Judged:
    """Simulates a step of a plan from any system.

    Args:
        problem: the costs of layers and links, and the number of micro-batches. The plan's stages
            and schedule replace the problem's.
        plan: the stages, with a schedule or with a list of tasks for each device.
        state_s: the seconds per step of copies of the optimizer's state.

    Raises:
        ValueError: the costs of a layer have no option with the fates that the plan gives it.
    """
    name = plan.schedule or "1f1b"
    schedule = given_lists(read_lines(plan.tasks)) if plan.tasks else find_schedule(name)
    plan_problem = replace(
        problem,
        stages=len(plan.stages),
        schedule=schedule,
    )
    decision = decision_of(problem.costs, plan)
    stages = evaluate_decision(plan_problem, decision).stages
    step_s = simulated_step_s(plan_problem, stages) + state_s
    return Judged(step_s, max(device_bytes(plan_problem, stages)))


def decision_of(costs: Costs, plan: Plan) -> Decision:
    """Translates a plan into a planner's decision: the cuts, and a choice for each layer.

    Raises:
        ValueError: the costs of a layer have no option with the fates that the plan gives it.
    """
    bounds = tuple(accumulate(plan.cuts, initial=0))
    ranges = pairwise(bounds)
    choices = []
    for (first, end), stage in zip(ranges, plan.stages, strict=True):
        dropped = not_kept(stage.fates)
        choices += [_choice(costs, layer, dropped) for layer in range(first, end)]
    return Decision(bounds, tuple(choices))


def _choice(
    costs: Costs,
    layer: int,
    dropped: dict[str, Fate],
) -> int:
    """Returns the choice for a layer: the number of an option, or one of two ways to recompute it.

    An option assigns a fate to each value of its layer.

    Args:
        costs: the costs of all layers.
        layer: the number of the layer.
        dropped: the fates of those values in the layer's stage that are not kept, by name.
    """
    edges = costs.edges
    before = [edge for edge in edges if edge.producer == layer - 1]
    inputs = [edge.name for edge in before if layer in edge.readers]
    outputs = [edge.name for edge in edges if edge.producer == layer]
    # If the layer's input is recomputed, the previous layer runs its forward again to make the
    # input. Then this layer runs its forward again, too.
    if any(dropped.get(name) == Fate.RECOMPUTE for name in inputs):
        return RECOMPUTE_CHAIN
    # If only the layer's output is recomputed, its forward runs again from the kept input.
    if any(dropped.get(name) == Fate.RECOMPUTE for name in outputs):
        return RECOMPUTE
    options = costs.layers[layer].options
    names = {name for option in options for name in option.fates}
    fates = {name: fate for name, fate in dropped.items() if name in names}
    for number, option in enumerate(options):
        if dict(option.fates) == fates:
            return number
    name = costs.layers[layer].name
    raise ValueError(f"layer {layer} ({name}) has no choice with fates {fates}")


def beside(name: str, theirs: Judged, ours: Judged) -> str:
    """Writes a line that compares two plans.

    Args:
        name: the name of the format that the other plan was read from.
        theirs: the cost of the other system's plan.
        ours: the cost of jvpipe's plan.

    >>> beside("megatron", Judged(0.5, 4 * 2**30), Judged(0.4, 3 * 2**30))
    'megatron: 500.00 ms, 4.00 GiB; jvpipe: 400.00 ms, 3.00 GiB; gain 100.00 ms (20.0%), 1.00 GiB'
    """
    saved_s = theirs.step_s - ours.step_s
    saved_bytes = theirs.peak_bytes - ours.peak_bytes
    gain = Judged(saved_s, saved_bytes)
    share = saved_s / theirs.step_s if theirs.step_s else 0.0
    parts = (
        f"{name}: {_ms(theirs)}, {format_bytes(theirs.peak_bytes)}",
        f"jvpipe: {_ms(ours)}, {format_bytes(ours.peak_bytes)}",
        f"gain {_ms(gain)} ({share:.1%}), {format_bytes(gain.peak_bytes)}",
    )
    return "; ".join(parts)


def _ms(cost: Judged) -> str:
    """Writes the seconds of a step."""
    return f"{1e3 * cost.step_s:.2f} ms"
