"""DAPPLE's planner with replicated stages (Fan et al., 2021, sections IV-B and IV-C); `dapple.py` has its latency.

Legend: `free` are the devices of each machine that are left (g is the others)
    T_PL(j, g)  the least L found with the first j layers on g, and the others as one stage on all that is free
From each (j, g) one more stage is put after layer j' on m' devices, which each of three policies chooses (figure 5);
where it is less than what was there, this is T_PL(j', g + g') from then on (equation 5). One plan is kept for each, so
the least L of all is not always found. F_s and B_s are those of a slice, AR_s is `Cluster.reduce_s`. What cannot lead
to less than the best plan so far is left out: L is at least M (F_s + B_s) for every stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jvpipe.papers.dapple import Phases, latency_s
from jvpipe.planners.joint.rough_plan import kept_or_again
from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.segments import Grid, between, sums
from jvpipe.planners.model.shapes import Path, Shape
from jvpipe.planners.model.stage_cost import StageCost, evaluate, keeps_limits

MOST_COUNTS = 16
"""With more devices, a stage gets a multiple of the least number that leaves that many counts."""
Free = tuple[int, ...]
Places = tuple[int, ...]


def dapple_replicas(segments: LocalSegments, size: int) -> Path | None:
    """Finds DAPPLE's plan for all devices, between the coarse cuts; None if none that it finds fits.

    Args:
        segments: of the model.
        size: examples of a micro-batch.

    Two machines of two devices: gradients are summed inside machines, and activations cross the network.

    >>> from jvpipe.cost.costs import Costs, Edge, LayerCost, Option
    >>> from jvpipe.cost.hardware import Accelerator, Cluster, Link
    >>> from jvpipe.cost.local_costs import LocalCosts
    >>> from jvpipe.planners.model.problem import Problem
    >>> from jvpipe.planners.model.shapes import Shapes
    >>> from jvpipe.schedules import find_schedule
    >>> layers = (LayerCost("layer", 1.0, 2.0, (Option(8),), 100, 100),) * 4
    >>> costs = Costs(layers, tuple(Edge(i, (i + 1,), 1) for i in range(3)))
    >>> gpu = Accelerator("small", 10**9, 1e9, {})
    >>> cluster = Cluster("lab", gpu, 2, 2, peer=Link(1e4), network=Link(10.0))
    >>> model = Problem(costs, 1, find_schedule("1f1b"), 1)
    >>> shapes = Shapes(model, LocalCosts((1,), (costs,)), cluster, 4, 64)
    >>> dapple_replicas(LocalSegments(shapes), 4)
    (2:2 devices, micro-batches of 4, (0, 2, 4))
    """
    return _Search(segments, size).plan()


def fresh_first(free: Free, whole: Free, m: int) -> Free:
    """Takes devices of machines that nobody uses, in turn, then of others.

    Args:
        free: devices of each machine.
        whole: those that it has.
        m: devices that are taken.

    >>> fresh_first((2, 4, 4), (4, 4, 4), 6)
    (0, 4, 2)
    """
    return _in_turn(free, sorted(range(len(free)), key=lambda k: free[k] < whole[k]), m)


def append_first(free: Free, whole: Free, m: int) -> Free:
    """Takes devices of machines that are used already, in turn, then of others.

    Args:
        free: devices of each machine.
        whole: those that it has.
        m: devices that are taken.

    >>> append_first((2, 4, 4), (4, 4, 4), 6)
    (2, 4, 0)
    """
    return _in_turn(free, sorted(range(len(free)), key=lambda k: free[k] == whole[k]), m)


def scatter_first(free: Free, whole: Free, m: int) -> Free:
    """Takes as many devices of each used machine, of all if none is used; then of others.

    Args:
        free: devices of each machine.
        whole: those that it has.
        m: devices that are taken.

    >>> scatter_first((2, 3, 4), (4, 4, 4), 4), scatter_first((4, 4, 4), (4, 4, 4), 4)
    ((2, 2, 0), (2, 1, 1))
    """
    used = [k for k in range(len(free)) if free[k] < whole[k]]
    fresh = [k for k in range(len(free)) if k not in used]
    taken = [0] * len(free)
    for machines in (used, fresh):
        for _ in range(max(whole)):
            for k in machines:
                if sum(taken) < m and taken[k] < free[k]:
                    taken[k] += 1
    return tuple(taken)


POLICIES = fresh_first, append_first, scatter_first


@dataclass(eq=False)
class _Plans:
    """The plans behind T_PL(j, g) for each j; L is infinite where there is none."""

    latency_s: Float[np.ndarray, "n"]
    before: list[
        tuple["_Plans", int] | None
    ]  # the plans that each goes on from, and the j of that one
    places: list[Places]  # of the last stage
    phases: list[tuple[Phases, ...]]  # of all stages and the transfers between them

    @staticmethod
    def none(n: int) -> "_Plans":
        return _Plans(np.full(n, np.inf), [None] * n, [()] * n, [()] * n)

    @cached_property
    def stacked(self) -> list[Phases]:
        """The stages of all plans side by side; those of shorter plans come after stages without work."""
        longest = max(map(len, self.phases))
        every = np.zeros((3, longest, len(self.phases), 1))
        for j, phases in enumerate(self.phases):
            if phases:
                every[:, longest - len(phases) :, j, 0] = np.array(phases).T
        return [Phases(*every[:, s]) for s in range(longest)]

    def stages(self, j: int) -> list[tuple[int, Places]]:
        """The stages of the one for j: where each ends, and its devices."""
        before = self.before[j]
        return [*before[0].stages(before[1]), (j, self.places[j])] if before else []


class _Search:
    """T_PL(j, g) for all j and the g that are met, those of fewest devices first."""

    def __init__(self, segments: LocalSegments, size: int) -> None:
        shapes = segments.shapes
        self.segments, self.shapes, self.size, self.cuts = segments, shapes, size, segments.coarse
        self.microbatches = shapes.batch // size
        per_machine = shapes.cluster.devices_per_machine
        self.starts = range(0, shapes.devices, per_machine)
        self.whole = tuple(min(per_machine, shapes.devices - start) for start in self.starts)
        self.unit = -(-shapes.devices // MOST_COUNTS)
        self.inside = self.cuts > self.cuts[:, None]
        self.crossing_bytes = segments.crossing_bytes(size)
        self.known: dict[Free, _Plans] = {}
        self.best: Path | None = None
        self.best_s = np.inf
        self.left_s = self._left_s()
        self._work: dict[int, tuple[Grid, Grid, np.ndarray]] = {}

    def _left_s(self) -> Float[np.ndarray, "n"]:
        """What all devices together take at least for a micro-batch, from each cut on."""
        counts = (1, *range(self.unit, self.shapes.devices + 1, self.unit))
        shares = ((r, self.segments.share(self.size, r)) for r in counts)
        every = np.min([r * self.segments.compute_s(b) for r, b in shares], axis=0)
        total = sums(every)[self.cuts]
        return total[-1] - total

    def plan(self) -> Path | None:
        """The plan of the least L, of all that were kept on the way and fit."""
        begin = self.known[self.whole] = _Plans.none(len(self.cuts))
        begin.latency_s[0] = 0.0
        self.extend(self.whole, self.whole)  # so that there is a plan to be better than
        for left in range(sum(self.whole), 0, -1):
            for free in [free for free in self.known if sum(free) == left]:
                for m in range(self.unit, left + 1, self.unit):
                    if self.shapes.pins.feeds(m, self.size):
                        for taken in dict.fromkeys(
                            policy(free, self.whole, m) for policy in POLICIES
                        ):
                            self.extend(free, taken)
        # What L is there is the least: with more in flight layers may run again.
        every = (
            (float(x), free, j)
            for free, plans in self.known.items()
            for j, x in enumerate(plans.latency_s)
            if j
        )
        for least_s, free, j in sorted(every):
            if least_s >= self.best_s:
                break
            self.judge(free, j)
        return self.best

    def extend(self, free: Free, taken: Free) -> None:
        """Puts one more stage on some devices, after all plans that there are: equation 5."""
        before, places = self.known[free], self.places(free, taken)
        after = tuple(a - b for a, b in zip(free, taken, strict=True))
        rest = self.places(after, after)
        forward_s, backward_s, fits = self.work(len(places))
        slowest_s = np.maximum(forward_s + backward_s, self.left_s / max(1, len(rest)))
        there = (
            fits
            & np.isfinite(before.latency_s)[:, None]
            & (self.microbatches * slowest_s < self.best_s)
        )
        if not rest:
            there[:, :-1] = False
        rows = np.flatnonzero(there.any(1))
        if not len(rows):
            return
        stage = Phases(forward_s[rows], backward_s[rows], self.reduce_s(places)[rows])
        into = self.transfer(before, places, rows)
        way = [*(_at(phases, rows) for phases in before.stacked), into, stage]
        if rest:
            onward = halved(self.crossing_bytes[:, -1], np.array(self.way(places, rest)))
            last_f, last_b, _ = self.work(len(rest))
            way += [onward, Phases(last_f[:, -1], last_b[:, -1], self.reduce_s(rest)[:, -1])]
        every_s = np.where(there[rows], latency_s(way, self.microbatches), np.inf)
        at = every_s.argmin(0), np.arange(len(self.cuts))
        plans = self.known.setdefault(after, _Plans.none(len(self.cuts)))
        better = np.flatnonzero(every_s[at] < plans.latency_s)
        for end in better:
            row, j = int(at[0][end]), int(rows[at[0][end]])
            plans.latency_s[end], plans.before[end], plans.places[end] = (
                every_s[row, end],
                (before, j),
                places,
            )
            added = (into, stage) if j else (stage,)
            plans.phases[end] = (*before.phases[j], *(_at(phases, (row, end)) for phases in added))
        if len(better):
            self.judge(after, int(better[plans.latency_s[better].argmin()]))

    def judge(self, free: Free, j: int) -> None:
        """Counts the plan behind T_PL(j, g), with as many micro-batches in flight as it has: the best, if it is."""
        last = len(self.cuts) - 1
        stages = self.known[free].stages(j) + (
            [(last, self.places(free, free))] if j < last else []
        )
        bounds = 0, *(int(self.cuts[end]) for end, _ in stages)
        shape = Shape(tuple(places for _, places in stages), self.size)
        asked = self.shapes.pins.allow(bounds, shape.replicas, self.size)
        if self.known[free].latency_s[j] < self.best_s and asked:
            problem = self.shapes.problem(shape)
            evaluation = evaluate(problem, kept_or_again(problem, bounds))
            least_s = plan_latency_s(evaluation.stages, self.microbatches)
            if least_s < self.best_s and keeps_limits(problem, evaluation):
                self.best, self.best_s = (shape, bounds), least_s

    def places(self, free: Free, taken: Free) -> Places:
        """The devices that are taken: those of a machine in their order."""
        every = zip(self.starts, self.whole, free, taken, strict=True)
        return tuple(
            start + whole - left + d for start, whole, left, take in every for d in range(take)
        )

    def work(self, replicas: int) -> tuple[Grid, Grid, np.ndarray]:
        """F and B of each segment on some replicas, and whether it fits: the last stage with one micro-batch in flight,
        others with two. What does not is run again, or is over the limit all the same.
        """
        if replicas not in self._work:
            b = self.segments.share(self.size, replicas)
            fitting_s = self.segments.fitting_s(self.size, replicas, 2).copy()
            fitting_s[:, -1] = self.segments.fitting_s(self.size, replicas, 1)[:, -1]
            again_s, forwards_s = self.segments.again_s(b), sums(self.segments.layer_s(b)[0])
            fits = np.isfinite(fitting_s) & self.inside
            both_s = np.where(self.inside, np.where(fits, fitting_s, again_s), 0.0)
            forward_s = np.where(self.inside, between(forwards_s, self.cuts, self.cuts), 0.0)
            self._work[replicas] = forward_s, both_s - forward_s, fits
        return self._work[replicas]

    def reduce_s(self, places: Places) -> Grid:
        """AR of each segment."""
        if len(places) == 1:
            return np.zeros(self.inside.shape)
        link = self.shapes.cluster.reducing(places)
        return self.segments.reduce_s(self.segments.share(self.size, len(places)), link)

    def way(self, senders: Places, readers: Places) -> tuple[float, float]:
        """The seconds of a transfer from stage to stage: of its latency, and of each byte."""
        link = self.shapes.cluster.way(senders, readers)
        return link.latency_s, 1 / link.bytes_per_s

    def transfer(self, before: _Plans, places: Places, rows: Int[np.ndarray, "r"]) -> Phases:
        """What comes from the last stage of some of the plans, and goes back there.

        Args:
            before: the plans.
            places: of the stage that reads.
            rows: where in the cuts those plans end.
        """
        senders = (before.places[j] for j in rows)
        rates = [self.way(there, places) if there else (0.0, 0.0) for there in senders]
        return halved(self.crossing_bytes[rows], np.array(rates).T[:, :, None])


def halved(sizes: Float[np.ndarray, "..."], rate: Float[np.ndarray, "2 ..."]) -> Phases:
    """A transfer as a stage: half of the bytes there, half of them back.

    Args:
        sizes: bytes of both.
        rate: seconds of its latency, and of each byte.
    """
    one_way_s = np.where(sizes > 0, rate[0] + sizes / 2 * rate[1], 0.0)
    return Phases(one_way_s, one_way_s, np.zeros_like(one_way_s))


def plan_latency_s(stages: Sequence[StageCost], microbatches: int) -> float:
    """Counts L of a plan, by what its stages take."""
    phases = []
    for s, stage in enumerate(stages):
        phases += [Phases(stage.comm_s / 2, stage.comm_s / 2)] if s else []
        backward_s = stage.backward_s + stage.recompute_s
        phases.append(Phases(stage.forward_s, backward_s, stage.reduce_s))
    return float(latency_s(phases, microbatches))


def _at(phases: Phases, which: Any) -> Phases:
    """Some of the plans that phases are of."""
    return Phases(*(np.asarray(x)[which] for x in phases))


def _in_turn(free: Free, machines: Sequence[int], m: int) -> Free:
    """All free devices of some machines, one machine after another, until there are m."""
    taken = [0] * len(free)
    for k in machines:
        taken[k] = min(free[k], m - sum(taken))
    return tuple(taken)
