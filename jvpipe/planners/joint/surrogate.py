"""Finds the best cuts and fates by the surrogate, a closed form of the seconds of a step.

`cap_search.py` defines the surrogate and searches a table of segments (`segment_table.py`) for it.
This file chooses the cuts of that table. If a model has few cuts, all are in the table. If it has
many, each bound of the stages gets a window: the cuts at which the bound can lie if no stage takes
longer than a cap (`cut_windows.py`). The widest windows that the effort allows are taken.

A model of few layers is searched until the best is proven. A larger model is searched until the
best is near enough to the lower bound of any plan, or until the effort is used up. The numbers of
`effort` below, and of `CUTS` in `effort.py`, may be changed.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jvpipe.planners.joint.cap_search import Solution, search
from jvpipe.planners.joint.choice_arrays import Choices
from jvpipe.planners.joint.cut_windows import Reach, area, bounded, spread
from jvpipe.planners.joint.dual_bounds import Pricing
from jvpipe.planners.joint.effort import CUTS, PLAN
from jvpipe.planners.joint.lot import cells
from jvpipe.planners.joint.segment_table import Effort, Table
from jvpipe.planners.joint.trips import Trips
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.spans import Cuts
from jvpipe.planners.model.stage_cost import evaluate_decision
from jvpipe.planners.model.stage_simulation import least_steps_s
from jvpipe.util.sizes import MOST_BYTES


def effort(layers: int) -> Effort:
    """Returns the effort for a model with this many layers; larger models get less per layer."""
    if layers <= 40:
        return Effort(16, 4000, 1e-9, layers=2_000 * layers)
    if layers <= 120:
        return Effort(16, 500, 1e-3, layers=15 * layers)
    return Effort(16, 64, 1e-3, layers=3 * layers)


def pricing_of(problem: Problem, swaps: bool = True) -> Pricing:
    """Makes the pricing of a problem's choices.

    Args:
        problem: gives the layers and the limit.
        swaps: whether choices that swap are included.
    """
    limit = problem.memory_limit_bytes
    limit_bytes = float(MOST_BYTES if limit is None else limit)
    return Pricing(
        Segments(problem),
        Choices.of(problem.costs, swaps),
        limit_bytes,
        swaps,
    )


def solve(
    problem: Problem,
    pricing: Pricing,
    most_swapped_bytes: Sequence[float] = (),
) -> Solution:
    """Finds the surrogate's best paths.

    Args:
        problem: the problem to plan for.
        pricing: the pricing of the problem's choices.
        most_swapped_bytes: what each stage may swap per micro-batch; empty: any amount.
    """
    everything = pricing.segments.windows

    def between(cuts: Sequence[Cuts]) -> Solution:
        table = Table(
            pricing,
            cuts,
            effort(pricing.segments.n),
            most_swapped_bytes,
        )
        return search(problem, table)

    if area(everything) <= CUTS.all_cells:
        return between(everything)
    reach = Reach(pricing)
    least_s = reach.least_cap_s()

    def is_small(slack: float) -> bool:
        return area(reach.windows(least_s * (1 + slack))) <= CUTS.window_cells

    widest = next(filter(is_small, CUTS.cap_slacks), 0.0)
    # The widest windows within the effort come first. If no plan in them fits, two fixed slacks are
    # tried. If their windows have too many cuts, some are left out (`bounded`).
    for slack in (widest, 0.4, 3.0):
        cap_s = least_s * (1 + slack)
        solution = between(bounded(reach.windows(cap_s)))
        if solution.feasible:
            bound_s = min(solution.bound_s, _beyond_s(problem, pricing, cap_s))
            return replace(solution, bound_s=bound_s, cap_s=cap_s)
    return between(bounded(everything))


def trips(problem: Problem, pricing: Pricing) -> list[Decision]:
    """Finds the most promising plans that keep round trips short (`trips.py`), the best first.

    Args:
        problem: the problem to plan for.
        pricing: the pricing of the problem's choices.
    """
    segments = pricing.segments
    table = Table(
        pricing,
        spread(segments.windows, segments.compute_s, segments.crossing_bytes, CUTS.trip_cells),
        effort(segments.n),
    )
    stages = table.stages
    link_s = [np.maximum(stage.seconds, stage.block.traffic_s) for stage in stages]
    # Several caps and factors may lead to the same path. A dictionary has each path once, in order.
    every_path = dict[tuple[int, ...], None]()
    for factor in CUTS.transfer_factors:
        slower_s = [factor * stage.block.comm_s for stage in stages]
        every_path |= dict.fromkeys(Trips(link_s, slower_s).paths())
    if not every_path:
        return []
    every = np.array(list(every_path))
    loads_s = (stage.loads_s(every[:, s], every[:, s + 1]) for s, stage in enumerate(stages))
    parts_s, busy_s = map(np.array, zip(*loads_s, strict=True))
    ranked = least_steps_s(problem, parts_s, busy_s).argsort(kind="stable")
    decisions = []
    for places in every[ranked[: PLAN.paths]]:
        path = table.path(places)
        # The loop ends, because each round prices or settles open cells of the path.
        while opened := table.open_cells(path):
            table.refine(opened)
        if all(np.isfinite(table.seconds(cell)) for cell in cells(path)):
            decisions.append(Decision(path, table.choices(path)))
    return decisions


def _beyond_s(
    problem: Problem,
    pricing: Pricing,
    cap_s: float,
) -> float:
    """Returns a lower bound of the seconds of a plan with a stage that takes longer than a cap."""
    if not problem.schedule.synchronous:
        return problem.microbatches * cap_s
    return float(pricing.segments.least_compute_s[-1]) + (problem.microbatches - 1) * cap_s


def within_host_limit(problem: Problem, solution: Solution) -> Solution:
    """Returns the solution if its swaps keep the host's limit, else one that swaps less.

    Args:
        problem: the problem to plan for; its host may have a limit.
        solution: of the problem.
    """
    limit = problem.host_limit_bytes
    if limit is None or not solution.feasible:
        return solution
    stages = evaluate_decision(problem, solution.decision()).stages
    total = sum(stage.host_bytes for stage in stages)
    if total <= limit:
        return solution
    # Two alternatives are searched, and the faster one is taken: each stage may swap in proportion
    # to what it swaps now, or no stage swaps.
    parts = [limit * x.host_bytes / total // (x.replicas * x.in_flight) for x in stages]
    others = [
        solve(problem, solution.table.pricing, parts),
        solve(problem, pricing_of(problem, swaps=False)),
    ]
    return min(others, key=lambda x: x.step_s)
