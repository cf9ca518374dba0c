"""Improves plans by local search: goes to a neighbor that the simulator finds faster, and repeats.

A plan is the bounds of stages and a choice of fates for each layer. A neighbor differs from a plan
in one of these ways:

- One bound, or two adjacent bounds, have moved. Fates are chosen again, with and without swaps; in
  models of many layers that takes too long, so each layer keeps its fates.
- One bound is removed and another one inserted, so that the stages between them move to the next
  device. Fates are chosen again.
- One layer has other fates. This helps because the searches for fates count transfers as
  free until a link is always busy. Only the simulator knows which device waits for a link.
- The last layers of a stage become a run: their forwards run again, one after the other, while the
  stage waits for its cotangents.

Simulating takes long, so all neighbors first get a lower bound: the seconds of a step in which no
transfer waits for another (`least_steps_s`). They are simulated in the order of these bounds, until
no neighbor that is left can be faster. A climb ends because each round but the last finds a plan
of a lower rank (`Rank`), and there are finitely many plans. It ends earlier if its budget of
simulated tasks is used up.

If links keep devices waiting, the seconds of neighbors differ a lot, and a climb soon ends at a
local optimum. So the search also climbs from neighbors of the best plan, even from slower ones
(`around`). If tasks are left, it also climbs from the starting plans that are far slower than the
fastest.

Other neighbors may be added, and the numbers in `PLAN` (`effort.py`) may be changed: a climb never
ends at a worse plan than it began with.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise, product
from operator import itemgetter

import numpy as np

from jvpipe.planners.joint.device_fates import DeviceFates
from jvpipe.planners.joint.effort import PLAN
from jvpipe.planners.joint.lot import cells
from jvpipe.planners.joint.order_cuts import moved_bounds, shifted_bounds
from jvpipe.planners.model.even import busiest_s
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision, Problem, with_entry
from jvpipe.planners.model.segments import Segments
from jvpipe.planners.model.stage_cost import (
    StageCost,
    device_bytes,
    needed_bytes,
    stage_cost,
    valid,
)
from jvpipe.planners.model.stage_simulation import least_steps_s, simulated_step_s

Rank = tuple[float, int, int, int]
"""A tuple by which plans are compared, entry by entry; the least is the best plan.

The entries are the simulated seconds (`OVER` if the plan does not fit), the smallest memory limit
that the plan fits, the bytes on the host, and the number of layers that do not keep everything.
"""
OVER = float("inf")


@dataclass
class Climb:
    """A local search over the plans of a problem, which simulates each plan at most once.

    Attributes:
        problem: gives the order of tasks, the links and the limits.
        ways: the searches that choose fates for given bounds.
        tasks: how many tasks may still be simulated; the climb ends when none are left.
        places: the most cuts by which a bound moves under a limit. With 1, bounds move one at a
            time, and stages stay on their devices.
        around: how many neighbors of the best plan are climbed from too.
    """

    problem: Problem
    ways: Sequence[DeviceFates]
    tasks: int
    places: int = PLAN.places
    around: int = 0

    def __post_init__(self) -> None:
        problem = self.problem
        lists = problem.schedule.tasks(problem.devices, problem.microbatches)
        self._each = max(1, sum(map(len, lists)))
        self._cuts = Segments(problem).cuts
        free = problem.memory_limit_bytes is None
        self._are_many = len(problem.costs.layers) > PLAN.hasty_layers
        farthest = len(self._cuts) if free or self._are_many else self.places
        self._distances = tuple(distances(farthest, PLAN.stride if self._are_many else 1.0))
        self._ranks = dict[Decision, Rank]()
        # By the stage's number, first layer and choices.
        self._costs = dict[tuple[int, int, tuple[int, ...]], StageCost]()

    def top(self, begin: Iterable[Decision]) -> Decision | None:
        """Climbs from the best of some plans, and returns the best plan found.

        If several plans have the same bounds, only the best of them is climbed from.

        Returns:
            The best plan; None if none of the given plans fits. If too few tasks are left to
            simulate all given plans, the first plan that fits.
        """
        every = self._fitting(dict.fromkeys(begin))
        if not every:
            return None
        if len(every) * self._each > self.tasks:
            return every[0]
        first = dict[tuple[int, ...], Decision]()
        for one in sorted(every, key=self.rank):
            first.setdefault(one.bounds, one)
        starts = list(first.values())[: PLAN.starts]
        near_s = PLAN.near_start * self.rank(starts[0])[0]
        # Plans nearly as fast as the best are climbed from first, then the neighbors of the best,
        # and then, if tasks are left, the plans that are far slower.
        near = [one for one in starts if self.rank(one)[0] <= near_s]
        best = min(map(self.climbed, near), key=self.rank)
        best = self._climbed_around(best)
        for far in starts[len(near) :]:
            best = min(best, self.climbed(far), key=self.rank)
        return self._kept_where_free(best)

    def _climbed_around(self, best: Decision) -> Decision:
        """Climbs from neighbors of the best plan: even slower ones may lead to faster plans."""
        tried = set[Decision]()
        for _ in range(self.around):
            # The fastest untried neighbor with moved bounds. Only those with the least lower bounds
            # of seconds are simulated.
            clocked = self._clocked(self._fitting(self._some(self._moved(best))))
            first = (one for _, one in clocked[: PLAN.neighbors])
            others = (one for one in first if one not in {best, *tried})
            start = min(others, key=self.rank, default=None)
            if start is None or self.tasks <= 0:
                break
            tried.add(start)
            best = min(best, self.climbed(start), key=self.rank)
        return best

    def climbed(self, best: Decision) -> Decision:
        """Goes from a plan to its best neighbor again and again, until no neighbor is better."""
        problem = self.problem
        neighborhoods = [self._moved, self._others]
        # With several stages per device, stages wait for each other, and these moves are worth
        # searches for fates. Without a limit they cost little.
        cost_little = problem.memory_limit_bytes is None and not self._are_many
        if self.places > 1 and (problem.schedule.chunks > 1 or cost_little):
            neighborhoods.append(self._shifted)
        before = None
        while before is not best and self.tasks > 0:
            before = best
            for neighbors in neighborhoods:
                # Wider neighborhoods are tried only if narrower ones have no better plan.
                if best is before:
                    best = self._best_of(best, neighbors(best))
        return best

    def _kept_where_free(self, best: Decision) -> Decision:
        """Makes layers keep everything again wherever that does not make the step slower.

        Among equally fast plans a climb prefers the one with fewer bytes, to leave room for
        further moves. At the end of a climb, this room is no longer needed.
        """
        kept = Decision.keeping_all(best.bounds)
        step_s = self.rank(best)[0]
        if self.rank(kept)[0] <= step_s:
            return kept
        for at, choice in enumerate(best.choices):
            begins_run = RECOMPUTE_CHAIN in best.choices[at : at + 2]
            if choice != 0 and not begins_run and self.tasks > 0:
                other = replace(best, choices=with_entry(best.choices, at, 0))
                if self.rank(other)[0] <= step_s:
                    best = other
        return best

    def rank(self, decision: Decision) -> Rank:
        """Returns the rank of a plan, which is simulated the first time if it fits."""
        if decision not in self._ranks:
            rank = self._unranked(decision)
            if rank[0] < OVER:
                self.tasks -= self._each
                step_s = simulated_step_s(self.problem, self._stages(decision))
                # Rounding lets plans that differ only in rounding errors rank by bytes.
                rank = float(f"{step_s:.9e}"), *rank[1:]
            self._ranks[decision] = rank
        return self._ranks[decision]

    def _fitting(self, decisions: Iterable[Decision]) -> list[Decision]:
        """Lists the plans that fit."""
        return [one for one in decisions if self._unranked(one)[0] < OVER]

    def _unranked(self, decision: Decision) -> Rank:
        """Returns a plan's rank without simulating it: a plan that fits counts as 0 seconds."""
        problem = self.problem
        stages = self._stages(decision)
        peak = max(needed_bytes(problem, device_bytes(problem, stages)))
        host = sum(stage.host_bytes for stage in stages)
        limits = (peak, problem.memory_limit_bytes), (host, problem.host_limit_bytes)
        fits = all(limit is None or taken <= limit for taken, limit in limits)
        changed = sum(choice != 0 for choice in decision.choices)
        return 0.0 if fits else OVER, peak, host, changed

    def _stages(self, decision: Decision) -> list[StageCost]:
        stages = []
        for s, i, j in cells(decision.bounds):
            key = s, i, decision.choices[i:j]
            if key not in self._costs:
                self._costs[key] = stage_cost(self.problem, s, i, j, decision.choices)
            stages.append(self._costs[key])
        return stages

    def _best_of(self, best: Decision, neighbors: Iterable[Decision]) -> Decision:
        """Returns the best of a plan and its new neighbors, while tasks to simulate are left."""
        some = [one for one in self._some(neighbors) if one not in self._ranks]
        if self.tasks <= 0:
            return best
        # Once a bound is above the best plan's seconds, so are all later bounds.
        for least_s, one in self._clocked(some):
            if self.tasks <= 0 or least_s > self.rank(best)[0] * (1 + 1e-9):
                break
            best = min(best, one, key=self.rank)
        return best

    def _some(self, neighbors: Iterable[Decision]) -> Iterator[Decision]:
        """Yields the first neighbors, as many as may be bounded at once (`PLAN.clocked`)."""
        return islice(neighbors, PLAN.clocked // self._each)

    def _clocked(self, some: Sequence[Decision]) -> list[tuple[float, Decision]]:
        """Pairs plans with lower bounds of their seconds, in ascending order.

        The bounds are steps in which no transfer waits. Counting them uses up some of `tasks`.
        """
        if not some:
            return []
        self.tasks -= len(some) * self._each // PLAN.clocked_for_one
        plans = [self._stages(one) for one in some]
        parts_s = np.array([[stage.load().parts_s for stage in plan] for plan in plans])
        link_s = np.array([[stage.link_s for stage in plan] for plan in plans])
        least_s = least_steps_s(self.problem, parts_s.transpose(1, 2, 0), link_s.T)
        pairs = zip(least_s.tolist(), some, strict=True)
        return sorted(pairs, key=itemgetter(0))

    def _by_seconds(self, decision: Decision) -> list[int]:
        """Lists the indices of all inner bounds; those beside the slowest stages come first."""
        seconds = [stage.seconds for stage in self._stages(decision)]
        slower_s = [0.0, *(max(two) for two in pairwise(seconds))]
        return sorted(range(1, len(seconds)), key=lambda s: -slower_s[s])

    def _moved(self, decision: Decision) -> Iterator[Decision]:
        """Yields plans with a bound moved, alone or with the next bound.

        Without a limit a neighbor costs little, because no fates are searched for, and a bound may
        move to any cut. Under a limit it moves by at most `places` cuts. With many layers, fates
        stay, and a bound may move far, but not by every distance.
        """
        runs = range(1, 1 + min(2, self.places))
        for s, run in product(self._by_seconds(decision), runs):
            for bounds in moved_bounds(decision.bounds, self._cuts, s, run, self._distances):
                if self._are_many:
                    yield from valid(self.problem, [replace(decision, bounds=bounds)])
                else:
                    yield from self.refitted(bounds)

    def _shifted(self, decision: Decision) -> Iterator[Decision]:
        """Yields plans in which some stages have moved to the next device."""
        every = shifted_bounds(decision.bounds, self._cuts, busiest_s(self.problem))
        for bounds in every[: PLAN.shifted]:
            yield from self.refitted(bounds)

    def refitted(self, bounds: tuple[int, ...]) -> Iterator[Decision]:
        """Yields plans with these bounds: for each search in `ways`, one with the fates it finds.

        Without a limit it yields only the plan that keeps everything, because other fates are not
        faster.
        """
        if self.problem.memory_limit_bytes is None:
            yield Decision.keeping_all(bounds)
            return
        every = (fates.fastest(self.problem, bounds) for fates in self.ways)
        yield from dict.fromkeys(one for one in every if one)

    def _others(self, decision: Decision) -> Iterator[Decision]:
        """Yields plans with the bounds of a given plan, and with other fates.

        The fates of all layers are chosen again, or the last layers of a stage become a run. For
        models of few layers, the fates of single layers are also changed.
        """
        yield from self.refitted(decision.bounds)
        yield from computed_early(decision)
        choices = decision.choices
        if self.problem.memory_limit_bytes is None or len(choices) > PLAN.single_fate_layers:
            return
        for s, i, j in cells(decision.bounds):
            for at, layer in enumerate(self.problem.costs_of(s).layers[i:j], i):
                # The layers of a run depend on each other: no fate of theirs changes alone.
                if RECOMPUTE_CHAIN not in choices[at : at + 2]:
                    for other in range(len(layer.options)):
                        yield Decision(decision.bounds, with_entry(choices, at, other))


def distances(farthest: int, stride: float) -> Iterator[int]:
    """Yields distances from 1 to `farthest`, each about `stride` times the one before.

    >>> list(distances(16, 1.0))[-3:], list(distances(16, 1.5))
    ([14, 15, 16], [1, 2, 3, 4, 6, 9, 13])
    """
    distance = 1
    while distance <= farthest:
        yield distance
        distance = max(distance + 1, int(stride * distance))


def computed_early(decision: Decision) -> Iterator[Decision]:
    """Yields for each stage the plan in which the stage ends with a run.

    The run has the layers after the stage's last layer that keeps everything (choice 0). Its
    forwards can run again while the stage waits for its cotangents.

    >>> [one.choices for one in computed_early(Decision((0, 3, 4), (0, -1, 2, -1)))]
    [(0, -1, -2, -1)]
    """
    choices = decision.choices
    for i, j in pairwise(decision.bounds):
        begin = j
        while begin > i and choices[begin - 1] != 0:
            begin -= 1
        run = (RECOMPUTE, *[RECOMPUTE_CHAIN] * (j - begin - 1))
        if j - begin > 1 and run != choices[begin:j]:
            yield replace(decision, choices=(*choices[:begin], *run, *choices[j:]))
