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


def jvpipe(problem: Problem, refine: bool = True, begin: Sequence[Decision] = ()) -> Decision:
    """The plan of the least simulated step seconds that the search finds.

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
    limit = problem.memory_limit_bytes
    best = _kept_best(problem, refine, begin)
    if best is None or limit is None or evaluate_decision(problem, best).limit_bytes > limit:
        best = _simulated_best(problem, begin, best) if refine else _surrogate_best(problem)
    check(problem, best)
    return best


def _kept_best(problem: Problem, refine: bool, begin: Sequence[Decision]) -> Decision | None:
    """The plan of no limit, which keeps everything, where it may keep the limit: no fates are
    faster than that.

    For many layers it may be, if it is so for even cuts.
    """
    limit = problem.memory_limit_bytes
    many = len(problem.costs.layers) > PLAN.hasty_layers
    if limit is None or (many and evaluate_decision(problem, even(problem)).limit_bytes > limit):
        return None
    hasty = jvpipe(problem.unlimited, refine=False)
    # The simulated plan of no limit is asked for only where the surrogate's nearly fits.
    near = evaluate_decision(problem, hasty).limit_bytes <= PLAN.near_limit * limit
    return jvpipe(problem.unlimited, refine, begin) if near else None


def _surrogate_best(problem: Problem) -> Decision:
    pricing = pricing_of(problem)
    solution = within_host_limit(problem, solve(problem, pricing))
    if solution.feasible:
        return solution.decision()
    raise nothing_fits(
        pricing if problem.host_limit_bytes is None else pricing_of(problem, swaps=False)
    )


def _swaps_may_help(problem: Problem, plain: Solution) -> bool:
    """Whether a plan without swaps leaves much to gain; of a model of few layers also where it
    leaves little.
    """
    if problem.memory_limit_bytes is None or not Choices.of(problem.costs).swapped_bytes.any():
        return False
    if len(problem.costs.layers) <= PLAN.hasty_layers or not plain.feasible:
        return True
    slowest_s = max(plain.table.parts_s(cell)[0] for cell in cells(plain.result.paths[0]))
    return slowest_s > PLAN.imbalance * plain.table.pricing.segments.share_s


def _simulated_best(
    problem: Problem, others: Sequence[Decision], kept: Decision | None
) -> Decision:
    """Returns the fastest simulated plan among the surrogate's best paths, other planners' plans
    and cuts, and their neighbours.

    Fates are chosen without swaps, and with swaps as if the link to the host were slow.

    Args:
        problem: what is to be planned.
        others: of which the search also begins.
        kept: the plan of no limit, if it is known.
    """
    n = len(problem.costs.layers)
    plain = pricing_of(problem, swaps=False)
    solutions = [solve(problem, plain)]
    pricings = [plain]
    if _swaps_may_help(problem, solutions[0]):
        slower = crowded(problem)
        pricings.append(pricing_of(slower))
        solutions.append(within_host_limit(slower, solve(slower, pricings[1])))
    begin = list(others)
    begin += [
        x.decision(path) for x in solutions if x.feasible for path in x.result.paths[: PLAN.paths]
    ]
    if not begin:
        raise nothing_fits(pricings[-1] if problem.host_limit_bytes is None else plain)
    # The surrogate does not see that devices wait for round trips over slow links.
    if _link_share(problem, begin[0]) > PLAN.noticed_link:
        begin += trips(problem, plain, PLAN.paths)
    limited = problem.memory_limit_bytes is not None
    # For many layers, fates are not chosen again and again.
    ways = [] if limited and n > PLAN.hasty_layers else [DeviceFates(x, x.swaps) for x in pricings]
    climb = Climb(problem, ways, PLAN.tasks)
    for bounds in _plain_cuts(problem, None if others else kept) if n <= PLAN.hasty_layers else ():
        begin += climb.refitted(bounds)
    return climb.top(begin) or begin[0]


def crowded(problem: Problem) -> Problem:
    """Makes the link to the host slower, as others wait for one that is never idle."""
    host = Link(problem.host.bytes_per_s / PLAN.host_crowding, problem.host.latency_s)
    return replace(problem, host=host)


def _plain_cuts(problem: Problem, kept: Decision | None) -> Iterator[tuple[int, ...]]:
    """Yields cuts that leave fates and links aside: even ones, of equal work, and under a limit the
    best without.

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
    """How long all that a micro-batch sends over links takes, in seconds of its work."""
    stages = evaluate_decision(problem, decision).stages
    return sum(stage.comm_s for stage in stages) / max(
        sum(stage.compute_s for stage in stages), 1e-300
    )
