"""DAPPLE's planner with replicated stages; `dapple.py` defines the symbols of the latency.

Paper: Fan et al., PPoPP 2021, sections IV-B (device placement) and IV-C (the dynamic program).

Legend, in the paper's symbols where it has them:
    g           the devices that the stages planned so far occupy; in the code, `free` has the
                number of unoccupied devices of each machine instead
    T_PL(j, g)  the least L found with the first j layers on the devices g, and the other layers as
                one stage on all free devices
    F_s, B_s    forward and backward seconds of stage s for the share of a micro-batch that one of
                its devices works on
    AR_s        seconds of the all-reduce of stage s's gradients over its devices

Each plan for (j, g) is extended by one more stage, which ends at layer j' and takes m' more
devices, g'. Each of three policies (`dapple_policies.py`) proposes m' devices. If the extended
plan's L is less than T_PL(j', g + g'), the plan replaces the one for (j', g + g') (equation 5).
Only one plan is kept for each (j, g), so the least L of all plans is not always found.

L is at least M (F_s + B_s) for every stage, because a stage works on each of the M micro-batches.
So an extension is skipped if this bound is not below the best plan's L.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from jaxtyping import Float, Int

from jvpipe.papers.dapple import Phases, latency_s
from jvpipe.papers.dapple_plans import Places, Plans, at
from jvpipe.papers.dapple_policies import Free, append_first, fresh_first, scatter_first
from jvpipe.papers.paper_effort import PAPER
from jvpipe.planners.joint.rough_plan import kept_or_again
from jvpipe.planners.model.grids import between, sums
from jvpipe.planners.model.local_segments import LocalSegments
from jvpipe.planners.model.shapes import Path, Shape
from jvpipe.planners.model.spans import Grid
from jvpipe.planners.model.stage_cost import StageCost, evaluate_decision, keeps_limits

POLICIES = fresh_first, append_first, scatter_first
"""Each policy proposes the devices of a new stage."""


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


class _Search:
    """The dynamic program: T_PL(j, g) for all j and all g that occur, the smallest g first.

    Attributes:
        known: the plans for each g; the key is the number of devices of each machine that g leaves
            free.
        best: the best plan so far that keeps the limits, as its shape and bounds.
        best_s: L of that plan, counted with its real number of micro-batches in flight.
        left_s: for each cut, a lower bound on the sum of all devices' seconds for the layers
            after the cut.
    """

    def __init__(self, segments: LocalSegments, size: int) -> None:
        shapes = segments.shapes
        cluster = shapes.cluster
        self.segments = segments
        self.shapes = shapes
        self.size = size
        self.cuts = segments.coarse
        self.microbatches = shapes.batch // size
        per_machine = cluster.devices_per_machine
        self.starts = range(0, shapes.devices, per_machine)
        left = (shapes.devices - start for start in self.starts)
        self.whole = tuple(min(per_machine, devices) for devices in left)
        # On many devices, only multiples of a unit are tried as numbers of devices of a stage, so
        # that there are at most `PAPER.replica_counts` of them.
        self.unit = -(-shapes.devices // PAPER.replica_counts)
        self.inside = self.cuts > self.cuts[:, None]
        self.crossing_bytes = segments.crossing_bytes(size)
        self.known: dict[Free, Plans] = {}
        self.best: Path | None = None
        self.best_s = np.inf
        self.left_s = self._left_s()
        self.work = cache(self._work)

    def _left_s(self) -> Float[np.ndarray, "n"]:
        """Returns for each cut a lower bound on all devices' seconds for the layers after it."""
        # If r devices share a layer, together they take r times the seconds of one share.
        # The least of these products bounds the layer's seconds from below, for any r that is
        # tried.
        multiples = range(self.unit, self.shapes.devices + 1, self.unit)
        rests = range(self.shapes.devices, 0, -self.unit)  # of the last stage
        works = []
        for r in {1, *multiples, *rests}:
            share = self.segments.share(self.size, r)
            works.append(r * self.segments.compute_s(share))
        least = np.min(works, axis=0)
        total = sums(least)[self.cuts]
        return total[-1] - total

    def plan(self) -> Path | None:
        """Returns the plan with the least L among the kept plans that fit; None if none fits."""
        begin = self.known[self.whole] = Plans.none(len(self.cuts))
        begin.latency_s[0] = 0.0
        self.extend(self.whole, self.whole)  # one stage on all devices is the first plan to beat
        for left in range(sum(self.whole), 0, -1):
            counts = range(self.unit, left + 1, self.unit)
            fed = [m for m in counts if self.shapes.pins.feeds(m, self.size)]
            for free in [free for free in self.known if sum(free) == left]:
                for m in fed:
                    self._extend_by(free, m)
        # T_PL assumes as few micro-batches in flight as a step can have. `judge` counts the real
        # number, and more layers may then have to be recomputed. So the L that `judge` finds is
        # rarely less than T_PL. (It is less if a stage that recomputes becomes the pivot, or if
        # replicas do not hold some bytes that were assumed.) Plans are judged in order of rising
        # T_PL, until T_PL reaches the best plan's L.
        every: list[tuple[float, Free, int]] = []
        for free, plans in self.known.items():
            of_j = enumerate(plans.latency_s.tolist())
            every += [(least_s, free, j) for j, least_s in of_j if j]
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
        pairs = zip(free, taken, strict=True)
        after = tuple(count - less for count, less in pairs)
        rest = self.places(after, after)
        possible = self._possible(before, len(places), len(rest))
        rows = np.flatnonzero(possible.any(1))
        if not len(rows):
            return
        forward_s, backward_s, _ = self.work(len(places))
        stage = Phases(forward_s, backward_s, self.reduce_s(places))
        added = self.transfer(before, places, rows), at(stage, rows)
        earlier = (at(phases, rows) for phases in before.stacked)
        way = [*earlier, *added]
        if rest:
            way += self._last(places, rest)
        step_s = latency_s(way, self.microbatches)
        every_s = np.where(possible[rows], step_s, np.inf)
        plans = self.known.setdefault(after, Plans.none(len(self.cuts)))
        best_rows = every_s.argmin(0)
        ends = np.arange(len(self.cuts))
        better = np.flatnonzero(every_s[best_rows, ends] < plans.latency_s)
        for end in better:
            # The extended plan has a smaller L, so it replaces the plan with these devices and this
            # end.
            row = int(best_rows[end])
            j = int(rows[row])
            plans.latency_s[end] = every_s[row, end]
            plans.before[end] = before, j
            plans.places[end] = places
            # The first stage has no transfer in front of it.
            new = added if j else added[1:]
            phases = (at(phases, (row, end)) for phases in new)
            plans.phases[end] = (*before.phases[j], *phases)
        if len(better):
            fastest = plans.latency_s[better].argmin()
            self.judge(after, int(better[fastest]))

    def _possible(
        self,
        before: Plans,
        replicas: int,
        left: int,
    ) -> np.ndarray:
        """Returns a boolean grid: which stages may follow the plans and lead to a new best plan.

        The row of an entry is the cut at which the stage begins, which is the j of the plan before
        it. The column is the cut at which the stage ends.

        Args:
            before: the plans.
            replicas: the number of devices of the stage.
            left: the number of devices that are still free after it.
        """
        forward_s, backward_s, fits = self.work(replicas)
        rest_s = self.left_s / max(1, left)
        slowest_s = np.maximum(forward_s + backward_s, rest_s)
        # L is at least the number of micro-batches times the seconds of the slowest stage.
        may_win = self.microbatches * slowest_s < self.best_s
        is_reached = np.isfinite(before.latency_s)[:, None]
        possible = fits & is_reached & may_win
        if not left:
            possible[:, :-1] = False  # the stage must end with the last layer
        return possible

    def _last(self, places: Places, rest: Places) -> list[Phases]:
        """Returns the phases of one stage on all free devices, and of the transfer to it.

        Args:
            places: the devices of the stage before it.
            rest: the free devices.
        """
        rates = np.array(self.way(places, rest))
        onward = halved(self.crossing_bytes[:, -1], rates)
        forward_s, backward_s, _ = self.work(len(rest))
        stage = Phases(forward_s, backward_s, self.reduce_s(rest))
        to_the_end = np.s_[:, -1]
        return [onward, at(stage, to_the_end)]

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
        ends = [int(self.cuts[end]) for end, _ in stages]
        bounds = (0, *ends)
        devices = tuple(places for _, places in stages)
        shape = Shape(devices, self.size)
        pins = self.shapes.pins
        if not pins.allow(bounds, shape.replicas, self.size):
            return
        if self.known[free].latency_s[j] >= self.best_s:
            return
        problem = self.shapes.problem(shape)
        decision = kept_or_again(problem, bounds)
        evaluation = evaluate_decision(problem, decision)
        real_s = plan_latency_s(evaluation.stages, self.microbatches)
        if real_s < self.best_s and keeps_limits(problem, evaluation):
            self.best = (shape, bounds)
            self.best_s = real_s

    def places(self, free: Free, taken: Free) -> Places:
        """Returns the numbers of the devices that are taken, in ascending order on each machine.

        Args:
            free: the number of free devices of each machine.
            taken: how many of them are taken.
        """
        numbers: list[int] = []
        machines = zip(self.starts, self.whole, free, taken, strict=True)
        for start, whole, left, count in machines:
            first = start + whole - left
            numbers += range(first, first + count)
        return tuple(numbers)

    def _work(self, replicas: int) -> tuple[Grid, Grid, np.ndarray]:
        """Returns F and B of each segment on some replicas, and whether the segment is possible.

        This assumes one micro-batch in flight on the last stage, and two on any other stage, or one
        if a step has only one. If a segment does not fit with everything kept, all its forwards
        count twice, because they are recomputed. `judge` checks whether a plan fits with the real
        numbers in flight.
        """
        segments = self.segments
        share = segments.share(self.size, replicas)
        fitting_s = segments.fitting_s(self.size, replicas, 2).copy()
        of_last = segments.fitting_s(self.size, replicas, 1)
        fitting_s[:, -1] = of_last[:, -1]
        fits = np.isfinite(fitting_s) & self.inside
        both_s = np.where(fits, fitting_s, segments.again_s(share))
        layer_forward_s = segments.layer_s(share)[0]
        forward_s = between(sums(layer_forward_s), self.cuts, self.cuts)
        both_s = np.where(self.inside, both_s, 0.0)
        forward_s = np.where(self.inside, forward_s, 0.0)
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
        before: Plans,
        places: Places,
        rows: Int[np.ndarray, "r"],
    ) -> Phases:
        """Returns, as phases of a stage, the transfers between plans' last stages and a new stage.

        Args:
            before: the plans.
            places: the devices of the new stage.
            rows: for each plan, the index of the cut at its end.
        """
        ways = []
        for j in rows:
            senders = before.places[j]
            # Nothing is sent to the first stage.
            way = self.way(senders, places) if senders else (0.0, 0.0)
            ways.append(way)
        rates = np.array(ways).T[:, :, None]
        return halved(self.crossing_bytes[rows], rates)


def halved(
    sizes: Float[np.ndarray, "..."],
    rate: Float[np.ndarray, "2 ..."],
) -> Phases:
    """Returns a transfer as phases of a stage: half of the bytes go forward and half go backward.

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
        if s:
            one_way_s = stage.comm_s / 2
            phases.append(Phases(one_way_s, one_way_s))
        backward_s = stage.backward_s + stage.recompute_s
        phases.append(Phases(stage.forward_s, backward_s, stage.reduce_s))
    return float(latency_s(phases, microbatches))
