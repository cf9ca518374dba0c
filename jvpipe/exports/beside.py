"""A plan of others beside ours, on the costs that ours was made with: simulated seconds and bytes."""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from jvpipe.cost.costs import Costs
from jvpipe.ir.plan import Fate, Plan
from jvpipe.planners.model.forecast import simulated_step_s
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision, Problem
from jvpipe.planners.model.stage_cost import device_bytes, evaluate
from jvpipe.schedules import find_schedule
from jvpipe.schedules.auto import given


@dataclass(frozen=True, slots=True)
class Judged:
    """What a plan takes: seconds of a step, and the bytes of its fullest device."""

    step_s: float
    peak_bytes: int


def judged(problem: Problem, plan: Plan) -> Judged:
    """Simulates a plan of any layout.

    Args:
        problem: whose layers, links and micro-batches count.
        plan: whose stages and order count.

    Raises:
        ValueError: the layers have no choice with its fates.
    """
    schedule = given(plan.tasks) if plan.tasks else find_schedule(plan.schedule or "1f1b")
    own = replace(problem, stages=len(plan.stages), schedule=schedule)
    cost = evaluate(own, decision_of(problem.costs, plan)).stages
    return Judged(simulated_step_s(own, cost), max(device_bytes(own, cost)))


def decision_of(costs: Costs, plan: Plan) -> Decision:
    """The decision that a plan comes of, as planners hold it."""
    bounds = tuple(accumulate(plan.cuts, initial=0))
    choices = []
    for (i, j), stage in zip(pairwise(bounds), plan.stages, strict=True):
        dropped = {name: fate for name, fate in stage.fates.items() if fate != Fate.KEEP}
        choices += [_choice(costs, layer, dropped) for layer in range(i, j)]
    return Decision(bounds, tuple(choices))


def _choice(costs: Costs, layer: int, dropped: dict[str, Fate]) -> int:
    """A layer's choice: an option, or its forward once more, from its input or from that of the layer before."""
    options = costs.layers[layer].options
    known = {name for option in options for name in option.fates}
    fates = {name: fate for name, fate in dropped.items() if name in known}
    into = [x.name for x in costs.edges if x.producer == layer - 1 and layer in x.readers]
    out = [x.name for x in costs.edges if x.producer == layer]
    if any(dropped.get(name) == Fate.RECOMPUTE for name in into):
        return RECOMPUTE_CHAIN
    if any(dropped.get(name) == Fate.RECOMPUTE for name in out):
        return RECOMPUTE  # whoever reads what it makes has it made once more
    for number, option in enumerate(options):
        if dict(option.fates) == fates:
            return number
    raise ValueError(f"layer {layer} ({costs.layers[layer].name}) has no choice with fates {fates}")


def beside(name: str, theirs: Judged, ours: Judged) -> str:
    """The line that tells two plans apart.

    Args:
        name: of their format.
        theirs: what their plan takes.
        ours: what ours takes.

    >>> beside("megatron", Judged(0.5, 4 * 2**30), Judged(0.4, 3 * 2**30))
    'megatron: 500.00 ms, 4.00 GiB; jvpipe: 400.00 ms, 3.00 GiB; gain 100.00 ms (20.0%), 1.00 GiB'
    """
    saved_s, saved = theirs.step_s - ours.step_s, theirs.peak_bytes - ours.peak_bytes
    share = saved_s / theirs.step_s if theirs.step_s else 0.0
    return (
        f"{name}: {_told(theirs)}; jvpipe: {_told(ours)}; gain {1e3 * saved_s:.2f} ms ({share:.1%}), "
        f"{saved / 2**30:.2f} GiB"
    )


def _told(judged: Judged) -> str:
    return f"{1e3 * judged.step_s:.2f} ms, {judged.peak_bytes / 2**30:.2f} GiB"
