"""Finds the floor: the plan whose fullest device holds the least. Limits below it are refused.

One plan is emptier than another if its fullest device holds less. If their fullest devices hold the
same, the second fullest devices decide, and so on.

Measured seconds are noisy, and whether a limit can be kept must not depend on noise. So only bytes
count here. The caller gives a function that counts exactly what a plan holds, from its lowered
lists of tasks. The search is a local one:

1. It begins with the plan that holds the least by the planners' own count (`stage_cost.py`). This
   count is nearly exact and needs no lowering. For models of few layers, the search also tries the
   emptiest plan for each choice of cuts.
2. From the emptiest plan so far it goes to the neighbors: plans with one bound or one choice of
   the fullest stage changed. It ends when no neighbor is emptier, or after a number of plans.

So the floor is not always the least possible, and a limit below it is refused although some plan
might keep it. The numbers in `LIMIT` (`effort.py`) may be changed: they trade time for an emptier
floor.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jvpipe.planners.joint.dual_bounds import Pricing
from jvpipe.planners.joint.effort import LIMIT
from jvpipe.planners.joint.smallest_limit import Floor, min_bytes_plan, min_bytes_plans
from jvpipe.planners.joint.surrogate import pricing_of
from jvpipe.planners.model.chain_dp import least_path
from jvpipe.planners.model.keep_all import KeepAll
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision, Problem, with_entry
from jvpipe.planners.model.stage_bytes import stage_bytes
from jvpipe.planners.model.stage_cost import valid


def floor(
    problem: Problem,
    held_bytes: Callable[[Decision], Sequence[int]],
    enough_bytes: int,
    *,
    keeps: bool = False,
) -> Floor:
    """Finds the emptiest plan, or the first plan found that holds at most `enough_bytes`.

    Args:
        problem: its seconds and its memory limit are ignored. If the host has a limit, nothing is
            swapped.
        held_bytes: counts the most bytes that the device of each stage holds under a decision.
        enough_bytes: the search ends at a plan whose fullest device holds at most this many bytes.
        keeps: whether only plans that keep everything are tried.
    """
    few = len(problem.costs.layers) <= LIMIT.every_cut_layers
    plans = LIMIT.plans_of_few if few else LIMIT.plans
    seen = set[Decision]()
    lowest = Floor(Decision((), ()), (2**63,))

    def look(decisions: Iterator[Decision], *, until_better: bool = False) -> None:
        """Counts new plans, one by one, until one is empty enough or as many are seen as may be.

        Args:
            decisions: the plans.
            until_better: whether to stop at the first plan that is emptier than all plans counted
                before.
        """
        nonlocal lowest
        while lowest.bytes > enough_bytes and len(seen) < plans:
            decision = next(decisions, None)
            if decision is None:
                break
            if decision in seen:
                continue
            seen.add(decision)
            plan = Floor(decision, tuple(held_bytes(decision)))
            if plan.fullness < lowest.fullness:
                lowest = plan
                if until_better:
                    break

    look(_beginnings(problem, keeps=keeps))
    if few and not keeps:
        look(_of_every_cut(problem, lambda: lowest.bytes))
    before = None
    # This ends, because each round but the last finds an emptier plan, and the number of plans is
    # finite. With many layers, counting a plan takes long, so the first emptier neighbor is taken.
    # With few layers, all neighbors are compared.
    while lowest is not before:
        before = lowest
        look(_neighbors(problem, before, keeps=keeps), until_better=not few)
    return lowest


def _beginnings(problem: Problem, *, keeps: bool) -> Iterator[Decision]:
    """Yields the emptiest plan, and the emptiest that keeps everything, by the planners' count.

    Args:
        problem: as in `floor`.
        keeps: whether only the one that keeps everything is yielded.
    """
    if not keeps:
        yield min_bytes_plan(_pricing(problem)).decision
    kept = KeepAll(problem)
    peaks = [kept.peak_bytes(s) for s in range(problem.stages)]
    _, places = least_path(peaks, np.maximum)
    assert places is not None, "there are as many places as stages need"
    yield Decision.keeping_all(kept.cuts[list(places)].tolist())


def _pricing(problem: Problem) -> Pricing:
    """Makes the pricing of a problem's choices; none of them swaps if the host has a limit."""
    return pricing_of(problem, swaps=problem.host_limit_bytes is None)


def _of_every_cut(problem: Problem, lowest_bytes: Callable[[], int]) -> Iterator[Decision]:
    """Yields the emptiest plan for each choice of cuts, as long as it may be the emptiest of all.

    Plans come in the order of the planners' count. The order is right even if the count is wrong
    by the same bytes for all plans. The generator ends at a plan whose count is well above both
    the first plan's count and the emptiest plan's exact bytes (`LIMIT.held_times`).

    Args:
        problem: as in `floor`.
        lowest_bytes: returns the exact bytes of the emptiest plan so far.
    """
    least = 0
    for plan in min_bytes_plans(_pricing(problem)):
        least = least or plan.bytes
        if plan.bytes > LIMIT.held_times * max(least, lowest_bytes()):
            return
        yield plan.decision


def _neighbors(problem: Problem, plan: Floor, *, keeps: bool) -> Iterator[Decision]:
    """Yields plans whose fullest stage has one layer less, or another choice for one layer.

    Other choices come in the order of the planners' count. Choices that hold many more bytes by
    this count are left out (`LIMIT.held_times`).
    """
    s = plan.stage
    bounds = plan.decision.bounds
    choices = plan.decision.choices
    i, j = bounds[s : s + 2]
    # A move of the first or the last bound of all is not valid.
    nearer = with_entry(bounds, s, i + 1), with_entry(bounds, s + 1, j - 1)
    yield from valid(problem, [Decision(moved, choices) for moved in nearer])
    if keeps:
        return
    present = stage_bytes(problem, s, i, j, choices)
    limit = present.static + LIMIT.held_times * (present.peak - present.static)
    others = [with_entry(choices, at, way) for at in range(i, j) for way in _ways(problem, at)]
    counts = dict[Decision, int]()
    for decision in valid(problem, [Decision(bounds, other) for other in others]):
        peak = stage_bytes(problem, s, i, j, decision.choices).peak
        if peak <= limit:
            counts[decision] = peak
    yield from sorted(counts, key=counts.__getitem__)


def _ways(problem: Problem, layer: int) -> list[int]:
    """Lists the choices of a layer. If the host has a limit, those that swap are left out."""
    swaps = problem.host_limit_bytes is None
    options = problem.costs.layers[layer].options
    allowed = [
        choice
        for choice, option in enumerate(options)
        if swaps or not (option.swapped_bytes or option.swaps_input)
    ]
    return [RECOMPUTE_CHAIN, RECOMPUTE, *allowed]
