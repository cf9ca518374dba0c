"""DAPPLE's planner with replicated stages; `dapple.py` has the symbols of its latency.

Paper: Fan et al., PPoPP 2021, sections IV-B (device placement) and IV-C (the dynamic program).

Legend, in the paper's symbols where it has them:
    g           the devices that the stages planned so far occupy; in the code, `free` has for each
                machine the number of its other devices
    T_PL(j, g)  the least L found with the first j layers on the devices g, and the other layers as
                one stage on all free devices
    F_s, B_s    forward and backward seconds of stage s for the share of a micro-batch that one of
                its devices works on
    AR_s        seconds of the all-reduce of stage s's gradients over its devices

Each plan for (j, g) is extended by one more stage, which ends at layer j' and takes m' more
devices, g'. Three policies each propose which m' devices (figure 5). If the extended plan's L is
less than T_PL(j', g + g'), the plan replaces the one for (j', g + g') (equation 5). Only one plan
is kept for each (j, g), so the least L of all plans is not always found.

L is at least M (F_s + B_s) for every stage, because a stage works on each of the M micro-batches.
So extensions are left out if this bound is not below the best plan's L.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jvpipe.papers.dapple import Phases, latency_s
from jvpipe.papers.effort import PAPER
from jvpipe.planners.joint.rough_plan import kept_or_again
from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.segments import Grid, between, sums
from jvpipe.planners.model.shapes import Path, Shape
from jvpipe.planners.model.stage_cost import StageCost, evaluate_decision, keeps_limits

Free = tuple[int, ...]
"""For each machine, a number of its devices: those that are free, or those that are taken."""
Places = tuple[int, ...]
"""Devices, by their numbers."""


def dapple_replicas(segments: LocalSegments, size: int) -> Path | None:
    """Finds DAPPLE's plan for all devices, with coarse cuts; None if no plan that it tries fits.

    Args:
        segments: the costs of the model's segments.
        size: the examples of a micro-batch.

    On two machines of two devices, the plan below sums gradients inside each machine and sends
    activations over the network.

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


def in_turn(used: bool, free: Free, whole: Free, m: int) -> Free:
    """Takes devices machine by machine: those of used machines first, or those of unused ones.

    A machine is used if at least one of its devices is not free.

    Args:
        used: whether used machines come first; if not, unused ones do.
        free: the number of free devices of each machine.
        whole: the number of all devices of each machine.
        m: how many devices are taken.

    Returns:
        The number of devices that are taken from each machine.

    >>> in_turn(True, (2, 4, 4), (4, 4, 4), 6), in_turn(False, (2, 4, 4), (4, 4, 4), 6)
    ((2, 4, 0), (0, 4, 2))
    """
    taken = [0] * len(free)
    for k in sorted(range(len(free)), key=lambda k: (free[k] < whole[k]) != used):
        taken[k] = min(free[k], m - sum(taken))
    return tuple(taken)


fresh_first = partial(in_turn, False)
append_first = partial(in_turn, True)


def scatter_first(free: Free, whole: Free, m: int) -> Free:
    """Takes equally many devices of each used machine, then of unused ones.

    Args:
        free: the number of free devices of each machine.
        whole: the number of all devices of each machine.
        m: how many devices are taken.

    Returns:
        The number of devices that are taken from each machine.

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
    """The plans whose L is T_PL(j, g), for one g; each attribute has one item for each j.

    Attributes:
        latency_s: L of the plan; infinite if there is no plan.
        before: the plan that this one extends by a stage, as its `_Plans` and its j; None for the
            empty plan, and if there is no plan.
        places: the devices of the plan's last stage.
        phases: the phases of the plan's stages and of the transfers between them, in order.
    """

    latency_s: Float[np.ndarray, "n"]
    before: list[tuple["_Plans", int] | None]
    places: list[Places]
    phases: list[tuple[Phases, ...]]

    @staticmethod
    def none(n: int) -> "_Plans":
        return _Plans(np.full(n, np.inf), [None] * n, [()] * n, [()] * n)

    @cached_property
    def stacked(self) -> list[Phases]:
        """The phases of all plans as arrays over j; shorter plans begin with empty stages."""
        longest = max(map(len, self.phases))
        every = np.zeros((3, longest, len(self.phases), 1))
        for j, phases in enumerate(self.phases):
            if phases:
                # A stage without work does not change L: it adds nothing to the warm-up, and its
                # steady phase of 0 seconds cannot make it the pivot.
                every[:, longest - len(phases) :, j, 0] = np.array(phases).T
        return [Phases(*every[:, s]) for s in range(longest)]

    def stages(self, j: int) -> list[tuple[int, Places]]:
        """Lists the stages of the plan for j, each as the index of its last cut and its devices."""
        before = self.before[j]
        if before is None:
            return []
        plans, end = before
        return [*plans.stages(end), (j, self.places[j])]


class _Search:
    """The dynamic program: T_PL(j, g) for all j and all g that occur, the smallest g first.

    Attributes:
        known: the plans for each g, by the devices that g leaves free.
        best: the best plan so far that keeps the limits, as its shape and bounds.
        best_s: L of that plan, counted with its real number of micro-batches in flight.
        left_s: for each cut, a lower bound on the sum of all devices' seconds for the layers
            after the cut.
    """

    def __init__(self, segments: LocalSegments, size: int) -> None:
        shapes = segments.shapes
        self.segments, self.shapes = segments, shapes
        self.size, self.cuts = size, segments.coarse
        self.microbatches = shapes.batch // size
        per_machine = shapes.cluster.devices_per_machine
        self.starts = range(0, shapes.devices, per_machine)
        left = (shapes.devices - start for start in self.starts)
        self.whole = tuple(min(per_machine, devices) for devices in left)
        # On many devices, only multiples of a unit are tried as numbers of devices of a stage, so
        # that there are at most `PAPER.replica_counts` of them.
        self.unit = -(-shapes.devices // PAPER.replica_counts)
        self.inside = self.cuts > self.cuts[:, None]
        self.crossing_bytes = segments.crossing_bytes(size)
        self.known: dict[Free, _Plans] = {}
        self.best: Path | None = None
        self.best_s = np.inf
        self.left_s = self._left_s()
        self.work = cache(self._work)

    def _left_s(self) -> Float[np.ndarray, "n"]:
        """Returns for each cut a lower bound on all devices' seconds for the layers after it."""
        # If r devices share a layer, together they take r times the seconds of one share.
        # The least product over all r bounds the layer's seconds from below, whichever r a
        # plan has.
        counts = (1, *range(self.unit, self.shapes.devices + 1, self.unit))
        shares = ((r, self.segments.share(self.size, r)) for r in counts)
        works = [r * self.segments.compute_s(b) for r, b in shares]
        every = np.min(works, axis=0)
        total = sums(every)[self.cuts]
        return total[-1] - total

    def plan(self) -> Path | None:
        """Returns the plan with the least L among the kept plans that fit; None if none fits."""
        begin = self.known[self.whole] = _Plans.none(len(self.cuts))
        begin.latency_s[0] = 0.0
        self.extend(self.whole, self.whole)  # one stage on all devices is the first plan to beat
        for left in range(sum(self.whole), 0, -1):
            for free in [free for free in self.known if sum(free) == left]:
                for m in range(self.unit, left + 1, self.unit):
                    if self.shapes.pins.feeds(m, self.size):
                        self._extend_by(free, m)
        # T_PL counts the fewest micro-batches that can be in flight if a step has two or more.
        # `judge` counts the real number, with which more layers may have to run again. So the L
        # that `judge` finds is not less than T_PL. Plans are judged in order of rising T_PL, until
        # T_PL reaches the best plan's L.
        every: list[tuple[float, Free, int]] = []
        for free, plans in self.known.items():
            every += [(x, free, j) for j, x in enumerate(plans.latency_s.tolist()) if j]
        for least_s, free, j in sorted(every):
            if least_s >= self.best_s:
                break
            self.judge(free, j)
        return self.best

    def _extend_by(self, free: Free, m: int) -> None:
        """Adds one more stage on m devices; each choice that a policy makes is tried once."""
        for taken in dict.fromkeys(policy(free, self.whole, m) for policy in POLICIES):
            self.extend(free, taken)

    def extend(self, free: Free, taken: Free) -> None:
        """Adds one more stage to all plans that leave the same devices free (equation 5).

        Args:
            free: the number of devices of each machine that the plans leave free.
            taken: the number of devices of each machine that the new stage gets.
        """
        before = self.known[free]
        places = self.places(free, taken)
        after = tuple(a - b for a, b in zip(free, taken, strict=True))
        rest = self.places(after, after)
        forward_s, backward_s, fits = self.work(len(places))
        # A row of the grids is where the stage begins, which is the j of the plan before it; a
        # column is where the stage ends.
        rest_s = self.left_s / max(1, len(rest))
        slowest_s = np.maximum(forward_s + backward_s, rest_s)
        # L is at least the number of micro-batches times the seconds of the slowest stage.
        may_win = self.microbatches * slowest_s < self.best_s
        is_reached = np.isfinite(before.latency_s)[:, None]
        possible = fits & is_reached & may_win
        if not rest:
            possible[:, :-1] = False  # no device is left, so the stage must end with the last layer
        rows = np.flatnonzero(possible.any(1))
        if not len(rows):
            return
        stage = _at(Phases(forward_s, backward_s, self.reduce_s(places)), rows)
        into = self.transfer(before, places, rows)
        way = [*(_at(phases, rows) for phases in before.stacked), into, stage]
        if rest:
            rates = np.array(self.way(places, rest))
            onward = halved(self.crossing_bytes[:, -1], rates)
            last_f, last_b, _ = self.work(len(rest))
            last_reduce_s = self.reduce_s(rest)[:, -1]
            way += [onward, Phases(last_f[:, -1], last_b[:, -1], last_reduce_s)]
        step_s = latency_s(way, self.microbatches)
        every_s = np.where(possible[rows], step_s, np.inf)
        best_rows = every_s.argmin(0)
        ends = np.arange(len(self.cuts))
        plans = self.known.setdefault(after, _Plans.none(len(self.cuts)))
        better = np.flatnonzero(every_s[best_rows, ends] < plans.latency_s)
        for end in better:
            # The plan for (j, g) is replaced if this one has a smaller L.
            row = int(best_rows[end])
            j = int(rows[row])
            plans.latency_s[end] = every_s[row, end]
            plans.before[end] = before, j
            plans.places[end] = places
            added = (into, stage) if j else (stage,)
            phases = (_at(phases, (row, end)) for phases in added)
            plans.phases[end] = (*before.phases[j], *phases)
        if len(better):
            fastest = plans.latency_s[better].argmin()
            self.judge(after, int(better[fastest]))

    def judge(self, free: Free, j: int) -> None:
        """Evaluates the plan of T_PL(j, g) with its real number of micro-batches in flight.

        The plan becomes the best one if it keeps the limits and its L is less than the best one's.

        Args:
            free: the number of devices of each machine that the plan leaves free.
            j: the index of the cut at which the plan ends.
        """
        last = len(self.cuts) - 1
        stages = self.known[free].stages(j)
        if j < last:
            stages.append((last, self.places(free, free)))
        bounds = 0, *(int(self.cuts[end]) for end, _ in stages)
        devices = tuple(places for _, places in stages)
        shape = Shape(devices, self.size)
        asked = self.shapes.pins.allow(bounds, shape.replicas, self.size)
        if self.known[free].latency_s[j] < self.best_s and asked:
            problem = self.shapes.problem(shape)
            evaluation = evaluate_decision(problem, kept_or_again(problem, bounds))
            least_s = plan_latency_s(evaluation.stages, self.microbatches)
            if least_s < self.best_s and keeps_limits(problem, evaluation):
                self.best = (shape, bounds)
                self.best_s = least_s

    def places(self, free: Free, taken: Free) -> Places:
        """Returns the numbers of the devices that are taken; a machine's are taken in order.

        Args:
            free: the number of free devices of each machine.
            taken: how many of them are taken.
        """
        numbers: list[int] = []
        for start, whole, left, count in zip(self.starts, self.whole, free, taken, strict=True):
            first = start + whole - left
            numbers += range(first, first + count)
        return tuple(numbers)

    def _work(self, replicas: int) -> tuple[Grid, Grid, np.ndarray]:
        """Returns F and B of each segment on some replicas, and whether the segment is possible.

        It is assumed that the last stage has one micro-batch in flight, and any other stage two. If
        a segment does not fit with everything kept, all its forwards are counted as run again.
        `judge` finds out whether a plan fits with the real numbers in flight.
        """
        b = self.segments.share(self.size, replicas)
        fitting_s = self.segments.fitting_s(self.size, replicas, 2).copy()
        fitting_s[:, -1] = self.segments.fitting_s(self.size, replicas, 1)[:, -1]
        fits = np.isfinite(fitting_s) & self.inside
        both_s = np.where(fits, fitting_s, self.segments.again_s(b))
        forward_s = between(sums(self.segments.layer_s(b)[0]), self.cuts, self.cuts)
        both_s, forward_s = (np.where(self.inside, x, 0.0) for x in (both_s, forward_s))
        return forward_s, both_s - forward_s, fits

    def reduce_s(self, places: Places) -> Grid:
        """Returns AR of each segment on some devices."""
        if len(places) == 1:
            return np.zeros(self.inside.shape)
        link = self.shapes.cluster.reducing(places)
        share = self.segments.share(self.size, len(places))
        return self.segments.reduce_s(share, link)

    def way(self, senders: Places, readers: Places) -> tuple[float, float]:
        """Returns the latency of a transfer between stages, and its seconds per byte.

        Args:
            senders: the devices of the stage that sends.
            readers: the devices of the next stage.
        """
        link = self.shapes.cluster.way(senders, readers)
        return link.latency_s, 1 / link.bytes_per_s

    def transfer(
        self,
        before: _Plans,
        places: Places,
        rows: Int[np.ndarray, "r"],
    ) -> Phases:
        """Returns, as phases of a stage, the transfers between plans' last stages and a new stage.

        Args:
            before: the plans.
            places: the devices of the new stage.
            rows: for each plan, the index of the cut at its end.
        """
        senders = (before.places[j] for j in rows)
        ways = [self.way(sender, places) if sender else (0.0, 0.0) for sender in senders]
        rates = np.array(ways).T[:, :, None]
        return halved(self.crossing_bytes[rows], rates)


def halved(sizes: Float[np.ndarray, "..."], rate: Float[np.ndarray, "2 ..."]) -> Phases:
    """Returns a transfer as phases of a stage: half of the bytes go forth and half come back.

    Args:
        sizes: the bytes of both directions together.
        rate: the latency in seconds, and the seconds per byte.
    """
    latency_s, byte_s = rate
    filled_s = latency_s + sizes / 2 * byte_s
    one_way_s = np.where(sizes > 0, filled_s, 0.0)
    return Phases(one_way_s, one_way_s, np.zeros_like(one_way_s))


def plan_latency_s(stages: Sequence[StageCost], microbatches: int) -> float:
    """Returns L of a plan, from the evaluated costs of its stages.

    Args:
        stages: the evaluated stages, in order.
        microbatches: M.
    """
    phases = []
    for s, stage in enumerate(stages):
        phases += [Phases(stage.comm_s / 2, stage.comm_s / 2)] if s else []
        backward_s = stage.backward_s + stage.recompute_s
        phases.append(Phases(stage.forward_s, backward_s, stage.reduce_s))
    return float(latency_s(phases, microbatches))


def _at(phases: Phases, which: Any) -> Phases:
    """Returns the phases of some of the plans that the arrays of `phases` hold."""
    return Phases(*(np.asarray(x)[which] for x in phases))
