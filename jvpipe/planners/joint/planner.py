"""jvpipe's own planner: cuts and fates jointly, for the fastest step under the memory limit.

The surrogate of `stage_cost.py` is solved first (`surrogate.py`, `cap_search.py`): given the least
seconds t of each segment, the best cuts are shortest paths under caps, and t is found only where a
path asks for it. The surrogate of a synchronous schedule is not the step: the best paths, the cuts
of other planners and their neighbours are simulated (`climb.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from jvpipe.cost.hardware import Link
from jvpipe.planners.joint.choice_arrays import Choices
from jvpipe.planners.joint.climb import Climb
from jvpipe.planners.joint.device_fates import DeviceFates
from jvpipe.planners.joint.effort import PLAN
from jvpipe.planners.joint.segment_table import cells
from jvpipe.planners.joint.smallest_limit import nothing_fits
from jvpipe.planners.joint.surrogate import Solution, pricing_of, solve, trips, within_host_limit
from jvpipe.planners.model.even import balanced, even
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.stage_cost import check, evaluate_decision


def jvpipe(
    problem: Problem,
    refine: bool = True,
    begin: Sequence[Decision] = (),
) -> Decision:
    """Finds the plan of the fewest simulated seconds per step.

    Args:
        problem: what is to be planned.
        refine: whether plans are simulated; if not, the surrogate's optimum is the answer.
        begin: plans that keep the limits, of which the search also begins.

    Raises:
        Infeasible: nothing fits; with the smallest limit that would do.

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
        best = kept
    elif refine:
        best = _simulated_best(problem, begin, kept)
    else:
        best = _surrogate_best(problem)
    check(problem, best)
    return best


def _fits(
    problem: Problem,
    decision: Decision,
    share: float = 1,
) -> bool:
    """Tells whether a decision keeps so many times the limit; without a limit none does."""
    limit = problem.memory_limit_bytes
    if limit is None:
        return False
    return evaluate_decision(problem, decision).limit_bytes <= share * limit


def _kept_best(
    problem: Problem,
    refine: bool,
    begin: Sequence[Decision],
) -> Decision | None:
    """Finds the plan without a limit, which keeps everything, if it may keep the limit.

    No fates are faster than that. With many layers, it is looked for if even cuts keep the limit.

    Returns:
        None if there is no limit, or if it is not nearly kept.
    """
    if problem.memory_limit_bytes is None:
        return None
    are_many = len(problem.costs.layers) > PLAN.hasty_layers
    if are_many and not _fits(problem, even(problem)):
        return None
    hasty = jvpipe(problem.unlimited, refine=False)
    # The simulated plan of no limit is asked for only where the surrogate's nearly fits.
    if not _fits(problem, hasty, PLAN.near_limit):
        return None
    return jvpipe(problem.unlimited, refine, begin)


def _surrogate_best(problem: Problem) -> Decision:
    pricing = pricing_of(problem)
    solution = within_host_limit(problem, solve(problem, pricing))
    if solution.feasible:
        return solution.decision()
    if problem.host_limit_bytes is not None:
        pricing = pricing_of(problem, swaps=False)
    raise nothing_fits(pricing)


def _swaps_may_help(problem: Problem, plain: Solution) -> bool:
    """Tells whether a plan without swaps leaves much to gain; of few layers, whether any."""
    if problem.memory_limit_bytes is None or not Choices.of(problem.costs).swapped_bytes.any():
        return False
    if len(problem.costs.layers) <= PLAN.hasty_layers or not plain.feasible:
        return True
    best = plain.result.paths[0]
    slowest_s = max(plain.table.parts_s(cell)[0] for cell in cells(best))
    share_s = plain.table.pricing.segments.share_s
    return slowest_s > PLAN.imbalance * share_s


def _simulated_best(
    problem: Problem, others: Sequence[Decision], kept: Decision | None
) -> Decision:
    """Returns the fastest simulated plan among paths, plain cuts, and their neighbours.

    Fates are chosen without swaps, and with swaps as if the link to the host were slow.

    Args:
        problem: what is to be planned.
        others: of which the search also begins.
        kept: the plan of no limit, if it is known.
    """
    plain = pricing_of(problem, swaps=False)
    solutions = [solve(problem, plain)]
    pricings = [plain]
    if _swaps_may_help(problem, solutions[0]):
        slower = crowded(problem)
        pricings.append(pricing_of(slower))
        solutions.append(within_host_limit(slower, solve(slower, pricings[1])))
    begin = list(others)
    for solution in solutions:
        best = solution.result.paths[: PLAN.paths]
        begin += [solution.decision(path) for path in best]
    if not begin:
        raise nothing_fits(pricings[-1] if problem.host_limit_bytes is None else plain)
    # The surrogate does not see that devices wait for round trips over slow links.
    if _link_share(problem, begin[0]) > PLAN.noticed_link:
        begin += trips(problem, plain, PLAN.paths)
    # For many layers, fates are not chosen again and again.
    are_few = len(problem.costs.layers) <= PLAN.hasty_layers
    ways = list[DeviceFates]()
    if are_few or problem.memory_limit_bytes is None:
        ways = [DeviceFates(pricing, pricing.swaps) for pricing in pricings]
    climb = Climb(problem, ways, PLAN.tasks)
    if are_few:
        for bounds in _plain_cuts(problem, None if others else kept):
            begin += climb.refitted(bounds)
    return climb.top(begin) or begin[0]


def crowded(problem: Problem) -> Problem:
    """Makes the link to the host slower, as others wait for one that is never idle."""
    host = Link(problem.host.bytes_per_s / PLAN.host_crowding, problem.host.latency_s)
    return replace(problem, host=host)


def _plain_cuts(problem: Problem, kept: Decision | None) -> Iterator[tuple[int, ...]]:
    """Yields even cuts, cuts of equal work, and under a limit the best cuts without it.

    Args:
        problem: what is to be planned.
        kept: the plan of no limit, if it is known.
    """
    cuts = Segments(problem).cuts
    seconds = [layer.forward_s + layer.backward_s for layer in problem.costs.layers]
    yield even(problem).bounds
    yield balanced(problem, cuts, np.array(seconds))
    if problem.memory_limit_bytes is not None:
        yield (kept or jvpipe(problem.unlimited)).bounds


def _link_share(problem: Problem, decision: Decision) -> float:
    """Counts the seconds of a micro-batch's transfers, in seconds of its work."""
    stages = evaluate_decision(problem, decision).stages
    comm_s = sum(stage.comm_s for stage in stages)
    compute_s = sum(stage.compute_s for stage in stages)
    return comm_s / max(compute_s, 1e-300)
