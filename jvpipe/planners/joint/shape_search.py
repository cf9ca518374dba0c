"""Finds shapes that are worth an exact plan: devices per place, and examples per micro-batch.

A place is a position along the pipeline; its devices are replicas, which share each micro-batch. A
shape with the bounds of its stages is called a path. Planning every shape exactly would take too
long, so paths are judged by rough plans, in which each stage keeps everything or recomputes
everything (`rough_plan.py`). The search has four steps:

1. Glance at sizes of micro-batches, and go on with the most promising ones.
2. For each of these sizes, each order of devices and each number of stages, find a path
   (`shape_paths.py`). Simulate the best paths.
3. Give the fastest shapes better cuts, and simulate them again.
4. Climb from the fastest: move a bound, move a replica, or change the size of micro-batches.

The caller then plans the best shapes exactly, as if the user had fixed them. The search does
not prove that it finds the best shape. How much it tries is set by `SHAPE` in `effort.py`, which
may be changed.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise, product
from math import gcd, inf
from operator import attrgetter

import numpy as np

from jvpipe.cost.local_costs import LocalCosts
from jvpipe.planners.joint.effort import SHAPE
from jvpipe.planners.joint.plan_search import jvpipe
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
_step_s = attrgetter("step_s")


def rough_plans(shapes: Shapes) -> list[RoughPlan]:
    """Finds the shapes that are worth an exact plan, the fastest simulated first.

    The list is empty if no rough plan keeps the limits.

    Args:
        shapes: the possible shapes, and the limits.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.cost.cluster_file import find_cluster
    >>> from jvpipe.cost.local_costs import LocalCosts
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (Option(8),)),) * 4)
    >>> from jvpipe.planners.model.problem import Problem
    >>> model = Problem(costs, 1, ONE_F_ONE_B, 1)
    >>> local = LocalCosts((1,), (costs,))
    >>> rough_plans(Shapes(model, local, find_cluster("v100-b"), 4, 8))[0].shape
    4 devices, micro-batches of 8
    """
    search = _ShapeSearch(shapes)
    for size in search.sizes()[: SHAPE.sizes]:
        search.look(size)
    counted = search.ranked(list(search.seen))
    search.simulate(of_each_kind(counted).values())
    for plan in search.starts():
        search.simulate(search.ranked(search.recut(plan.shape)))
    # A climb simulates shapes that the steps before did not find. If some are fast enough, the next
    # round climbs from them.
    for _ in range(SHAPE.rounds):
        starts = search.starts()
        fastest_s = min(map(_step_s, starts), default=inf)
        for plan in starts:
            if plan.step_s < SHAPE.worth_a_climb * fastest_s:
                search.climb(plan)
    return sorted(search.simulated.values(), key=_step_s)


def simulated_plans(shapes: Shapes, paths: Iterable[Path]) -> list[RoughPlan]:
    """Returns the rough plans of paths that keep the limits, simulated, the fastest first.

    Args:
        shapes: the possible shapes.
        paths: shapes, each with the bounds of its stages.
    """
    plans = (plan.simulated() for plan in _ShapeSearch(shapes).ranked(paths))
    return sorted(plans, key=_step_s)


def least_bytes_plans(shapes: Shapes) -> list[RoughPlan]:
    """Finds shapes that hold few bytes, the emptiest first, whatever the limit.

    They have the smallest micro-batches, and recompute everything.

    Args:
        shapes: the possible shapes; their memory limit is ignored.
    """
    costs = tuple(map(computing_again, shapes.local.costs))
    again = LocalCosts(shapes.local.batches, costs)
    free = replace(shapes.model, memory_limit_bytes=None)
    search = _ShapeSearch(replace(shapes, model=free, local=again))
    plans = search.ranked(search.paths(shapes.sizes[-1]))
    emptiest = sorted(plans, key=lambda plan: plan.evaluation.limit_bytes)
    return [replace(plan, problem=shapes.problem(plan.shape)) for plan in emptiest]


class _ShapeSearch:
    """A search in progress.

    Attributes:
        seen: the rough plan of each path seen so far; None if the path breaks a limit or a pin (a
            part of the shape that the user has fixed).
        simulated: the plans that were simulated.
        climbed: the paths that were climbed from.
    """

    def __init__(self, shapes: Shapes) -> None:
        model = shapes.model
        # Rough plans have one stage per place and a known order of tasks.
        is_plain = model.schedule.chunks == 1 and model.schedule != AUTO
        if not is_plain:
            model = replace(model, schedule=ONE_F_ONE_B)
        self.shapes = replace(shapes, model=model)
        self.segments = LocalSegments(self.shapes)
        self.seen: dict[Path, RoughPlan | None] = {}
        self.simulated: dict[Path, RoughPlan] = {}
        self.climbed = set[Path]()
        self.problem = cache(self.shapes.problem)
        self.recut = cache(self._recut)
        self._stages = RoughStages()

    def sizes(self) -> list[int]:
        """Lists sizes of micro-batches, the most promising first; only some if there are many."""
        every = self.shapes.sizes
        count = min(len(every), SHAPE.glances)
        spread = np.linspace(0, len(every) - 1, count).astype(int)

        def promise(size: int) -> float:
            found = self.ranked(self.paths(size, hasty=True))
            return found[0].estimate_s if found else inf

        return sorted((every[at] for at in spread), key=promise)

    def look(self, size: int) -> None:
        """Simulates the best paths found with a size, and the best of each kind of shape."""
        floor_s = 0.0
        best = list[RoughPlan]()
        # The floor is the seconds of the slowest stage of the best plan so far. Stages that are
        # faster gain nothing. Rounds end when a round finds the floor that it began with.
        for _ in range(SHAPE.rounds):
            earlier = [plan.path for plan in best]
            best = self.ranked([*earlier, *self.paths(size, floor_s)])
            if not best or best[0].evaluation.bottleneck_s == floor_s:
                break
            floor_s = best[0].evaluation.bottleneck_s
        kinds = of_each_kind(best).values()
        self.simulate([*best[: SHAPE.paths], *kinds])

    def starts(self) -> list[RoughPlan]:
        """Lists the fastest simulated plan of each kind of shape and of each of the best shapes."""
        ranked = sorted(self.simulated.values(), key=_step_s)
        shapes = dict[Replicas, RoughPlan]()
        for plan in ranked:
            shapes.setdefault(plan.shape.replicas, plan)
        fastest = list(shapes.values())[: SHAPE.starts]
        some = [*of_each_kind(ranked).values(), *fastest]
        distinct = {plan.path: plan for plan in some}
        return list(distinct.values())

    def paths(
        self,
        size: int,
        floor_s: float = 0.0,
        *,
        hasty: bool = False,
    ) -> Iterator[Path]:
        """Yields paths along the orders of devices, which are divided into equal units.

        The devices of a unit are placed together.

        Args:
            size: examples of a micro-batch.
            floor_s: making a stage faster than this many seconds gains nothing.
            hasty: whether to try few cuts and few stages, and to place many devices at once.
        """
        cuts = self.segments.coarse
        units = SHAPE.units
        stages = SHAPE.stages
        if hasty:
            cuts = self.segments.few(cuts, SHAPE.glance_cuts)
            units = SHAPE.glance_units
            stages = SHAPE.glance_stages
        orders = self.shapes.orders
        pins = self.shapes.pins
        counts = self.segments.counts(size)
        # If the user has fixed the number of stages, there are at least two units for each stage.
        most_units = max(units, 2 * (pins.count or 0))
        unit = -(-self.shapes.devices // most_units)
        if pins.replicas:
            counts = pins.replicas
            unit = gcd(*counts)
            orders = tuple(order[: sum(counts)] for order in orders)
        else:  # slow devices may stay idle
            orders += self.shapes.fastest
        whole = tuple(sorted({r for r in counts if r % unit == 0}))
        grounds = [Ground(self.segments, size, order, whole, cuts, unit) for order in orders]
        if unit > 1 and not pins.replicas:  # one more, for stages of one device each
            few = orders[0][: len(cuts) - 1]
            grounds.append(Ground(self.segments, size, few, (1,), cuts))
        for ground in grounds:
            most_stages = min(ground.places - 1, len(cuts) - 1, pins.count or stages)
            yield from paths(ground, most_stages, floor_s)

    def counted(self, path: Path) -> RoughPlan | None:
        """Makes the rough plan of a path; None if the path does not fit or breaks a pin."""
        if path not in self.seen:
            shape, bounds = path
            self.seen[path] = None
            if self.shapes.pins.allow(bounds, shape.replicas, shape.size):
                problem = self.problem(shape)
                counted = self._stages.evaluate(problem, bounds)
                plan = RoughPlan(shape, problem, *counted)
                if keeps_limits(problem, plan.evaluation):
                    self.seen[path] = plan
        return self.seen[path]

    def ranked(self, every: Iterable[Path]) -> list[RoughPlan]:
        """Lists the rough plans of these paths that fit, the fastest by estimate first."""
        counted = map(self.counted, dict.fromkeys(every))
        return sorted(filter(None, counted), key=attrgetter("estimate_s"))

    def simulate(self, plans: Iterable[RoughPlan]) -> None:
        """Simulates the plans that were not simulated before."""
        for plan in plans:
            if plan.path not in self.simulated:
                self.simulated[plan.path] = plan.simulated()

    def climb(self, plan: RoughPlan) -> None:
        """Goes from a plan to its fastest neighbor, as long as that neighbor is faster.

        The climb also ends at a plan that was climbed from before.
        """
        for _ in range(SHAPE.climbs):
            if plan.path in self.climbed:
                return
            self.climbed.add(plan.path)
            # Simulating all neighbors takes too long: those with the best estimates are chosen.
            near = self.ranked(self.neighbors(plan))[: SHAPE.neighbors]
            near += self.ranked(self.recut(plan.shape))
            self.simulate(near)
            simulated = [self.simulated[neighbor.path] for neighbor in near]
            best = min(simulated, key=_step_s, default=plan)
            if best.step_s >= plan.step_s:
                return
            plan = best

    def _recut(self, shape: Shape) -> list[Path]:
        """Finds a shape's best cuts by a closed formula (`surrogate.py`).

        Empty if the shape has one place, if the user has fixed the cuts, or if nothing fits.
        """
        if len(shape.places) == 1 or self.shapes.pins.bounds:
            return []
        with suppress(Infeasible):
            decision = jvpipe(self.problem(shape), refine=False)
            return [(shape, decision.bounds)]
        return []

    def neighbors(self, plan: RoughPlan) -> Iterator[Path]:
        """Yields paths with another bound, another size, or other devices at one or two places."""
        shape, bounds = plan.path
        cuts = self.segments.cuts.tolist()
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

    def _regrouped(
        self,
        shape: Shape,
        bounds: Bounds,
    ) -> Iterator[tuple[Replicas, Bounds]]:
        """Yields replicas and bounds with a replica moved, or places exchanged, joined or split."""
        counts = shape.replicas
        for moved in _moved(counts, self.shapes.devices):
            yield moved, bounds
            yield moved, self._balanced(shape.size, moved)
        for s, (a, b) in enumerate(pairwise(counts)):
            before = counts[:s]
            after = counts[s + 2 :]
            yield (*before, a + b, *after), (*bounds[: s + 1], *bounds[s + 2 :])
            if a != b:
                exchanged = (*before, b, a, *after)
                yield exchanged, self._balanced(shape.size, exchanged)
        for s, count in enumerate(counts):
            parts = {1, count // 2, count - 1} - {0, count}
            for b, part in product(self.segments.coarse.tolist(), parts):
                if bounds[s] < b < bounds[s + 1]:
                    split = (*counts[:s], part, count - part, *counts[s + 1 :])
                    yield split, (*bounds[: s + 1], b, *bounds[s + 1 :])

    def _placed(
        self,
        size: int,
        replicas: Replicas,
        bounds: Bounds,
    ) -> Iterator[Path]:
        """Yields for each order of devices the path with these replicas and these bounds."""
        starts = [0, *accumulate(replicas)][:-1]
        if bounds and max(replicas) <= size:
            for order in self.shapes.orders:
                yield Shape.along(order, starts, replicas, size), bounds

    def _balanced(self, size: int, replicas: Replicas) -> Bounds:
        """Finds the bounds whose slowest stage takes the least time; empty if no bounds fit."""
        stages = len(replicas)
        if max(replicas) > size:
            return ()
        fitting_s = self.segments.fitting_s
        every = [fitting_s(size, r, stages - s) for s, r in enumerate(replicas)]
        _, places = least_path(every, np.maximum)
        if places is None:
            return ()
        bounds = self.segments.coarse[list(places)]
        return tuple(bounds.tolist())


def _moved(replicas: Replicas, devices: int) -> Iterator[Replicas]:
    """Yields counts with a device moved from one place to another, or an idle device added.

    Args:
        replicas: the number of devices of each place.
        devices: the number of all devices.
    """
    for a, more in enumerate(replicas):
        larger = with_entry(replicas, a, more + 1)
        if sum(larger) <= devices:
            yield larger
        for b, less in enumerate(replicas):
            if a != b and less > 1:
                yield with_entry(larger, b, less - 1)
