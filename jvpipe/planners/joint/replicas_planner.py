"""Data and pipeline parallelism planned together: cuts, replicas, places and the size of micro-batches.

For each order of devices and the micro-batch sizes of most promise, paths under rising caps (`replicas_search.py`);
the best of them, with plain data parallelism, straight pipelines and the papers' plans, are simulated, and the best
simulated ones climb: other cuts (`replicas_cuts.py`), a layer, a replica or the size of micro-batches at a time. The
best plan is at most `gap` above a bound (`replicas_bound.py`).
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd

import numpy as np
from jaxtyping import Int

from jvpipe.planners.joint.replicas_bound import least_bottleneck_s, lower_bound_s, replica_counts
from jvpipe.planners.joint.replicas_cuts import recut
from jvpipe.planners.joint.replicas_search import Ground, paths
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.replicas_answer import ReplicaAnswer, Simulated, of_each_shape
from jvpipe.planners.model.replicas_plan import ReplicaPlan, placed
from jvpipe.planners.model.replicas_problem import ReplicaProblem
from jvpipe.planners.model.replicas_stage import (
    Places,
    ReplicaStage,
    Tables,
    few_cuts,
    least_s,
    surrogate_s,
)
from jvpipe.planners.model.replicas_step import simulated_s

SIZES, PATHS, PLACES = 3, 10, 32
"""How many micro-batch sizes are searched well, paths simulated, places of an order."""
GLANCES, GLANCE_CUTS = 16, 14
"""How many sizes are glanced at, between how many cuts."""
WORTH_A_CLIMB, WORTH_A_PATH = 1.3, 1.15
"""How many times slower than the best the best of another shape may be where it climbs, too; and a path, by what it
would take at least, that is gone on with.
"""
CLIMBS, NEIGHBOURS, RECUTS = 12, 6, 2
"""How many steps a plan climbs at most; how many of its neighbours, and with other cuts, are simulated for each."""
FINALISTS = 5
"""How many of the fastest plans are looked at closely in the end."""
HALVINGS = 6
"""How often the way to a limit that would do is halved, where nothing keeps the limit."""


def plan_replicas(problem: ReplicaProblem) -> ReplicaAnswer:
    """Finds the plan of the least simulated seconds; layers are run again only where nothing fits otherwise.

    Args:
        problem: what is asked.

    Raises:
        Infeasible: no plan found keeps the memory limit; with one that would do.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.cost.cluster_file import find_cluster
    >>> from jvpipe.planners.model.replicas_costs import LocalCosts
    >>> costs = LocalCosts((1,), (Costs((LayerCost("block", 1.0, 2.0, (Option(8),)),) * 4),))
    >>> plan_replicas(ReplicaProblem(costs, find_cluster("v100-b"), 4, 8)).best.plan
    4 of 4 layers, micro-batches of 8
    """
    start_s = time.perf_counter()
    search = _Search(problem)
    search.run()
    if not search.simulated:
        raise search.nothing_fits()
    every = search.finalists()
    bound_s = lower_bound_s(search.tables)
    return ReplicaAnswer(every[0], of_each_shape(every), bound_s, time.perf_counter() - start_s)


@dataclass(frozen=True)
class _Effort:
    """How well a size is searched: up to how many stages, under which multiples of the least bottleneck, and whether
    with every count of replicas, or with powers of two and those that leave a power of two.
    """

    stages: int
    caps: tuple[float, ...]
    every_count: bool = True


_GLANCE, _WELL, _LEAST = (
    _Effort(5, (1.25,), False),
    _Effort(16, (1.02, 1.1, 1.25, 1.6, 2.5, 1e9)),
    _Effort(16, (1e9,)),
)


class _Search:
    """What is known of a problem so far."""

    def __init__(self, problem: ReplicaProblem) -> None:
        self.problem, self.tables = problem, Tables(problem)
        self.simulated: dict[ReplicaPlan, Simulated] = {}
        self.seen: dict[ReplicaPlan, tuple[tuple[ReplicaStage, ...], float]] = {}
        self._slowest_s: dict[int, float] = {}
        self._recut = set[
            tuple[tuple[Places, ...], int]
        ]()  # devices and sizes whose best cuts are known

    def run(self) -> None:
        """Looks at every size once, at the best ones well, and climbs."""
        sizes = self.problem.sizes
        few = sorted(
            {sizes[i * (len(sizes) - 1) // max(1, GLANCES - 1)] for i in range(GLANCES)},
            reverse=True,
        )
        glance = {size: self.glance(size) for size in (sizes if len(sizes) <= GLANCES else few)}
        for size in sorted(glance, key=lambda size: glance[size])[:SIZES]:
            every = np.arange(len(self.tables.coarse))
            self.simulate_if_fast(self.ranked(self.searched(size, every, _WELL))[:PATHS])
            self.simulate(self.of_each_shape(size))
        for size in self.straight_sizes()[:2]:
            known = self.ranked(self.straight(size, np.arange(len(self.tables.coarse))))[
                :NEIGHBOURS
            ]
            self.simulate(
                self.ranked(other for plan in known for other in recut(self.tables, plan))[:RECUTS]
            )
        self.simulate(self.of_each_shape() or self.of_least_size()[:1])
        every = sorted(self.simulated.values(), key=lambda x: x.step_s)
        for begin in [*every[:2], *of_each_shape(every[2:]).values()]:
            if begin.step_s < WORTH_A_CLIMB * every[0].step_s:
                self.climb(begin)

    def finalists(self) -> list[Simulated]:
        """The fastest plans, and the fastest of each shape, in this order; those near the best looked at closely."""
        every = sorted(self.simulated.values(), key=lambda x: x.step_s)
        some = {x.plan: x for x in (*every[:FINALISTS], *of_each_shape(every).values())}
        near = [x for x in some.values() if x.step_s < WORTH_A_CLIMB * every[0].step_s]
        for x in near:
            some[x.plan] = replace(
                x, step_s=simulated_s(self.problem, x.plan, x.stages, closely=True)
            )
        return sorted(some.values(), key=lambda x: x.step_s)

    def glance(self, size: int) -> float:
        """The surrogate's seconds of the best plan for a size, looked for in haste."""
        at = few_cuts(self.tables.local(size, 1), GLANCE_CUTS)
        best = self.ranked([*self.searched(size, at, _GLANCE), *self.plain(size)])[:1]
        self.simulate(self.plain(size))
        return self.seen[best[0]][1] if best else np.inf

    def plain(self, size: int) -> Iterator[ReplicaPlan]:
        """Yields plain data parallelism, where every device has something to do."""
        if size >= self.problem.devices:
            yield ReplicaPlan((0, self.problem.layers), (tuple(range(self.problem.devices)),), size)

    def searched(
        self, size: int, at: Int[np.ndarray, "n"], effort: _Effort
    ) -> Iterator[ReplicaPlan]:
        """Yields what paths there are between some of the coarse cuts under caps, and straight ones.

        Args:
            size: examples of a micro-batch.
            at: positions in the coarse cuts.
            effort: how many of them are looked for.
        """
        pins, G = self.problem.pins, self.problem.devices
        unit = gcd(G, *pins.replicas) if pins.replicas else -(-G // PLACES)
        counts = pins.replicas or [
            r for r in replica_counts(self.problem, size) if self._worth(r, unit)
        ]
        if not (effort.every_count or pins.replicas):
            counts = [
                r
                for r in counts
                if unit > 1 or min(r & (r - 1), (G - r) & (G - r - 1)) == 0 or r == counts[-1]
            ]
        most = pins.count or min(effort.stages, G // unit, len(at) - 1)
        for order in self.problem.orders:
            ground = Ground(self.tables, size, order, tuple(sorted(set(counts))), at, unit)
            yield from self._under_caps(ground, effort.caps, most)
        yield from self.straight(size, at)

    def straight(self, size: int, at: Int[np.ndarray, "n"]) -> Iterator[ReplicaPlan]:
        """Yields paths of one device for each stage, between some of the coarse cuts."""
        pins = self.problem.pins
        if set(pins.replicas or (1,)) != {1}:
            return
        ground = Ground(
            self.tables, size, self.problem.orders[0][: self.tables.most_stages], (1,), at
        )
        most = pins.count or min(len(ground.order), len(at) - 1)
        share_s = float(self.tables.local(size, 1).seconds[0, -1]) / len(ground.order)
        for cap_s in (1.1 * share_s, 1.5 * share_s, np.inf):
            yield from paths(ground, cap_s, most)

    def straight_sizes(self) -> list[int]:
        """The sizes of the straight plans that are known, that of the fastest by the surrogate first."""
        known = [plan for plan in self.seen if plan.shape == "straight" and self.counted(plan)]
        return list(
            dict.fromkeys(plan.size for plan in sorted(known, key=lambda plan: self.seen[plan][1]))
        )

    def _under_caps(
        self, ground: Ground, caps: Iterable[float], most: int
    ) -> Iterator[ReplicaPlan]:
        """Yields paths under rising caps, as long as a plan that is over the last one can be the best of its order."""
        size, best_s, last_s = ground.size, np.inf, 0.0
        if not ground.counts:
            return
        every = [self.problem.local.compute_s(-(-size // r)) for r in ground.counts]
        through_s, rest = float(np.min(every, axis=0).sum()), self.problem.batch // size - 1
        known = (self.seen[plan] for plan in self.seen if plan.size == size)
        known_s = min(
            (step_s for stages, step_s in known if self.tables.fits(stages)), default=np.inf
        )
        for cap in caps:
            if through_s + rest * last_s > best_s:
                return
            most_s = WORTH_A_PATH * min(best_s, known_s) - rest * last_s
            last_s = cap * self.slowest_s(size)
            for plan in paths(ground, last_s, most, most_s):
                if self.counted(plan):
                    best_s = min(best_s, self.seen[plan][1])
                yield plan

    def slowest_s(self, size: int) -> float:
        """The least bottleneck between the coarse cuts."""
        if size not in self._slowest_s:
            self._slowest_s[size] = least_bottleneck_s(self.tables, size, self.tables.coarse)
        return self._slowest_s[size]

    def _worth(self, r: int, unit: int) -> bool:
        """Whether a replica count is looked at: few devices of a machine, or whole machines, if there are many."""
        each = self.problem.cluster.devices_per_machine
        return unit == 1 or r % max(1, each // 2) == 0 or r % unit == 0

    def counted(self, plan: ReplicaPlan) -> bool:
        """Counts a plan; whether it is one that is asked for, and fits."""
        if not self.problem.pins.allow(plan):
            return False
        if plan not in self.seen:
            stages = self.tables.stages(plan)
            self.seen[plan] = stages, surrogate_s(stages, self.problem.batch // plan.size)
        return self.tables.fits(self.seen[plan][0])

    def ranked(self, plans: Iterable[ReplicaPlan]) -> list[ReplicaPlan]:
        """Those that fit, the fastest by the surrogate first."""
        return sorted(
            {plan for plan in plans if self.counted(plan)}, key=lambda plan: self.seen[plan][1]
        )

    def of_each_shape(self, size: int | None = None) -> list[ReplicaPlan]:
        """The best plan by the surrogate of each shape, of a size or of all."""
        best: dict[str, ReplicaPlan] = {}
        for plan in self.ranked(plan for plan in self.seen if size in (None, plan.size)):
            best.setdefault(plan.shape, plan)
        return list(best.values())

    def simulate(self, plans: Iterable[ReplicaPlan]) -> None:
        """Simulates plans that fit."""
        for plan in plans:
            if plan not in self.simulated and self.counted(plan):
                stages = self.seen[plan][0]
                self.simulated[plan] = Simulated(
                    plan, stages, simulated_s(self.problem, plan, stages)
                )

    def simulate_if_fast(self, plans: Iterable[ReplicaPlan]) -> None:
        """Simulates plans that fit and that may be the fastest."""
        for plan in plans:
            best_s = min((x.step_s for x in self.simulated.values()), default=np.inf)
            if (
                self.counted(plan)
                and least_s(self.seen[plan][0], self.problem.batch // plan.size) < best_s
            ):
                self.simulate([plan])

    def climb(self, at: Simulated) -> None:
        """Goes on to better neighbours while there are any."""
        for _ in range(CLIMBS):
            here = at.plan.places, at.plan.size
            near = [] if here in self._recut else self.ranked(recut(self.tables, at.plan))[:RECUTS]
            near += self.ranked(self.neighbours(at.plan))[:NEIGHBOURS]
            self._recut.add(here)
            self.simulate_if_fast(near)
            best = min(
                (self.simulated[plan] for plan in near if plan in self.simulated),
                key=lambda x: x.step_s,
                default=at,
            )
            if best.step_s >= at.step_s:
                return
            at = best

    def neighbours(self, plan: ReplicaPlan) -> Iterator[ReplicaPlan]:
        """Yields plans with a bound, a replica or the size of micro-batches moved."""
        cuts = [int(b) for b in self.tables.cuts]
        for s in range(1, plan.stages):
            at = cuts.index(plan.bounds[s])
            for b in cuts[max(0, at - 2) : at + 3]:
                if plan.bounds[s - 1] < b < plan.bounds[s + 1] and b != plan.bounds[s]:
                    yield ReplicaPlan(
                        (*plan.bounds[:s], b, *plan.bounds[s + 1 :]), plan.places, plan.size
                    )
        sizes, at = self.problem.sizes, self.problem.sizes.index(plan.size)
        for size in (*sizes[max(0, at - 1) : at], *sizes[at + 1 : at + 2]):
            if size >= max(plan.replicas):
                yield ReplicaPlan(plan.bounds, plan.places, size)
        for replicas in (plan.replicas, *_moved(plan.replicas, self.problem.devices)):
            for order in self.problem.orders:
                if max(replicas) <= plan.size:
                    starts = [0, *accumulate(replicas)][:-1]
                    yield ReplicaPlan(plan.bounds, placed(order, starts, list(replicas)), plan.size)

    def nothing_fits(self) -> Infeasible:
        """The error when no plan fits."""
        limit = self.problem.memory_limit_bytes
        assert limit is not None
        smallest = self._least_bytes(limit)
        return Infeasible(
            f"no plan found fits into {limit} bytes per device, even with every layer run again: {smallest} bytes "
            f"would do, {smallest - limit} more. Use more devices, or a smaller model",
            stage=0,
            excess_bytes=smallest - limit,
            smallest_limit_bytes=smallest,
        )

    def _least_bytes(self, limit: int) -> int:
        """The least limit known to do; between it and `limit`, which does not, a half is tried a few times."""
        roomy = _Search(replace(self.problem, memory_limit_bytes=None, recomputes=True))
        least, low = (
            min(max(x.peak_bytes for x in roomy.seen[plan][0]) for plan in roomy.of_least_size()),
            limit,
        )
        while not self._finds(least):
            low, least = least, least + least // 8 + 1
        for _ in range(HALVINGS):
            middle = (low + least) // 2
            low, least = (low, middle) if self._finds(middle) else (middle, least)
        return least

    def _finds(self, limit: int) -> bool:
        """Whether a search under a limit finds a plan."""
        return bool(_Search(replace(self.problem, memory_limit_bytes=limit)).of_least_size())

    def of_least_size(self) -> list[ReplicaPlan]:
        """Paths for the smallest micro-batches that fit, whatever they take: these hold least."""
        every = np.arange(len(self.tables.coarse))
        return self.ranked(self.searched(self.problem.sizes[-1], every, _LEAST))


def _moved(replicas: tuple[int, ...], devices: int) -> Iterator[tuple[int, ...]]:
    """Yields counts with a device given from one stage to another, or taken from those that are idle."""
    for a, more in enumerate(replicas):
        if sum(replicas) < devices:
            yield (*replicas[:a], more + 1, *replicas[a + 1 :])
        for b, less in enumerate(replicas):
            if a != b and less > 1:
                yield tuple(r + (s == a) - (s == b) for s, r in enumerate(replicas))
