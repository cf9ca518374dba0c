"""The surrogate's best cuts and fates: between all cuts, or between those that matter.

A model of few layers is searched to the end; one of more, until the best is near enough, or enough
has been looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from jvpipe.planners.joint.cap_search import SearchResult, search
from jvpipe.planners.joint.cut_windows import Reach, area, bounded, spread
from jvpipe.planners.joint.dual_bounds import Pricing
from jvpipe.planners.joint.effort import CUTS
from jvpipe.planners.joint.segment_table import Effort, Path, Table, cells
from jvpipe.planners.joint.trips import Trips
from jvpipe.planners.model.forecast import least_steps_s
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Cuts, Segments
from jvpipe.util.sizes import MOST_BYTES


@dataclass(frozen=True)
class Solution:
    """What the search found, the best first, and the table that it found it in.

    No plan of the table is below `result.bound_s`, no other plan below `beyond_s`: its slowest
    stage is above `cap_s`.
    """

    result: SearchResult
    table: Table
    beyond_s: float = np.inf
    cap_s: float = np.inf

    @property
    def bound_s(self) -> float:
        """What no plan is below."""
        return min(self.result.bound_s, self.beyond_s)

    @property
    def feasible(self) -> bool:
        """Whether anything fits."""
        return bool(self.result.paths)

    def decision(self, path: Path | None = None) -> Decision:
        """Turns a path into a decision; the best path if none is given."""
        path = path or self.result.paths[0]
        return Decision(path, self.table.choices(path))


def effort(layers: int) -> Effort:
    """Says how hard to look at a model of so many layers."""
    if layers <= 40:
        return Effort(16, 4000, 1e-9, layers=2_000 * layers)
    if layers <= 120:
        return Effort(16, 500, 1e-3, layers=15 * layers)
    if layers <= 256:
        return Effort(16, 64, 1e-3, layers=3 * layers)
    return Effort(8, 8, 1e-3, layers=2 * layers)


def pricing_of(problem: Problem, swaps: bool = True) -> Pricing:
    """Prices a problem's choices, with or without those that swap, under its limit."""
    limit = problem.memory_limit_bytes
    limit_bytes = float(MOST_BYTES if limit is None else limit)
    return Pricing.of(Segments(problem), limit_bytes, swaps)


def solve(
    problem: Problem,
    pricing: Pricing,
    most_swapped_bytes: Sequence[float] = (),
) -> Solution:
    """Finds the surrogate's best paths; each stage may swap so many bytes per micro-batch.

    Args:
        problem: what is to be planned.
        pricing: its choices, priced.
        most_swapped_bytes: by stage, per micro-batch; None means no bound.
    """
    everything = pricing.segments.windows

    def between(cuts: Sequence[Cuts]) -> Solution:
        table = Table(pricing, cuts, effort(pricing.segments.n), most_swapped_bytes)
        return Solution(search(problem, table), table)

    if area(everything) <= CUTS.all_cells:
        return between(everything)
    reach = Reach.of(pricing)
    least_s = reach.least_cap_s()

    def is_small(slack: float) -> bool:
        return area(reach.windows(least_s * (1 + slack))) <= CUTS.window_cells

    widest = next(filter(is_small, CUTS.cap_slacks), 0.0)
    # The widest windows that can be looked at; wider ones, thinned out, where nothing in them fits.
    for slack in (widest, 0.4, 3.0):
        cap_s = least_s * (1 + slack)
        solution = between(bounded(reach.windows(cap_s)))
        if solution.feasible:
            beyond_s = _beyond_s(problem, pricing, cap_s)
            return replace(solution, beyond_s=beyond_s, cap_s=cap_s)
    return between(bounded(everything))


def trips(
    problem: Problem,
    pricing: Pricing,
    paths: int,
) -> list[Decision]:
    """Finds the most promising plans that keep round trips short, best first; see `trips.py`.

    Args:
        problem: what is to be planned.
        pricing: its choices, priced.
        paths: how many plans at most.
    """
    segments = pricing.segments
    table = Table(
        pricing,
        spread(segments, CUTS.trip_cells),
        effort(segments.n),
    )
    stages = table.stages
    comm_s = [stage.block.comm_s for stage in stages]
    link_s = [np.maximum(stage.seconds, stage.block.traffic_s) for stage in stages]
    # A dictionary as an ordered set: the same path may come from several factors.
    every_path = dict[tuple[int, ...], None]()
    for factor in CUTS.transfer_factors:
        slower_s = [factor * c for c in comm_s]
        every_path |= dict.fromkeys(Trips(link_s, slower_s).paths())
    if not every_path:
        return []
    every = np.array(list(every_path))
    loads_s = (stage.loads_s(every[:, s], every[:, s + 1]) for s, stage in enumerate(stages))
    parts_s, busy_s = map(np.array, zip(*loads_s, strict=True))
    ranked = least_steps_s(problem, parts_s, busy_s).argsort(kind="stable")
    decisions = []
    for at in ranked[:paths]:
        path = table.path(every[at])
        # Each round settles a cell of the path or raises its bound, so that this ends.
        while opened := table.open_cells(path):
            table.refine(opened)
        if all(table.fits(cell) for cell in cells(path)):
            decisions.append(Decision(path, table.choices(path)))
    return decisions


def _beyond_s(
    problem: Problem,
    pricing: Pricing,
    cap_s: float,
) -> float:
    """Bounds what a plan takes whose slowest stage is above a cap."""
    if not problem.schedule.synchronous:
        return problem.microbatches * cap_s
    work_s = float(pricing.segments.least_compute_s[-1])
    return work_s + (problem.microbatches - 1) * cap_s


def within_host_limit(problem: Problem, solution: Solution) -> Solution:
    """Gives the solution, or if it swaps more than the host can hold, another that does not."""
    limit = problem.host_limit_bytes
    if limit is None or not solution.feasible:
        return solution
    pricing = solution.table.pricing
    decision = solution.decision()
    in_flight = enumerate(pricing.segments.in_flight)
    k = [flying * problem.group(s).replicas for s, flying in in_flight]
    moves = []
    for s, (i, j) in enumerate(pairwise(decision.bounds)):
        # Choices of other stages may be columns that this one's layers do not have.
        inside = (0,) * i + decision.choices[i:j]
        swapped = pricing.at(s).choices.swapped(inside)
        moves.append(k[s] * float(swapped[i:j].sum()))
    if sum(moves) <= limit:
        return solution
    # To each stage its part of the host, by what it wanted; or nothing is swapped at all.
    total = sum(moves)
    parts = [limit * want / total // kept for want, kept in zip(moves, k, strict=True)]
    others = [
        solve(problem, solution.table.pricing, parts),
        solve(problem, pricing_of(problem, swaps=False)),
    ]
    return min(others, key=lambda x: x.result.step_s)
