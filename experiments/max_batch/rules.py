"""Under which rules a planner of the tables works: what it may change, and what it believes a stage
to hold.
"""

from collections.abc import Callable
from dataclasses import replace

from jvpipe.cost.costs import Costs, LayerCost, Shared
from jvpipe.papers.dawnpiper import try_dawnpiper as dawnpiper
from jvpipe.papers.gpipe_cuts import gpipe_cuts
from jvpipe.papers.pipedream_cuts import pipedream
from jvpipe.papers.vpipe import try_vpipe as vpipe
from jvpipe.planners.joint.smallest_limit import min_bytes_plan
from jvpipe.planners.joint.surrogate import pricing_of
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate_decision

BELIEVING = ("pipedream", "vpipe", "dawnpiper")
"""Planners whose papers tell what they believe a stage to hold."""


def keeping_all(costs: Costs) -> Costs:
    """Costs in which nothing can be swapped or computed again: what layers keep is bound to their
    stage.
    """
    kept = tuple(
        Shared((i,), x.options[0].kept_bytes + x.input_bytes) for i, x in enumerate(costs.layers)
    )
    layers = (
        replace(x, options=(replace(x.options[0], kept_bytes=0),), input_bytes=0)
        for x in costs.layers
    )
    return replace(costs, layers=tuple(layers), shared=costs.shared + kept)


def believed(problem: Problem, planner: str) -> Problem:
    """A problem as a paper's memory model counts bytes.

    vPipe counts parameters by version and activations by micro-batch in flight, and nothing that a
    layer needs while it runs. DawnPiper counts all that a stage holds as often as it has
    micro-batches in flight (equation 2): of gradients and optimizer state there are then as many
    copies as of parameters. PipeDream, as it was measured, balances seconds and knows of no limit.
    """
    if planner == "pipedream":
        return replace(problem, memory_limit_bytes=None)
    counted = {"vpipe": _without_temporaries, "dawnpiper": _all_by_version}.get(
        planner, lambda layer: layer
    )
    return replace(
        problem, costs=replace(problem.costs, layers=tuple(map(counted, problem.costs.layers)))
    )


def decided(problem: Problem, planner: str, optimized: bool) -> Decision | None:
    """A planner's decision; without memory optimization everything is kept. None if it finds
    nothing that fits.
    """
    asked = problem if optimized else replace(problem, costs=keeping_all(problem.costs))
    found = ATTEMPTS[planner](asked)
    return found if optimized or found is None else Decision.keeping_all(found.bounds)


def _joint(problem: Problem) -> Decision | None:
    """jvpipe's planner finds something wherever the plan of fewest bytes fits, which takes less
    time.
    """
    plan = min_bytes_plan(pricing_of(problem))
    fits = plan.bytes <= (problem.memory_limit_bytes or 0)
    return plan.decision if fits else None


def _unless_infeasible(
    planner: Callable[[Problem], Decision],
) -> Callable[[Problem], Decision | None]:
    def attempt(problem: Problem) -> Decision | None:
        try:
            return planner(problem)
        except Infeasible:
            return None

    return attempt


ATTEMPTS: dict[str, Callable[[Problem], Decision | None]] = {
    "gpipe": _unless_infeasible(gpipe_cuts),
    "pipedream": _unless_infeasible(pipedream),
    "vpipe": vpipe,
    "dawnpiper": dawnpiper,
    "jvpipe": _joint,
}
"""What planners decide, None if nothing; to name a limit that would do takes some of them twelve
times as long.
"""


def fits(problem: Problem, planner: str, optimized: bool) -> bool:
    """Whether the planner finds a plan that fits in truth, told the truth or believing its own
    memory model.
    """
    told = _fits(problem, problem, planner, optimized)
    return told or (planner in BELIEVING and fits_as_believed(problem, planner, optimized))


def fits_as_believed(problem: Problem, planner: str, optimized: bool) -> bool:
    """Whether the plan that the planner finds by its own memory model fits in truth."""
    return _fits(problem, believed(problem, planner), planner, optimized)


def claims(problem: Problem, planner: str, optimized: bool) -> bool:
    """Whether a plan fits by the planner's own memory model."""
    return decided(believed(problem, planner), planner, optimized) is not None


def _fits(problem: Problem, told: Problem, planner: str, optimized: bool) -> bool:
    decision = decided(told, planner, optimized)
    limit = problem.memory_limit_bytes
    return decision is not None and (
        limit is None or evaluate_decision(problem, decision).peak_bytes <= limit
    )


def _without_temporaries(layer: LayerCost) -> LayerCost:
    options = tuple(replace(option, extra_bytes=0) for option in layer.options)
    return replace(layer, options=options, temporary_bytes=0)


def _all_by_version(layer: LayerCost) -> LayerCost:
    total = layer.parameter_bytes + layer.gradient_bytes + layer.optimizer_bytes
    return replace(layer, parameter_bytes=total, gradient_bytes=0, optimizer_bytes=0)
