"""Shapes that are worth a plan: how many devices each place of a pipeline has, and micro-batches of what size.

A shape is first judged by a rough plan: 1F1B where the order of tasks is open or places have several
stages, and each stage keeps everything or computes all again. The micro-batch sizes of most promise
are looked at well: along each order of devices there is a path for each number of stages
(`shape_paths.py`). The best of them are simulated, and the best simulated ones climb: other cuts of
their shape, and a layer, a replica or the size of micro-batches at a time. Whoever asks has the best
shapes planned exactly, as if they were given.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from math import gcd, inf

import numpy as np

from jvpipe.cost.local_costs import LocalCosts
from jvpipe.planners.joint.effort import SHAPE
from jvpipe.planners.joint.planner import jvpipe
from jvpipe.planners.joint.rough_plan import RoughPlan, RoughStages, of_each_kind
from jvpipe.planners.joint.shape_paths import Ground, paths
from jvpipe.planners.model.chain_dp import least_path
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.local_segments import LocalSegments, computing_again
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import Cuts
from jvpipe.planners.model.shapes import Path, Shape, Shapes
from jvpipe.planners.model.stage_cost import Evaluation, evaluate, keeps_limits
from jvpipe.schedules.auto import AUTO
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B


def rough_plans(shapes: Shapes) -> list[RoughPlan]:
    """Finds the shapes that are worth a plan, the fastest simulated first; none if no rough plan keeps the limits.

    Args:
        shapes: those that there are.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.cost.cluster_file import find_cluster
    >>> from jvpipe.cost.local_costs import LocalCosts
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (Option(8),)),) * 4)
    >>> model = Problem(costs, 1, ONE_F_ONE_B, 1)
    >>> rough_plans(Shapes(model, LocalCosts((1,), (costs,)), find_cluster("v100-b"), 4, 8))[0].shape
    4 devices, micro-batches of 8
    """
    search = _Search(shapes)
    for size in search.sizes()[: SHAPE.sizes]:
        search.look(size)
    search.simulate(of_each_kind(search.ranked(list(search.seen))).values())
    best = search.fastest()
    if not best:
        return []
    for plan in search.fastest():
        search.simulate(search.recut(plan.shape))
    for plan in search.fastest():
        if plan.step_s < SHAPE.worth_a_climb * best[0].step_s:
            search.climb(plan)
    return sorted(search.simulated.values(), key=lambda plan: plan.step_s)


def simulated_plans(shapes: Shapes, paths: Iterable[Path]) -> list[RoughPlan]:
    """Simulates the rough plans of shapes with their bounds that keep the limits, the fastest first.

    Args:
        shapes: those that there are.
        paths: of them.
    """
    plans = (plan.simulated() for plan in _Search(shapes).ranked(paths))
    return sorted(plans, key=lambda plan: plan.step_s)


def least_bytes_plans(shapes: Shapes) -> list[RoughPlan]:
    """Finds shapes that hold little, the emptiest first: smallest micro-batches, everything computed again.

    Args:
        shapes: those that there are; their limit is not looked at.
    """
    again = LocalCosts(shapes.local.batches, tuple(map(computing_again, shapes.local.costs)))
    free = replace(shapes.model, memory_limit_bytes=None)
    search = _Search(replace(shapes, model=free, local=again))
    plans = search.ranked(search.paths(shapes.sizes[-1], search.segments.coarse))
    emptiest = sorted(plans, key=lambda plan: plan.evaluation.limit_bytes)
    return [replace(plan, problem=shapes.problem(plan.shape)) for plan in emptiest]


class _Search:
    """What is known of the shapes of a model so far: rough plans of paths, and the simulated ones."""

    def __init__(self, shapes: Shapes) -> None:
        plain = shapes.model.schedule.chunks == 1 and shapes.model.schedule != AUTO
        model = shapes.model if plain else replace(shapes.model, schedule=ONE_F_ONE_B)
        self.shapes = replace(shapes, model=model)
        self.segments = LocalSegments(self.shapes)
        self.seen: dict[Path, RoughPlan | None] = {}
        self.simulated: dict[Path, RoughPlan] = {}
        self._problems: dict[Shape, Problem] = {}
        self._stages = RoughStages()

    def sizes(self) -> list[int]:
        """The sizes of micro-batches, those of most promise first; of many some are left out."""
        every, cuts = self.shapes.sizes, self.segments.few(self.segments.coarse, SHAPE.glance_cuts)
        spread = np.linspace(0, len(every) - 1, min(len(every), SHAPE.glances)).astype(int)

        def promise(size: int) -> float:
            found = self.ranked(self.paths(size, cuts, SHAPE.glance_units, SHAPE.glance_stages))
            return found[0].estimate_s if found else inf

        return sorted((every[at] for at in spread), key=promise)

    def look(self, size: int) -> None:
        """Simulates the best paths of a size, each of which may be the fastest of its kind."""
        floor_s, best = 0.0, list[RoughPlan]()
        for _ in range(SHAPE.rounds):
            best = self.ranked(
                [
                    *(plan.path for plan in best),
                    *self.paths(size, self.segments.coarse, floor_s=floor_s),
                ]
            )
            if not best or best[0].evaluation.bottleneck_s == floor_s:
                break
            floor_s = best[0].evaluation.bottleneck_s
        self.simulate([*best[: SHAPE.paths], *of_each_kind(best).values()])

    def fastest(self) -> list[RoughPlan]:
        """The fastest simulated plan of each kind of shape."""
        return list(
            of_each_kind(sorted(self.simulated.values(), key=lambda plan: plan.step_s)).values()
        )

    def paths(
        self,
        size: int,
        cuts: Cuts,
        units: int = SHAPE.units,
        stages: int = SHAPE.stages,
        floor_s: float = 0.0,
    ) -> Iterator[Path]:
        """Yields paths along the orders of devices; of many devices also those of one each.

        Args:
            size: examples of a micro-batch.
            cuts: where stages may begin and end.
            units: of devices in an order, at most, in which stages begin.
            stages: how many there may be.
            floor_s: seconds that the slowest stage may take anyway.
        """
        count = self.shapes.pins.count
        orders, replicas, devices = (
            self.shapes.orders,
            self.shapes.pins.replicas,
            self.shapes.devices,
        )
        unit = gcd(*replicas) if replicas else -(-devices // max(units, 2 * (count or 0)))
        counts = replicas or self.segments.counts(size)
        counts = tuple(sorted({r for r in counts if r % unit == 0}))
        used = sum(replicas) if replicas else devices
        grounds = [
            Ground(self.segments, size, order[:used], counts, cuts, unit) for order in orders
        ]
        if unit > 1 and not replicas:
            grounds.append(Ground(self.segments, size, orders[0][: len(cuts) - 1], (1,), cuts))
        for ground in grounds:
            most = min(ground.places - 1, len(cuts) - 1, count or stages)
            yield from paths(ground, most, floor_s)

    def problem(self, shape: Shape) -> Problem:
        """The problem of a shape."""
        if shape not in self._problems:
            self._problems[shape] = self.shapes.problem(shape)
        return self._problems[shape]

    def counted(self, path: Path) -> RoughPlan | None:
        """The rough plan of a path, if it is one that is asked for, and fits."""
        if path not in self.seen:
            shape, bounds = path
            allowed = self.shapes.pins.allow(bounds, shape.replicas, shape.size)
            found = self._stages.evaluate(self.problem(shape), bounds) if allowed else None
            self.seen[path] = self._fitting(shape, *found) if found else None
        return self.seen[path]

    def _fitting(
        self, shape: Shape, decision: Decision, evaluation: Evaluation
    ) -> RoughPlan | None:
        problem = self.problem(shape)
        fits = keeps_limits(problem, evaluation)
        return RoughPlan(shape, problem, decision, evaluation) if fits else None

    def ranked(self, every: Iterable[Path]) -> list[RoughPlan]:
        """The rough plans that fit, those of the least estimates first."""
        plans = {path: plan for path in every if (plan := self.counted(path))}
        return sorted(plans.values(), key=lambda plan: plan.estimate_s)

    def simulate(self, plans: Iterable[RoughPlan]) -> None:
        """Simulates plans."""
        for plan in plans:
            if plan.path not in self.simulated:
                self.simulated[plan.path] = plan.simulated()

    def climb(self, plan: RoughPlan) -> None:
        """Goes on to better neighbours while there are any: each step takes less, so it ends."""
        for _ in range(SHAPE.climbs):
            near = self.ranked(self.neighbours(plan))[: SHAPE.neighbours] + self.recut(plan.shape)
            self.simulate(near)
            best = min((self.simulated[x.path] for x in near), key=lambda x: x.step_s, default=plan)
            if best.step_s >= plan.step_s:
                return
            plan = best

    def recut(self, shape: Shape) -> list[RoughPlan]:
        """The plan of a shape with the surrogate's best cuts and fates; none if cuts are given."""
        if len(shape.places) == 1 or self.shapes.pins.bounds:
            return []
        with suppress(Infeasible):
            decision = jvpipe(self.problem(shape), refine=False)
            found = self._fitting(shape, decision, evaluate(self.problem(shape), decision))
            return [found] if found else []
        return []

    def neighbours(self, plan: RoughPlan) -> Iterator[Path]:
        """Yields paths with a bound, the size of micro-batches or the devices of one or two places changed."""
        (shape, bounds), cuts = plan.path, self.segments.cuts.tolist()
        for s in range(1, len(bounds) - 1):
            at = cuts.index(bounds[s])
            for b in cuts[max(0, at - 2) : at + 3]:
                if bounds[s - 1] < b < bounds[s + 1]:
                    yield shape, (*bounds[:s], b, *bounds[s + 1 :])
        at = self.shapes.sizes.index(shape.size)
        for size in self.shapes.sizes[max(0, at - 1) : at + 2]:
            yield from self._placed(size, shape.replicas, bounds)
        for replicas in _moved(shape.replicas, self.shapes.devices):
            yield from self._placed(shape.size, replicas, bounds)
        for replicas in _regrouped(shape.replicas):
            if shares := self._balanced(shape.size, replicas):
                yield from self._placed(shape.size, replicas, shares)

    def _placed(
        self, size: int, replicas: tuple[int, ...], bounds: tuple[int, ...]
    ) -> Iterator[Path]:
        """Yields the paths of some replicas, along all orders."""
        starts = [0, *accumulate(replicas)][:-1]
        if max(replicas) <= size:
            for order in self.shapes.orders:
                yield Shape.along(order, starts, replicas, size), bounds

    def _balanced(self, size: int, replicas: tuple[int, ...]) -> tuple[int, ...]:
        """The bounds whose slowest stage is fastest; none if nothing fits."""
        stages = len(replicas)
        every = [self.segments.fitting_s(size, r, stages - s) for s, r in enumerate(replicas)]
        _, places = least_path(every, np.maximum)
        return tuple(self.segments.coarse[list(places or ())].tolist())


def _moved(replicas: tuple[int, ...], devices: int) -> Iterator[tuple[int, ...]]:
    """Yields counts with a device given from one place to another, or taken from those that are idle.

    Args:
        replicas: the counts.
        devices: that there are.
    """
    for a, more in enumerate(replicas):
        if sum(replicas) < devices:
            yield (*replicas[:a], more + 1, *replicas[a + 1 :])
        for b, less in enumerate(replicas):
            if a != b and less > 1:
                yield tuple(r + (s == a) - (s == b) for s, r in enumerate(replicas))


def _regrouped(replicas: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields counts with two neighbours exchanged or made one, or one place halved or one device apart.

    Args:
        replicas: the counts.
    """
    for s, (a, b) in enumerate(pairwise(replicas)):
        before, after = replicas[:s], replicas[s + 2 :]
        if a != b:
            yield (*before, b, a, *after)
        yield (*before, a + b, *after)
    for s, count in enumerate(replicas):
        for part in sorted({1, count // 2, count - 1} - {0, count}):
            yield (*replicas[:s], part, count - part, *replicas[s + 1 :])
