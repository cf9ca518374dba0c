"""Shapes that are worth a plan: how many devices each place of a pipeline has, and micro-batches of what size.

A shape is first judged by a rough plan: 1F1B where the order of tasks is open or places have several
stages, and each stage keeps everything or computes all again. For each order of devices and the
micro-batch sizes of most promise there are paths under rising caps (`shape_paths.py`), beside plain
data parallelism and straight pipelines. The best of them are simulated, and the best simulated ones
climb: other cuts of their shape, and a layer, a replica or the size of micro-batches at a time.
Whoever asks has the best shapes planned exactly, as if they were given.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from math import gcd

import numpy as np
from jaxtyping import Int

from jvpipe.cost.local_costs import LocalCosts
from jvpipe.planners.joint.planner import jvpipe
from jvpipe.planners.joint.rough_plan import RoughPlan, RoughStages, of_each_kind
from jvpipe.planners.joint.shape_bound import least_bottleneck_s
from jvpipe.planners.joint.shape_paths import Ground, paths
from jvpipe.planners.model.chain_dp import least_path
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.local_segments import (
    LocalSegments,
    computing_again,
    few_cuts,
    least_through_s,
)
from jvpipe.planners.model.problem import Decision, Problem
from jvpipe.planners.model.segments import seconds, sums
from jvpipe.planners.model.shapes import Path, Shape, Shapes
from jvpipe.planners.model.stage_cost import Evaluation, evaluate, keeps_limits
from jvpipe.schedules.auto import AUTO
from jvpipe.schedules.one_f_one_b import ONE_F_ONE_B


@dataclass(frozen=True)
class ShapeEffort:
    """How well shapes are searched; experiments/dapple has the plans and the seconds that chose the numbers.

    Attributes:
        sizes: micro-batch sizes that are searched well.
        glances: sizes that are glanced at, to find these.
        glance_cuts: between so many cuts.
        places: where stages may begin in an order of devices.
        stages: that a path may have.
        caps: multiples of the least bottleneck under which there are paths.
        recut_caps: multiples of the least bottleneck of a shape under which its cuts are sought.
        recuts: cuts of a shape that are simulated.
        fine_cuts: up to so many cuts, all are looked at for a shape.
        paths: that are simulated of a size.
        climbs: steps of a climb.
        neighbours: of a plan that are simulated for each step.
        regrouped: of those that have its stages in other groups, likewise.
        worth_a_climb: how many times slower than the best the best of another kind may be where it climbs.
        worth_a_path: the same of a path that is gone on with.
        planned: shapes that are planned exactly at most.
        worth_a_plan: how many times slower than the best one they may be, if that keeps everything.
        microbatches: per stage, that a rough plan is simulated for; the others are as far apart.

    """

    sizes: int = 3
    glances: int = 16
    glance_cuts: int = 14
    places: int = 32
    stages: int = 16
    caps: tuple[float, ...] = (1.02, 1.1, 1.25, 1.6, 2.5, 1e9)
    recut_caps: tuple[float, ...] = (1.0, 1.01, 1.03, 1.1, 1.3, 2.0)
    recuts: int = 2
    fine_cuts: int = 256
    paths: int = 10
    climbs: int = 12
    neighbours: int = 6
    regrouped: int = 2
    worth_a_climb: float = 1.3
    worth_a_path: float = 1.15
    planned: int = 3
    worth_a_plan: float = 1.005
    microbatches: int = 4


def rough_plans(shapes: Shapes, effort: ShapeEffort | None = None) -> list[RoughPlan]:
    """Finds the shapes that are worth a plan, the fastest simulated first; none if no rough plan keeps the limits.

    Args:
        shapes: those that there are.
        effort: how well they are searched.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.cost.cluster_file import find_cluster
    >>> from jvpipe.cost.local_costs import LocalCosts
    >>> costs = Costs((LayerCost("block", 1.0, 2.0, (Option(8),)),) * 4)
    >>> model = Problem(costs, 1, ONE_F_ONE_B, 1)
    >>> rough_plans(Shapes(model, LocalCosts((1,), (costs,)), find_cluster("v100-b"), 4, 8))[0].shape
    4 devices, micro-batches of 8
    """
    search = _Search(shapes, effort or ShapeEffort())
    search.run()
    return search.ranked_simulated()


def simulated_plans(shapes: Shapes, paths: Iterable[Path]) -> list[RoughPlan]:
    """Simulates the rough plans of shapes with their bounds that keep the limits, the fastest first.

    Args:
        shapes: those that there are.
        paths: of them.
    """
    search = _Search(shapes, ShapeEffort())
    return sorted((plan.simulated() for plan in search.ranked(paths)), key=lambda x: x.step_s)


def least_bytes_plans(shapes: Shapes) -> list[RoughPlan]:
    """Finds shapes that hold little, the emptiest first: smallest micro-batches, everything computed again.

    Args:
        shapes: those that there are; their limit is not looked at.
    """
    again = LocalCosts(shapes.local.batches, tuple(map(computing_again, shapes.local.costs)))
    free = replace(shapes.model, memory_limit_bytes=None)
    search = _Search(replace(shapes, model=free, local=again), ShapeEffort(caps=(1e9,)))
    every = np.arange(len(search.segments.coarse))
    plans = search.ranked(search.paths(shapes.sizes[-1], every))
    emptiest = sorted(plans, key=lambda plan: plan.evaluation.limit_bytes)
    return [replace(plan, problem=shapes.problem(plan.shape)) for plan in emptiest]


class _Search:
    """What is known of the shapes of a model so far."""

    def __init__(self, shapes: Shapes, effort: ShapeEffort) -> None:
        plain = shapes.model.schedule.chunks == 1 and shapes.model.schedule != AUTO
        model = shapes.model if plain else replace(shapes.model, schedule=ONE_F_ONE_B)
        self.shapes, self.effort = replace(shapes, model=model), effort
        self.segments = LocalSegments(self.shapes)
        self.fine = self.segments
        if len(self.segments.coarse) < len(self.segments.cuts) <= effort.fine_cuts:
            self.fine = LocalSegments(self.shapes, effort.fine_cuts)
        self.seen: dict[Path, RoughPlan | None] = {}
        self.simulated: dict[Path, RoughPlan] = {}
        self.bottleneck_s = cache(self._bottleneck_s)
        self.proportional = cache(self._proportional)
        self._problems: dict[Shape, Problem] = {}
        self._few: dict[Shape, Problem] = {}
        self._recut = set[Shape]()
        self._stages = RoughStages()

    def run(self) -> None:
        """Looks at every size once, at the best ones well, and climbs."""
        sizes, glances = self.shapes.sizes, self.effort.glances
        spread = (i * (len(sizes) - 1) // max(1, glances - 1) for i in range(glances))
        few = sizes if len(sizes) <= glances else [sizes[i] for i in sorted(set(spread))]
        glance_s = {size: self.glance_s(size) for size in few}
        every = np.arange(len(self.segments.coarse))
        for size in sorted(glance_s, key=lambda size: glance_s[size])[: self.effort.sizes]:
            ranked = self.ranked(self.paths(size, every))
            self.simulate_if_fast(ranked[: self.effort.paths])
            self.simulate(self.best_of_each_kind(size))
        self.simulate(self.best_of_each_kind())
        if not self.simulated:
            self.simulate(self.ranked(self.paths(sizes[-1], every))[:1])
        for plan in of_each_kind(self.ranked_simulated()).values():
            self.simulate(self.recut(plan.shape))
        begin = self.ranked_simulated()
        for plan in [*begin[:2], *of_each_kind(begin[2:]).values()]:
            if plan.step_s < self.effort.worth_a_climb * begin[0].step_s:
                self.climb(plan)

    def ranked_simulated(self) -> list[RoughPlan]:
        """The plans that were simulated, the fastest first."""
        return sorted(self.simulated.values(), key=lambda plan: plan.step_s)

    def glance_s(self, size: int) -> float:
        """The estimate of the best plan for a size, looked for in haste."""
        at = few_cuts(self.segments.kept(size), self.effort.glance_cuts)
        glance = [*self.paths(size, at, hasty=True), *self.data_parallel(size)]
        self.simulate(self.ranked(self.data_parallel(size)))
        best = self.ranked(glance)
        return best[0].estimate_s if best else np.inf

    def data_parallel(self, size: int) -> Iterator[Path]:
        """Yields plain data parallelism, where every device has something to do."""
        if size >= self.shapes.devices:
            everybody = tuple(range(self.shapes.devices))
            yield Shape((everybody,), size), (0, self.shapes.layers)

    def paths(self, size: int, at: Int[np.ndarray, "n"], *, hasty: bool = False) -> Iterator[Path]:
        """Yields what paths there are between some of the coarse cuts under caps, and straight ones.

        Args:
            size: examples of a micro-batch.
            at: positions in the coarse cuts.
            hasty: few of them.
        """
        pins, devices = self.shapes.pins, self.shapes.devices
        unit = gcd(devices, *pins.replicas) if pins.replicas else -(-devices // self.effort.places)
        counts = pins.replicas or self.counts(size, unit, hasty=hasty)
        stages = 5 if hasty else self.effort.stages
        most = pins.count or min(stages, devices // unit, len(at) - 1)
        caps = (1.25,) if hasty else self.effort.caps
        for order in self.shapes.orders:
            ground = Ground(self.segments, size, order, tuple(sorted(set(counts))), at, unit)
            if counts:
                yield from self._under_caps(ground, caps, most)
        if set(pins.replicas or (1,)) == {1}:
            yield from self._straight(size, at)

    def counts(self, size: int, unit: int, *, hasty: bool) -> list[int]:
        """The replica counts that are looked at: of many devices, those that end where stages may begin.

        In haste those alone that are powers of two, or leave one.
        """
        devices, every = self.shapes.devices, self.segments.counts(size)
        if unit > 1:
            return [r for r in every if r % unit == 0]
        if not hasty:
            return list(every)
        left = {r: devices - r for r in every}
        powers = (r for r in every if min(r & (r - 1), left[r] & (left[r] - 1)) == 0)
        return sorted({*powers, *every[-1:]})

    def _straight(self, size: int, at: Int[np.ndarray, "n"]) -> Iterator[Path]:
        """Yields paths of one device for each stage."""
        order = self.shapes.orders[0][: self.segments.most_stages]
        ground = Ground(self.segments, size, order, (1,), at)
        most = self.shapes.pins.count or min(len(order), len(at) - 1)
        share_s = float(self.segments.compute_s(size).sum()) / len(order)
        for cap_s in (1.1 * share_s, 1.5 * share_s, np.inf):
            yield from paths(ground, cap_s, most)

    def _under_caps(self, ground: Ground, caps: Iterable[float], most: int) -> Iterator[Path]:
        """Yields paths under rising caps, as long as a plan that is over the last one can be the best of its order."""
        size = ground.size
        layers_s = least_through_s(self.segments, size, ground.counts)
        through_s, rest = float(layers_s.sum()), self.shapes.batch // size - 1
        best_s, least_s = self._best_s(size), self.bottleneck_s(size)
        cap_s = 0.0
        for cap in caps:
            if through_s + rest * cap_s > best_s:
                return
            most_s = self.effort.worth_a_path * best_s - rest * cap_s
            cap_s = cap * least_s
            for path in paths(ground, cap_s, most, most_s):
                if plan := self.counted(path):
                    best_s = min(best_s, plan.estimate_s)
                yield path

    def _bottleneck_s(self, size: int) -> float:
        """The least seconds of the slowest stage, of a size."""
        return least_bottleneck_s(self.segments, size, self.segments.counts(size))

    def _best_s(self, size: int) -> float:
        """The estimate of the best plan that is known of a size."""
        every = (plan for (shape, _), plan in self.seen.items() if plan and shape.size == size)
        return min((plan.estimate_s for plan in every), default=np.inf)

    def problem(self, shape: Shape) -> Problem:
        """The problem of a shape."""
        if shape not in self._problems:
            self._problems[shape] = self.shapes.problem(shape)
        return self._problems[shape]

    def few(self, shape: Shape) -> Problem:
        """The problem of a shape with few micro-batches, if more of them are not more in flight."""
        if shape not in self._few:
            problem = self.problem(shape)
            count, in_flight = self.effort.microbatches * problem.stages, problem.schedule.in_flight
            saturated = problem.microbatches > 2 * count and in_flight(
                problem.devices, count
            ) == in_flight(problem.devices, 2 * count)
            self._few[shape] = replace(problem, microbatches=count) if saturated else problem
        return self._few[shape]

    def counted(self, path: Path) -> RoughPlan | None:
        """The rough plan of a path, if it is one that is asked for, and fits."""
        if path not in self.seen:
            shape, bounds = path
            allowed = self.shapes.pins.allow(bounds, shape.replicas, shape.size)
            counted = self._stages.evaluate(shape, self.few(shape), bounds) if allowed else None
            self.seen[path] = self._fitting(shape, *counted) if counted else None
        return self.seen[path]

    def _fitting(
        self, shape: Shape, decision: Decision, evaluation: Evaluation
    ) -> RoughPlan | None:
        problem, few = self.problem(shape), self.few(shape)
        fits = keeps_limits(few, evaluation)
        return RoughPlan(shape, problem, few, decision, evaluation) if fits else None

    def ranked(self, every: Iterable[Path]) -> list[RoughPlan]:
        """The rough plans that fit, those of the least estimates first."""
        plans = {path: plan for path in every if (plan := self.counted(path))}
        return sorted(plans.values(), key=lambda plan: plan.estimate_s)

    def best_of_each_kind(self, size: int | None = None) -> list[RoughPlan]:
        """The plan of the least estimate of each kind of shape, of a size or of all."""
        every = (plan for plan in self.seen.values() if plan and size in (None, plan.shape.size))
        ranked = sorted(every, key=lambda plan: plan.estimate_s)
        return list(of_each_kind(ranked).values())

    def simulate(self, plans: Iterable[RoughPlan]) -> None:
        """Simulates plans."""
        for plan in plans:
            if plan.path not in self.simulated:
                self.simulated[plan.path] = plan.simulated()

    def simulate_if_fast(self, plans: Iterable[RoughPlan]) -> None:
        """Simulates plans that may be the fastest."""
        for plan in plans:
            best_s = min((x.step_s for x in self.simulated.values()), default=np.inf)
            if plan.least_s < best_s:
                self.simulate([plan])

    def climb(self, plan: RoughPlan) -> None:
        """Goes on to better neighbours while there are any: each step takes less, so it ends.

        Where no neighbour is better, the same devices are tried in other groups.
        """
        for _ in range(self.effort.climbs):
            near = self.recut(plan.shape)
            near += self.ranked(self.neighbours(plan))[: self.effort.neighbours]
            best = self._best_of(plan, near)
            if best is plan:
                near = self.ranked(self.regrouped(plan.shape))[: self.effort.regrouped]
                best = self._best_of(plan, near)
            if best is plan:
                return
            plan = best

    def _best_of(self, plan: RoughPlan, near: Sequence[RoughPlan]) -> RoughPlan:
        """The fastest of some plans by simulation; the given one if none is faster."""
        self.simulate_if_fast(near)
        known = (self.simulated[x.path] for x in near if x.path in self.simulated)
        best = min(known, key=lambda x: x.step_s, default=plan)
        return best if best.step_s < plan.step_s else plan

    def recut(self, shape: Shape) -> list[RoughPlan]:
        """The best plans of a shape with other cuts; none if they are given, or if it has been asked before."""
        if shape in self._recut or len(shape.places) == 1 or self.shapes.pins.bounds is not None:
            return []
        self._recut.add(shape)
        plans = self.ranked(self._cuts_under_caps(shape))[: self.effort.recuts]
        with suppress(Infeasible):
            decision = jvpipe(self.problem(shape), refine=False)
            evaluation = evaluate(self.few(shape), decision)
            plans += filter(None, [self._fitting(shape, decision, evaluation)])
        return plans

    def _cuts_under_caps(self, shape: Shape) -> Iterator[Path]:
        """Yields the best cuts of a shape under rising caps of its slowest stage, of all cuts if they are not many."""
        counts = tuple(sorted(set(shape.replicas)))
        order = tuple(d for devices in shape.places for d in devices)
        at, stages = np.arange(len(self.fine.coarse)), len(shape.places)
        crossing, slowest = self.fine.crossing_bytes(shape.size), []
        for s, r in enumerate(shape.replicas):
            comm_s = seconds(self.problem(shape).link_into(s), crossing)
            slowest.append(np.maximum(self.fine.fitting_s(shape.size, r, stages - s), comm_s))
        least_s, places = least_path(slowest, np.maximum)
        if places is None:
            return
        ground = Ground(self.fine, shape.size, order, counts, at, replicas=shape.replicas)
        for cap in self.effort.recut_caps:
            for found, bounds in paths(ground, cap * least_s * (1 + 1e-12), stages):
                if found.replicas == shape.replicas:
                    yield shape, bounds

    def neighbours(self, plan: RoughPlan) -> Iterator[Path]:
        """Yields paths with a bound, a replica or the size of micro-batches moved."""
        (shape, bounds), cuts = plan.path, self.segments.cuts.tolist()
        for s in range(1, len(bounds) - 1):
            at = cuts.index(bounds[s])
            for b in cuts[max(0, at - 2) : at + 3]:
                if bounds[s - 1] < b < bounds[s + 1] and b != bounds[s]:
                    yield shape, (*bounds[:s], b, *bounds[s + 1 :])
        sizes, at = self.shapes.sizes, self.shapes.sizes.index(shape.size)
        for size in (*sizes[max(0, at - 1) : at], *sizes[at + 1 : at + 2]):
            if size >= max(shape.replicas):
                yield replace(shape, size=size), bounds
        for replicas in (shape.replicas, *_moved(shape.replicas, self.shapes.devices)):
            yield from self._placed(shape.size, replicas, bounds)

    def regrouped(self, shape: Shape) -> Iterator[Path]:
        """Yields paths with neighbours exchanged, made one, or one made two, and work in proportion to devices."""
        for replicas in _regrouped(shape.replicas):
            if bounds := self.proportional(shape.size, replicas):
                yield from self._placed(shape.size, replicas, bounds)

    def _placed(
        self, size: int, replicas: tuple[int, ...], bounds: tuple[int, ...]
    ) -> Iterator[Path]:
        """Yields the paths of some replicas, along all orders."""
        starts = [0, *accumulate(replicas)][:-1]
        if max(replicas) <= size:
            for order in self.shapes.orders:
                yield Shape.along(order, starts, replicas, size), bounds

    def _proportional(self, size: int, replicas: tuple[int, ...]) -> tuple[int, ...]:
        """The bounds with as much work for each stage as it has replicas, about; none if there are too few cuts."""
        cuts = self.segments.cuts
        work_s = sums(self.segments.compute_s(size))[cuts]
        shares = np.cumsum(replicas)[:-1] / sum(replicas) * work_s[-1]
        at = np.abs(work_s[:, None] - shares).argmin(0)
        places = (0, *at.tolist(), len(cuts) - 1)
        rising = all(a < b for a, b in pairwise(places))
        return tuple(int(cuts[place]) for place in places) if rising else ()


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
