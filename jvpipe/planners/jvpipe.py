"""jvpipe's own planner: cuts and fates chosen jointly, for the step's seconds under the memory limit.

The surrogate of `memory.py` is solved first (`solution.py`, `search.py`): given the least seconds t of each segment,
the best cuts are shortest paths under caps, and t is found only where a path asks for it. The surrogate of a
synchronous schedule is not the step: the best paths, the cuts of other planners and their neighbours are simulated
(`climb.py`).
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from jvpipe.cost.hardware import INFINITE, Link
from jvpipe.planners.adapipe import adapipe
from jvpipe.planners.choices import Choices
from jvpipe.planners.climb import Climb
from jvpipe.planners.cuts import least_max
from jvpipe.planners.dapple import dapple
from jvpipe.planners.dawnpiper import dawnpiper
from jvpipe.planners.even import even
from jvpipe.planners.infeasible import Infeasible
from jvpipe.planners.kept import least_kept_bytes
from jvpipe.planners.memory import check, evaluate
from jvpipe.planners.pipedream import pipedream
from jvpipe.planners.problem import Decision, Problem
from jvpipe.planners.smallest_limit import nothing_fits
from jvpipe.planners.solution import pricing_of, solve, within_host_limit
from jvpipe.planners.torchgpipe import torchgpipe
from jvpipe.planners.vpipe import vpipe

OTHERS: dict[Callable[[Problem], Decision], int] = {
    even: 400,
    torchgpipe: 400,
    pipedream: 400,
    dapple: 128,
    adapipe: 128,
    vpipe: 128,
    dawnpiper: 128,
}
"""Planners whose plans are simulated too, for models of so many layers at most; for few layers, with our fates too."""
FEW = 128
MANY = 256
"""Models of more layers are planned in haste."""
PATHS, STEPS, TASKS = 6, 240, 30_000
"""The surrogate's best paths that are simulated; how many steps are simulated in all, and of how many tasks."""
CROWDED = 3.0
"""How many times slower the link to the host is taken to be. A link that is never idle keeps others waiting: what the
surrogate takes for hidden costs up to half of a step, simulated."""


def jvpipe(problem: Problem, refine: bool = True) -> Decision:
    """The plan of the least simulated step seconds that the search finds; without `refine`, the surrogate's optimum.

    Raises:
        Infeasible: nothing fits; with the smallest limit that would do.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> keep, again = Option(kept_bytes=100), Option(kept_bytes=0, extra_s=1.0, extra_bytes=100)
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (keep, again)),) * 4)
    >>> problem = Problem(costs, 2, find_schedule("1f1b"), microbatches=8, memory_limit_bytes=350)
    >>> jvpipe(problem)
    Decision(bounds=(0, 2, 4), choices=(-1, 0, 0, 0), replicas=())
    """
    best = _kept_best(problem, refine) or (_simulated_best(problem) if refine else _surrogate_best(problem))
    check(problem, best)
    return best


def lower_bound(problem: Problem) -> float:
    """Simulated seconds per step that no plan is below; infinite if nothing fits.

    A stage is busy for M micro-batches, t each, with the device or the link to the host. In a synchronous step that
    is after the stages before it have passed it the first, and before they take back the last: F + B of their layers.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (Option(0),)),) * 5)
    >>> lower_bound(Problem(costs, 2, find_schedule("1f1b"), microbatches=8))  # 8 * 9: three layers on the first stage
    72.0
    """
    # Traffic between stages may be hidden, or take turns with the neighbour's.
    alone = replace(problem, peer=INFINITE, peer_uses_host=False)
    stream = replace(problem.schedule, synchronous=False) if problem.schedule.synchronous else problem.schedule
    pricing = pricing_of(alone)
    solution = solve(replace(alone, schedule=stream), pricing)
    if not solution.feasible:
        return np.inf
    m, table = problem.microbatches, solution.table
    if not problem.schedule.synchronous:
        return solution.bound_s
    before_s = pricing.segments.compute_s
    least_s = [m * table.lower_s(stage) + before_s[stage.block.starts][:, None] for stage in table.stages]
    return min(least_max(least_s), solution.beyond_s)


def _kept_best(problem: Problem, refine: bool) -> Decision | None:
    """The plan of no limit, which keeps everything, if that keeps the limit: then no fates are faster."""
    limit = problem.memory_limit_bytes
    if limit is None or len(problem.costs.layers) > MANY or least_kept_bytes(problem) > limit:
        return None
    best = jvpipe(replace(problem, memory_limit_bytes=None, host_limit_bytes=None), refine)
    return best if evaluate(problem, best).peak_bytes <= limit else None


def _surrogate_best(problem: Problem) -> Decision:
    pricing = pricing_of(problem)
    solution = within_host_limit(problem, solve(problem, pricing))
    if solution.feasible:
        return solution.decision()
    raise nothing_fits(pricing if problem.host_limit_bytes is None else pricing_of(problem, swaps=False))


def _simulated_best(problem: Problem) -> Decision:
    """Of the surrogate's best paths, other planners' plans and cuts, and their neighbours, the fastest simulated one.

    Fates are chosen without swaps, and with swaps as if the link to the host were slow.
    """
    n, plain = len(problem.costs.layers), pricing_of(problem, swaps=False)
    solutions = [solve(problem, plain)]
    pricings = [plain]
    bound = problem.memory_limit_bytes is not None
    if bound and Choices.of(problem).swapped_bytes.any() and (n <= MANY or not solutions[0].feasible):
        host = Link(problem.host.bytes_per_s / CROWDED, problem.host.latency_s)
        crowded = replace(problem, host=host)
        pricings.append(pricing_of(crowded))
        solutions.append(within_host_limit(crowded, solve(crowded, pricings[1])))
    begin = [x.decision(path) for x in solutions if x.feasible for path in x.found.paths[:PATHS]]
    steps = min(STEPS, TASKS // (problem.stages * problem.microbatches))
    if not begin:
        raise nothing_fits(pricings[-1] if problem.host_limit_bytes is None else plain)
    if steps < len(begin):  # a step has too many tasks
        return begin[0]
    effort = solutions[0].table.effort
    climb = Climb(
        problem,
        tuple(pricings),
        tuple(x.table.best_prices() for x in solutions),
        replace(effort, thorough=min(effort.thorough, 64), tolerance=1e-4),
        layers=2 * n if n <= MANY else n // 2,
        steps=steps,
    )
    for planner, most in OTHERS.items():
        if n <= most:
            try:
                other = planner(problem)
            except Infeasible:
                continue
            begin += [other, *(climb.with_best_fates(other.bounds) if n <= FEW else ())]
    return climb.top(begin)
