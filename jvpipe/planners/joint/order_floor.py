"""The plans that decide whether some order of tasks keeps a limit: one micro-batch in flight, and as little of it kept.

No order of a plan's stages holds less than the one by one, so that a limit is kept by some order if it is kept by the
emptiest plan under that one. With one stage per device it is `min_bytes_plan`. With several, stages of a device share
what they need beyond what they hold: given that, each holds the least that it can. If there are few cuts, all are
looked at; if many, those found by moving a bound as long as the fullest devices become emptier; this ends, as
they do so each time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb

from jvpipe.planners.joint.device_fates import DeviceFates
from jvpipe.planners.joint.effort import LIMIT
from jvpipe.planners.joint.order_cuts import moved_bounds
from jvpipe.planners.joint.smallest_limit import min_bytes_plan
from jvpipe.planners.model.even import even
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Cuts
from jvpipe.planners.model.stage_cost import evaluate
from jvpipe.schedules.one_by_one import one_by_one
from jvpipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class OrderFloor:
    """The plan that holds the least on one placement, its schedule, and the smallest limit that it keeps."""

    schedule: Schedule
    decision: Decision
    limit_bytes: int


def order_floors(problem: Problem, placements: Iterable[Schedule]) -> Iterator[OrderFloor]:
    """Yields the emptiest plan of each placement; it swaps empty if the host has a limit.

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
        self.fates = DeviceFates.of(problem, swaps=problem.host_limit_bytes is None)

    def decision(self) -> Decision:
        """The plan that was found to hold the least."""
        least = min_bytes_plan(self.fates.pricing)
        if self.problem.schedule.chunks == 1:
            return Decision(least.bounds, least.choices)
        cuts, inner = self.fates.pricing.segments.cuts, self.problem.stages - 1
        if comb(len(cuts) - 2, inner) <= LIMIT.cuts:
            ends = int(cuts[0]), int(cuts[-1])
            every = (
                (ends[0], *map(int, some), ends[1]) for some in combinations(cuts[1:-1], inner)
            )
            return min(map(self._of_cuts, every), key=self._fullness)
        starts = dict.fromkeys((least.bounds, even(self.problem).bounds))
        return min((self._emptied(bounds, cuts) for bounds in starts), key=self._fullness)

    def _emptied(self, bounds: Sequence[int], cuts: Cuts) -> Decision:
        """Moves bounds to the next cuts until no device holds less, or enough has been looked at."""
        best, left = self._of_cuts(bounds), LIMIT.moved_cuts
        before = None
        while best is not before and left > 0:
            before = best
            for moved in moved_bounds(before.bounds, cuts)[:left]:
                left -= 1
                best = min(best, self._of_cuts(moved), key=self._fullness)
        return best

    def _fullness(self, decision: Decision) -> list[int]:
        """The limits that devices need, the largest first."""
        problem = self.problem
        device_bytes, groups = evaluate(problem, decision).device_bytes, problem.groups
        less = [group.less_bytes for group in groups] or [0] * len(device_bytes)
        return sorted(
            (size + more for size, more in zip(device_bytes, less, strict=True)), reverse=True
        )

    def _of_cuts(self, bounds: Sequence[int]) -> Decision:
        """Makes the plan of these cuts whose devices hold the least, each for itself."""
        return self.fates.emptiest(self.problem, bounds)
