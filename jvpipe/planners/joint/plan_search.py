"""jvpipe's own planner: chooses cuts and fates together, for the fastest step under a memory limit.

Only the simulator knows how long devices wait for each other, but it is too slow for many plans.
The surrogate is a closed form that estimates the seconds of a step from those of its stages. So the
planner has two steps:

    1. Find the best plans by the surrogate, among all cuts and fates (`surrogate.py`).
    2. Simulate these plans, plans with simpler cuts (such as even ones), and neighbors of the
       fastest plans (`climb.py`). The fastest simulated plan is the answer.

How much is tried is set by `PLAN` and `CUTS` in `effort.py`, which may be changed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jvpipe.cost.costs import LayerCost
from jvpipe.cost.hardware import Link
from jvpipe.planners.joint.cap_search import Solution
from jvpipe.planners.joint.choice_arrays import Choices
from jvpipe.planners.joint.climb import Climb
from jvpipe.planners.joint.device_fates import DeviceFates
from jvpipe.planners.joint.effort import PLAN, RULE
from jvpipe.planners.joint.lot import cells
from jvpipe.planners.joint.smallest_limit import nothing_fits
from jvpipe.planners.joint.surrogate import pricing_of, solve, trips, within_host_limit
from jvpipe.planners.model.even import balanced, even
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_bytes import option_bytes
from jvpipe.planners.model.stage_cost import evaluate_decision


def jvpipe(
    problem: Problem,
    refine: bool = True,
    begin: Sequence[Decision] = (),
) -> Decision:
    """Searches for the plan with the fewest simulated seconds per step.

    Args:
        problem: the problem to plan for; its schedule does not change.
        refine: whether plans are simulated; if not, the surrogate's best plan is returned.
        begin: further plans to begin from, which must keep the limits.

    Raises:
        Infeasible: no plan fits; the error names a limit that suffices.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> keep, again = Option(kept_bytes=100), Option(kept_bytes=0, extra_s=1.0, extra_bytes=100)
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (keep, again)),) * 4)
    >>> problem = Problem(costs, 2, find_schedule("1f1b"), microbatches=8, memory_limit_bytes=350)
    >>> jvpipe(problem)
    Decision(bounds=(0, 2, 4), choices=(-1, 0, 0, 0))
    """
    kept = _kept_best(problem, refine, begin)
    if kept is not None and _fits(problem, kept):
        return kept
    return _simulated_best(problem, begin, kept) if refine else _surrogate_best(problem)


def _fits(
    problem: Problem,
    decision: Decision,
    share: float = 1,
) -> bool:
    """Tells whether a decision needs at most `share` times the limit; False without a limit."""
    limit = problem.memory_limit_bytes
    if limit is None:
        return False
    return evaluate_decision(problem, decision).limit_bytes <= share * limit


def _kept_best(
    problem: Problem,
    refine: bool,
    begin: Sequence[Decision],
) -> Decision | None:
    """Finds the best plan without a limit, which keeps everything.

    If this plan keeps the limit, it is the result, because no other fates are faster. If not, the
    search begins with its cuts, among others.

    Returns:
        The plan; None if there is no limit, or if the plan is probably far over the limit.
    """
    if problem.memory_limit_bytes is None:
        return None
    unlimited = problem.unlimited
    are_many = len(problem.costs.layers) > PLAN.hasty_layers
    # For many layers, the surrogate also takes long. It is used only if the plan that has even cuts
    # and keeps everything fits.
    if are_many and not _fits(problem, even(problem)):
        return None
    # Simulating takes longer still: plans are simulated only if the surrogate's best nearly fits.
    if not _fits(problem, jvpipe(unlimited, refine=False), PLAN.near_limit):
        return None
    return jvpipe(unlimited, refine, begin)


def _surrogate_best(problem: Problem) -> Decision:
    """Returns the surrogate's best plan, or raises `Infeasible`."""
    pricing = pricing_of(problem)
    solution = within_host_limit(problem, solve(problem, pricing))
    if solution.feasible:
        return solution.decision()
    if problem.host_limit_bytes is not None:
        pricing = pricing_of(problem, swaps=False)
    raise nothing_fits(pricing)


def _swaps_may_help(problem: Problem, plain: Solution) -> bool:
    """Tells whether plans with swaps are worth a separate search.

    There must be a limit and a choice that swaps. For models of many layers there is a further
    condition: no plan without swaps fits, or the slowest stage of the best one takes clearly more
    than its even share of the work.

    Args:
        problem: the problem to plan for.
        plain: the surrogate's best plans without swaps.
    """
    if problem.memory_limit_bytes is None or not Choices.of(problem.costs).swapped_bytes.any():
        return False
    if len(problem.costs.layers) <= PLAN.hasty_layers or not plain.feasible:
        return True
    table = plain.table
    slowest_s = max(map(table.seconds, cells(plain.paths[0])))
    return slowest_s > PLAN.imbalance * table.pricing.segments.share_s


def _simulated_best(
    problem: Problem, others: Sequence[Decision], kept: Decision | None
) -> Decision:
    """Returns the fastest simulated plan: the surrogate's, one with simple cuts, or a neighbor.

    Fates are chosen without swaps. If swaps may help, fates are also chosen with swaps, as if the
    link to the host were slower (`crowded`). With many layers, swaps are also nearly free
    (`frugal`), because then no climb makes up for a link that is less crowded than that.

    Args:
        problem: the problem to plan for.
        others: further plans to begin from.
        kept: the best plan without a limit, if it was searched.
    """
    plain = pricing_of(problem, swaps=False)
    pricings = [plain]
    solutions = [solve(problem, plain)]
    are_few = len(problem.costs.layers) <= PLAN.hasty_layers
    if _swaps_may_help(problem, solutions[0]):
        for timed in [crowded(problem)] if are_few else [crowded(problem), frugal(problem)]:
            pricings.append(pricing_of(timed))
            solutions.append(within_host_limit(timed, solve(timed, pricings[-1])))
    begin = list(others)
    for solution in solutions:
        begin += map(solution.decision, solution.paths[: PLAN.paths])
    if not begin:
        raise nothing_fits(pricings[-1] if problem.host_limit_bytes is None else plain)
    # Devices wait for round trips, which the surrogate leaves out.
    begin += trips(problem, plain)
    ways = [DeviceFates(pricing) for pricing in pricings]
    # Without a limit, neighbors cost little.
    around = RULE.around if are_few and problem.memory_limit_bytes is None else 0
    climb = Climb(problem, ways, PLAN.tasks, around=around)
    if are_few:
        for bounds in _plain_cuts(problem, None if others else kept):
            begin += climb.refitted(bounds)
    return climb.top(begin) or begin[0]


def crowded(problem: Problem) -> Problem:
    """Returns the problem with a slower link to the host, for choosing fates that may swap.

    `PlanEffort.host_crowding` in `effort.py` explains why.
    """
    host = Link(problem.host.bytes_per_s / PLAN.host_crowding, problem.host.latency_s)
    return replace(problem, host=host)


def frugal(problem: Problem) -> Problem:
    """Returns the problem with a small price on swaps, for choosing fates that may swap.

    Swaps are free for the surrogate if they are hidden behind work, so that many fates are equally
    fast. But at the ends of a step, nothing hides them. With the price, those of the equally fast
    fates are chosen that swap the least.
    """

    def priced(layer: LayerCost) -> LayerCost:
        options = []
        for option in layer.options:
            swap_s = 2 * problem.host.seconds(option_bytes(layer, option).swapped)
            extra_s = option.extra_s + PLAN.swap_price * swap_s
            options.append(replace(option, extra_s=extra_s))
        return replace(layer, options=tuple(options))

    layers = tuple(map(priced, problem.costs.layers))
    return replace(problem, costs=replace(problem.costs, layers=layers))


def _plain_cuts(problem: Problem, kept: Decision | None) -> Iterator[tuple[int, ...]]:
    """Yields even cuts, cuts of equal work, and, under a limit, the best cuts without a limit.

    Args:
        problem: the problem to plan for.
        kept: the best plan without a limit, if it was searched.
    """
    yield even(problem).bounds
    yield balanced(problem)
    if problem.memory_limit_bytes is not None:
        yield (kept or jvpipe(problem.unlimited)).bounds
