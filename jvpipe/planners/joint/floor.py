"""The plan whose fullest device holds the least, whatever its seconds: it decides whether a limit can be kept.

Measured seconds are noisy, and whether a limit is kept must not be. So the plan follows from bytes alone: a search by
what the lowered lists hold begins at the cuts and choices that hold the least by the planners' count (`stage_cost.py`),
which is near that, and goes on from the emptiest plan to its neighbours: a bound or a choice of the fullest stage at a
time. For few layers, it begins with the best choices of all cuts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jvpipe.cost.costs import Costs
from jvpipe.planners.joint.effort import LIMIT
from jvpipe.planners.joint.smallest_limit import min_bytes_plan, min_bytes_plans
from jvpipe.planners.joint.surrogate import pricing_of
from jvpipe.planners.model.chain_dp import least_path
from jvpipe.planners.model.keep_all import KeepAll
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision, Problem, with_entry
from jvpipe.planners.model.stage_bytes import StageBytes
from jvpipe.planners.model.stage_cost import check, stage_bytes


@dataclass(frozen=True)
class Floor:
    """A plan that holds as little as was seen, and what the device of each stage holds."""

    decision: Decision
    held_bytes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """What the fullest device holds."""
        return max(self.held_bytes)

    @property
    def stage(self) -> int:
        """The fullest stage."""
        return self.held_bytes.index(self.bytes)

    @property
    def fullness(self) -> list[int]:
        """What the devices hold, the fullest first."""
        return sorted(self.held_bytes, reverse=True)


def floor(
    problem: Problem,
    held_bytes: Callable[[Decision], Sequence[int]],
    enough_bytes: int,
    *,
    keeps: bool = False,
) -> Floor:
    """The plan that holds the least, or the first on the way there that holds no more than is enough.

    Args:
        problem: its seconds and its limit are not looked at; nothing is swapped where the host has a limit.
        held_bytes: what the device of each stage holds at most under a decision.
        enough_bytes: what may be held.
        keeps: whether everything is to be kept.
    """
    problem = _untimed(problem)
    few = len(problem.costs.layers) <= LIMIT.every_cut_layers
    search = _Search(held_bytes, enough_bytes, LIMIT.plans_of_few if few else LIMIT.plans)
    search.look(_beginnings(problem, keeps=keeps))
    if few and not keeps:
        search.look(_of_every_cut(problem, lambda: search.lowest.bytes))
    before = None
    # Each round but the last ends at an emptier plan, and no plan is looked at twice: it ends.
    while search.lowest is not before:
        before = search.lowest
        search.look(_neighbours(problem, before, keeps=keeps), until_better=not few)
    return search.lowest


@dataclass
class _Search:
    """The plans that were looked at, each once, and the emptiest of them."""

    held_bytes: Callable[[Decision], Sequence[int]]
    enough_bytes: int
    left: int
    seen: set[Decision] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.lowest = Floor(Decision((), ()), (2**63,))

    @property
    def ended(self) -> bool:
        """Whether what was seen is enough, or no more is to be looked at."""
        return self.lowest.bytes <= self.enough_bytes or self.left <= 0

    def look(self, decisions: Iterator[Decision], *, until_better: bool = False) -> None:
        """Looks at what plans hold, until that is enough, or less than before."""
        before = self.lowest
        while not self.ended and (decision := next(decisions, None)):
            if until_better and self.lowest is not before:
                break
            if decision not in self.seen:
                self.seen.add(decision)
                self.left -= 1
                plan = Floor(decision, tuple(self.held_bytes(decision)))
                self.lowest = min(self.lowest, plan, key=lambda x: x.fullness)


def _untimed(problem: Problem) -> Problem:
    """The problem with seconds that no clock has measured, the same on all devices, and without a limit."""
    cache: dict[int, Costs] = {}

    def untimed(costs: Costs) -> Costs:
        """The same bytes; groups that share costs share these too."""
        if id(costs) not in cache:
            layers = tuple(
                replace(
                    x,
                    forward_s=1.0,
                    backward_s=2.0,
                    options=tuple(replace(o, extra_s=1.0) for o in x.options),
                )
                for x in costs.layers
            )
            cache[id(costs)] = replace(costs, layers=layers)
        return cache[id(costs)]

    groups = tuple(
        replace(group, slowness=(), costs=group.costs and untimed(group.costs))
        for group in problem.groups
    )
    return replace(problem, costs=untimed(problem.costs), memory_limit_bytes=None, groups=groups)


def _beginnings(problem: Problem, *, keeps: bool) -> Iterator[Decision]:
    """The plans that hold the least by the planners' count: of all plans, and of those that keep everything."""
    if not keeps:
        yield min_bytes_plan(pricing_of(problem, swaps=problem.host_limit_bytes is None)).decision
    kept = KeepAll(problem)
    _, places = least_path([kept.peak_bytes(s) for s in range(problem.stages)], np.maximum)
    assert places is not None, "there are as many places as stages need"
    yield Decision.keeping_all(kept.cuts[list(places)].tolist())


def _of_every_cut(problem: Problem, lowest_bytes: Callable[[], int]) -> Iterator[Decision]:
    """The plans that hold the least by the planners' count, of cuts each, as long as they may hold less.

    Bytes that are counted for all of them, such as those of state that comes and goes, do not change their order.
    """
    least = 0
    for plan in min_bytes_plans(pricing_of(problem, swaps=problem.host_limit_bytes is None)):
        least = least or plan.peak_bytes
        if plan.peak_bytes > LIMIT.held_times * max(least, lowest_bytes()):
            return
        yield plan.decision


def _neighbours(problem: Problem, plan: Floor, *, keeps: bool) -> Iterator[Decision]:
    """The plans in which the fullest stage has a layer less, or treats what a layer leaves in another way.

    None are looked at that are counted for much more.
    """
    s, (bounds, choices) = plan.stage, (plan.decision.bounds, plan.decision.choices)
    i = bounds[s]
    j = bounds[s + 1]
    nearer = [(s, i + 1)] * (s > 0) + [(s + 1, j - 1)] * (s + 1 < problem.stages)
    yield from _valid(problem, [(with_entry(bounds, at, bound), choices) for at, bound in nearer])
    if keeps:
        return

    def counted(decision: Decision) -> StageBytes[int]:
        return stage_bytes(problem, s, i, j, decision.choices)

    others = [with_entry(choices, at, way) for at in range(i, j) for way in _ways(problem, at)]
    stages = counted(plan.decision)
    limit = stages.static + LIMIT.held_times * (stages.peak - stages.static)
    counts = {
        decision: counted(decision).peak
        for decision in _valid(problem, [(bounds, x) for x in others])
    }
    yield from sorted((x for x, peak in counts.items() if peak <= limit), key=counts.__getitem__)


def _ways(problem: Problem, layer: int) -> list[int]:
    """The choices that a layer has."""
    swaps = problem.host_limit_bytes is None
    options = problem.costs.layers[layer].options
    allowed = (c for c, x in enumerate(options) if swaps or not (x.swapped_bytes or x.swaps_input))
    return [RECOMPUTE_CHAIN, RECOMPUTE, *allowed]


def _valid(
    problem: Problem, proposals: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Iterator[Decision]:
    """Returns the proposals that are plans, once layers that run again without an input have got one."""
    for bounds, choices in proposals:
        mended = list(choices)
        for layer, choice in enumerate(choices):
            if choice == RECOMPUTE_CHAIN and (layer in bounds or mended[layer - 1] >= 0):
                mended[layer] = RECOMPUTE
        decision = Decision(bounds, tuple(mended))
        try:
            check(problem, decision)
        except ValueError:
            continue
        yield decision
