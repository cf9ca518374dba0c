"""The plans that decide whether some order of tasks keeps a limit: one micro-batch in flight, and as little of it kept.

No order of a plan's stages holds less than the one by one, so that a limit is kept by some order if it is kept by the
emptiest plan under that one. With one stage per device it is `min_bytes_plan`. With several, stages of a device share
what they need beyond what they hold: given that, each holds the least that it can. Of few cuts all are looked at, of
many those that are found by moving a bound as long as the fullest devices become emptier; this ends, as they do so each
time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from math import comb

import numpy as np

from jvpipe.planners.joint.dominance import (
    BEYOND,
    EXTRA,
    HELD,
    SWAPPED,
    Growth,
    Step,
    beyond_held,
    front,
)
from jvpipe.planners.joint.order_cuts import moved_bounds
from jvpipe.planners.joint.smallest_limit import min_bytes_plan
from jvpipe.planners.joint.surrogate import pricing_of
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.stage_cost import evaluate
from jvpipe.schedules.one_by_one import one_by_one
from jvpipe.schedules.schedule import Schedule

MOST_CUTS, MOVED_CUTS = 1_000, 100
"""Up to so many, all cuts of several stages per device are looked at; of more, so many."""
STATES = 200
"""How many choices of a stage's first layers stay beside each other."""
Way = tuple[float, float, tuple[int, ...]]
"""What a stage holds, what it needs beyond that, and its layers' choices."""


@dataclass(frozen=True)
class OrderFloor:
    """The plan that holds the least on one placement, its schedule, and the smallest limit that it keeps."""

    schedule: Schedule
    decision: Decision
    limit_bytes: int


def order_floors(problem: Problem, placements: Iterable[Schedule]) -> Iterator[OrderFloor]:
    """Yields the emptiest plan of each placement; it swaps nothing where the host has a limit.

    Args:
        problem: its schedule and its limit are not looked at.
        placements: schedules whose stages lie on devices as those of the plans are to.
    """
    for placed in placements:
        schedule = one_by_one(placed)
        stages = schedule.stages_on(problem.devices)
        alone = replace(problem, stages=stages, schedule=schedule, memory_limit_bytes=None)
        decision = _Emptiest(alone).decision()
        yield OrderFloor(schedule, decision, evaluate(alone, decision).limit_bytes)


class _Emptiest:
    """The search for the emptiest plan of a problem whose micro-batches go one by one."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.pricing = pricing_of(problem, swaps=problem.host_limit_bytes is None)
        self.ways = cache(self._ways)

    def decision(self) -> Decision:
        """The plan that was found to hold the least."""
        least = min_bytes_plan(self.pricing)
        if self.problem.schedule.chunks == 1:
            return Decision(least.bounds, least.choices)
        cuts, inner = self.pricing.segments.cuts, self.problem.stages - 1
        if comb(len(cuts) - 2, inner) <= MOST_CUTS:
            ends = int(cuts[0]), int(cuts[-1])
            every = (
                (ends[0], *map(int, some), ends[1]) for some in combinations(cuts[1:-1], inner)
            )
            return min(map(self._of_cuts, every), key=self._fullness)
        best, left = self._of_cuts(least.bounds), MOVED_CUTS
        before = None
        while best is not before and left > 0:
            before = best
            for bounds in moved_bounds(before.bounds, cuts)[:left]:
                left -= 1
                best = min(best, self._of_cuts(bounds), key=self._fullness)
        return best

    def _fullness(self, decision: Decision) -> list[int]:
        """The limits that devices need, the largest first."""
        problem = self.problem
        held, groups = evaluate(problem, decision).device_bytes, problem.groups
        less = [each.less_bytes for each in groups] or [0] * len(held)
        return sorted((size + more for size, more in zip(held, less, strict=True)), reverse=True)

    def _of_cuts(self, bounds: Sequence[int]) -> Decision:
        """The plan of these cuts whose devices hold the least, each for itself."""
        problem, chosen = self.problem, dict[int, tuple[int, ...]]()
        for d in range(problem.devices):
            mine = [s for s, place in enumerate(problem.places) if place == d]
            every = [self.ways(bounds[s], bounds[s + 1]) for s in mine]
            for s, (_, _, choices) in zip(mine, _together(every), strict=True):
                chosen[s] = choices
        return Decision(
            tuple(bounds), tuple(choice for s in sorted(chosen) for choice in chosen[s])
        )

    def _ways(self, i: int, j: int) -> list[Way]:
        """The choices of layers [i, j), without those that neither hold less than others nor need less beyond."""
        growth, steps = (
            Growth(self.pricing, 0, i, j),
            list[Step](),
        )  # all stages have one micro-batch in flight
        states = growth.begin()
        for at in range(j - i):
            states = growth.grown(states, at)
            states[[EXTRA, SWAPPED]] = 0.0
            needed = states[HELD] + beyond_held(states)
            alive = np.flatnonzero(np.isfinite(needed))
            alive = alive[front(states[:, alive])]
            alive = np.sort(alive[np.argsort(needed[alive], kind="stable")[:STATES]])
            states = states[:, alive]
            steps.append(growth.step(alive, at))
        return [
            (float(held), float(beyond), growth.path(steps, at))
            for at, (held, beyond) in enumerate(zip(states[HELD], states[BEYOND], strict=True))
        ]


def _together(every: Sequence[Sequence[Way]]) -> list[Way]:
    """The ways of a device's stages that take the least: what they hold, and the most that one of them needs beyond."""
    best, best_bytes = list[Way](), np.inf
    for most in sorted({beyond for ways in every for _, beyond, _ in ways}):
        within = [[way for way in ways if way[1] <= most] for ways in every]
        if all(within):
            some = [min(ways) for ways in within]
            taken = sum(held for held, _, _ in some) + max(beyond for _, beyond, _ in some)
            if taken < best_bytes:
                best, best_bytes = some, taken
    return best
