"""The plan whose fullest device holds the least, whatever its seconds: it decides whether a limit can be kept.

Measured seconds are noisy, and whether a limit is kept must not be. So the plan follows from bytes alone: it begins at
the cuts and choices that hold the least by the planners' count (`stage_cost.py`), which is near what the lowered lists
hold, and goes on from there by what these hold: a bound or a choice of the fullest stage at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jvpipe.planners.joint.smallest_limit import min_bytes_plan
from jvpipe.planners.joint.surrogate import pricing_of
from jvpipe.planners.model.chain_dp import least_path
from jvpipe.planners.model.keep_all import KeepAll
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision, Problem
from jvpipe.planners.model.stage_cost import check

MOST_PLANS = 60
"""So many plans are looked at on the way."""


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


def floor(
    problem: Problem, held_bytes: Callable[[Decision], Sequence[int]], enough_bytes: int, *, keeps: bool = False
) -> Floor:
    """The plan that holds the least, or the first on the way there that holds no more than is enough.

    Args:
        problem: its seconds and its limit are not looked at; nothing is swapped where the host has a limit.
        held_bytes: what the device of each stage holds at most under a decision.
        enough_bytes: what may be held.
        keeps: whether everything is to be kept.
    """

    def taken(decision: Decision) -> Floor:
        return Floor(decision, tuple(held_bytes(decision)))

    beginnings, left = map(taken, _beginnings(_untimed(problem), keeps=keeps)), iter(range(MOST_PLANS))
    lowest = next(beginnings)
    if lowest.bytes > enough_bytes:
        lowest = min([lowest, *beginnings], key=_fullness)
    while lowest.bytes > enough_bytes:
        others = (taken(decision) for decision, _ in zip(_neighbours(problem, lowest, keeps=keeps), left, strict=False))
        better = next((other for other in others if _fullness(other) < _fullness(lowest)), None)
        if better is None:
            break
        lowest = better
    return lowest


def _fullness(plan: Floor) -> list[int]:
    return sorted(plan.held_bytes, reverse=True)


def _untimed(problem: Problem) -> Problem:
    """The problem with seconds that no clock has measured, and without a limit."""
    layers = tuple(
        replace(x, forward_s=1.0, backward_s=2.0, options=tuple(replace(o, extra_s=1.0) for o in x.options))
        for x in problem.costs.layers
    )
    return replace(problem, costs=replace(problem.costs, layers=layers), memory_limit_bytes=None)


def _beginnings(problem: Problem, *, keeps: bool) -> Iterator[Decision]:
    """The plans that hold the least by the planners' count: of all plans, and of those that keep everything."""
    if not keeps:
        least = min_bytes_plan(pricing_of(problem, swaps=problem.host_limit_bytes is None))
        yield Decision(least.bounds, least.choices)
    kept = KeepAll(problem)
    _, places = least_path([kept.peak_bytes(s) for s in range(problem.stages)], np.maximum)
    assert places is not None, "there are as many places as stages need"
    yield kept.decision(places)


def _neighbours(problem: Problem, plan: Floor, *, keeps: bool) -> Iterator[Decision]:
    """The plans in which the fullest stage has a layer less, or computes one again, wholly or not at all."""
    s, (bounds, choices) = plan.stage, (plan.decision.bounds, plan.decision.choices)
    layers, i, j = problem.costs.layers, bounds[s], bounds[s + 1]
    nearer = [(s, i + 1)] * (s > 0) + [(s + 1, j - 1)] * (s + 1 < problem.stages)
    others = [(*bounds[:at], bound, *bounds[at + 1 :]) for at, bound in nearer]
    yield from _valid(problem, [(other, choices) for other in others])
    for layer in range(i, j) if not keeps else ():
        # Of these few programs are to be compiled.
        for choice in (RECOMPUTE_CHAIN, RECOMPUTE, len(layers[layer].options) - 1, 0):
            if choice != choices[layer]:
                yield from _valid(problem, [(bounds, (*choices[:layer], choice, *choices[layer + 1 :]))])


def _valid(problem: Problem, wanted: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> Iterator[Decision]:
    """Those that are plans, after layers that would have to be run again without an input have got theirs."""
    for bounds, choices in wanted:
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
