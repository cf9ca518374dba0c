"""Searches shapes worth planning: devices at each place of the pipeline, and micro-batch sizes.

A shape is first judged by a rough plan: 1F1B where the order of tasks is open or places have
several stages, and each stage keeps everything or computes all again. The micro-batch sizes of most
promise are looked at well: along each order of devices there is a path for each number of stages
(`shape_paths.py`). The best of them are simulated, and the best simulated ones climb: other cuts of
their shape, and a layer, a replica or the size of micro-batches at a time. Whoever asks has the
best shapes planned exactly, as if they were given.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise, product
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
from jvpipe.planners.model.problem import with_entry
from jvpipe.planners.model.shapes import Path, Shape, Shapes
from jvpipe.planners.model.stage_cost import keeps_limits
from jvpipe.schedules.auto import AUTO
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B

Replicas = tuple[int, ...]
Bounds = tuple[int, ...]


def rough_plans(shapes: Shapes) -> list[RoughPlan]:
    """Finds the shapes that are worth a plan, the fastest simulated first; none if no rough plan
    keeps the limits.

    Args:
        shapes: those that there are.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.cost.cluster_file import find_cluster
    >>> from jvpipe.cost.local_costs import LocalCosts
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (Option(8),)),) * 4)
    >>> from jvpipe.planners.model.problem import Problem
    >>> model = Problem(costs, 1, ONE_F_ONE_B, 1)
    >>> rough_plans(Shapes(model, LocalCosts((1,), (costs,)), find_cluster("v100-b"), 4, 8))[0].shape
    4 devices, micro-batches of 8
    """
    search = _Search(shapes)
    for size in search.sizes()[: SHAPE.sizes]:
        search.look(size)
    search.simulate(of_each_kind(search.ranked(list(search.seen))).values())
    for plan in search.starts():
        search.simulate(search.ranked(search.recut(plan.shape)))
    # A climb passes by shapes that no path led to, and that are worth a climb of their own.
    for _ in range(SHAPE.rounds):
        starts = search.starts()
        for plan in starts:
            if plan.step_s < SHAPE.worth_a_climb * min(map(_step_s, starts)):
                search.climb(plan)
    return sorted(search.simulated.values(), key=_step_s)


def simulated_plans(shapes: Shapes, paths: Iterable[Path]) -> list[RoughPlan]:
    """Simulates the rough plans of shapes with their bounds that keep the limits, the fastest
    first.

    Args:
        shapes: those that there are.
        paths: of them.
    """
    plans = (plan.simulated() for plan in _Search(shapes).ranked(paths))
    return sorted(plans, key=_step_s)


def least_bytes_plans(shapes: Shapes) -> list[RoughPlan]:
    """Finds shapes that hold little, the emptiest first: smallest micro-batches, everything
    computed again.

    Args:
        shapes: those that there are; their limit is not looked at.
    """
    again = LocalCosts(shapes.local.batches, tuple(map(computing_again, shapes.local.costs)))
    free = replace(shapes.model, memory_limit_bytes=None)
    search = _Search(replace(shapes, model=free, local=again))
    plans = search.ranked(search.paths(shapes.sizes[-1]))
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
        self.climbed = set[Path]()
        self.problem = cache(self.shapes.problem)
        self.recut = cache(self._recut)
        self._stages = RoughStages()

    def sizes(self) -> list[int]:
        """The sizes of micro-batches, those of most promise first; of many some are left out."""
        every = self.shapes.sizes
        spread = np.linspace(0, len(every) - 1, min(len(every), SHAPE.glances)).astype(int)

        def promise(size: int) -> float:
            found = self.ranked(self.paths(size, hasty=True))
            return found[0].estimate_s if found else inf

        return sorted((every[at] for at in spread), key=promise)

    def look(self, size: int) -> None:
        """Simulates the best paths of a size, each of which may be the fastest of its kind."""
        floor_s, best = 0.0, list[RoughPlan]()
        # The floor is what the slowest stage of the best plan takes: paths are not preferred for being below
        # it. It rises from round to round until it is that of the best.
        for _ in range(SHAPE.rounds):
            found = list(self.paths(size, floor_s))
            best = self.ranked([*(plan.path for plan in best), *found])
            if not best or best[0].evaluation.bottleneck_s == floor_s:
                break
            floor_s = best[0].evaluation.bottleneck_s
        self.simulate([*best[: SHAPE.paths], *of_each_kind(best).values()])

    def starts(self) -> list[RoughPlan]:
        """The fastest simulated plan of each kind of shape, and of the few shapes that are fastest."""
        ranked = sorted(self.simulated.values(), key=_step_s)
        shapes = dict[Replicas, RoughPlan]()
        for plan in ranked:
            shapes.setdefault(plan.shape.replicas, plan)
        some = [*of_each_kind(ranked).values(), *list(shapes.values())[: SHAPE.starts]]
        return list({plan.path: plan for plan in some}.values())

    def paths(self, size: int, floor_s: float = 0.0, *, hasty: bool = False) -> Iterator[Path]:
        """Yields paths along the orders of devices; of many devices also those of one each.

        Args:
            size: examples of a micro-batch.
            floor_s: seconds that the slowest stage may take anyway.
            hasty: few cuts, few stages, and devices many at a time.
        """
        cuts = self.segments.coarse
        units = SHAPE.units
        stages = SHAPE.stages
        if hasty:
            cuts = self.segments.few(cuts, SHAPE.glance_cuts)
            units, stages = SHAPE.glance_units, SHAPE.glance_stages
        orders = self.shapes.orders
        pins = self.shapes.pins
        counts = self.segments.counts(size)
        stages = pins.count or stages
        replicas = pins.replicas
        unit = -(-self.shapes.devices // max(units, 2 * (pins.count or 0)))
        if replicas:
            unit, counts = gcd(*replicas), replicas
            orders = tuple(order[: sum(replicas)] for order in orders)
        some = tuple(sorted({r for r in counts if r % unit == 0}))
        grounds = [Ground(self.segments, size, order, some, cuts, unit) for order in orders]
        if unit > 1 and not replicas:
            grounds.append(Ground(self.segments, size, orders[0][: len(cuts) - 1], (1,), cuts))
        for ground in grounds:
            yield from paths(ground, min(ground.places - 1, len(cuts) - 1, stages), floor_s)

    def counted(self, path: Path) -> RoughPlan | None:
        """The rough plan of a path, if it is one that is asked for, and fits."""
        if path not in self.seen:
            (shape, bounds), self.seen[path] = path, None
            if self.shapes.pins.allow(bounds, shape.replicas, shape.size):
                # Noted as none first, so that a path that is not allowed is not asked about again.
                problem = self.problem(shape)
                plan = RoughPlan(shape, problem, *self._stages.evaluate(problem, bounds))
                self.seen[path] = plan if keeps_limits(problem, plan.evaluation) else None
        return self.seen[path]

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
        """Goes on to better neighbours while there are any: each step takes less, so it ends.

        Nothing is climbed from twice.
        """
        for _ in range(SHAPE.climbs):
            if plan.path in self.climbed:
                return
            self.climbed.add(plan.path)
            # Estimates choose the few neighbours that are simulated.
            near = self.ranked(self.neighbours(plan))[: SHAPE.neighbours]
            near += self.ranked(self.recut(plan.shape))
            self.simulate(near)
            best = min((self.simulated[x.path] for x in near), key=_step_s, default=plan)
            if best.step_s >= plan.step_s:
                return
            plan = best

    def _recut(self, shape: Shape) -> list[Path]:
        """A shape with the cuts that the surrogate finds best together with fates; none if cuts are
        given.
        """
        with suppress(Infeasible):
            if len(shape.places) > 1 and not self.shapes.pins.bounds:
                return [(shape, jvpipe(self.problem(shape), refine=False).bounds)]
        return []

    def neighbours(self, plan: RoughPlan) -> Iterator[Path]:
        """Yields paths with a bound, the size of micro-batches or the devices of one or two places
        changed.
        """
        (shape, bounds), cuts = plan.path, self.segments.cuts.tolist()
        for s in range(1, len(bounds) - 1):
            at = cuts.index(bounds[s])
            for b in cuts[max(0, at - 2) : at + 3]:
                if bounds[s - 1] < b < bounds[s + 1]:
                    yield shape, with_entry(bounds, s, b)
        at = self.shapes.sizes.index(shape.size)
        for size in self.shapes.sizes[max(0, at - 1) : at + 2]:
            yield from self._placed(size, shape.replicas, bounds)
        for replicas, others in self._regrouped(shape, bounds):
            yield from self._placed(shape.size, replicas, others)

    def _regrouped(self, shape: Shape, bounds: Bounds) -> Iterator[tuple[Replicas, Bounds]]:
        """Yields replicas and bounds with a device moved, two neighbours exchanged or made one, or
        one made two.
        """
        for replicas in _moved(shape.replicas, self.shapes.devices):
            yield replicas, bounds
            yield replicas, self._balanced(shape.size, replicas)
        for s, (a, b) in enumerate(pairwise(shape.replicas)):
            before = shape.replicas[:s]
            after = shape.replicas[s + 2 :]
            yield (*before, a + b, *after), (*bounds[: s + 1], *bounds[s + 2 :])
            if a != b:
                replicas = (*before, b, a, *after)
                yield replicas, self._balanced(shape.size, replicas)
        for s, count in enumerate(shape.replicas):
            before = shape.replicas[:s]
            after = shape.replicas[s + 1 :]
            inside = (b for b in self.segments.coarse.tolist() if bounds[s] < b < bounds[s + 1])
            for b, part in product(inside, {1, count // 2, count - 1} - {0, count}):
                yield (*before, part, count - part, *after), (*bounds[: s + 1], b, *bounds[s + 1 :])

    def _placed(self, size: int, replicas: Replicas, bounds: Bounds) -> Iterator[Path]:
        """Yields the paths of some replicas, along all orders."""
        starts = [0, *accumulate(replicas)][:-1]
        if bounds and max(replicas) <= size:
            for order in self.shapes.orders:
                yield Shape.along(order, starts, replicas, size), bounds

    def _balanced(self, size: int, replicas: Replicas) -> Bounds:
        """The bounds whose slowest stage is fastest; none if nothing fits."""
        stages = len(replicas)
        if max(replicas) > size:
            return ()
        every = [self.segments.fitting_s(size, r, stages - s) for s, r in enumerate(replicas)]
        _, places = least_path(every, np.maximum)
        return tuple(self.segments.coarse[list(places)].tolist()) if places else ()


def _step_s(plan: RoughPlan) -> float:
    """The simulated seconds of a plan."""
    return plan.step_s


def _moved(replicas: Replicas, devices: int) -> Iterator[Replicas]:
    """Yields counts with a device given from one place to another, or taken from those that are
    idle.

    Args:
        replicas: the counts.
        devices: that there are.
    """
    for a, more in enumerate(replicas):
        if sum(replicas) < devices:
            yield with_entry(replicas, a, more + 1)
        for b, less in enumerate(replicas):
            if a != b and less > 1:
                yield tuple(r + (s == a) - (s == b) for s, r in enumerate(replicas))
