"""What replicated stages take: the tables of all segments of layers, and the stages of a plan.

Legend: stage s of S on r replicas, M micro-batches.

    t   forward and backward of a micro-batch, at the local batch ceil(mu / r)
    c   what the stage receives, and the cotangents that it returns: `Cluster.transfer_s`
    A   the all-reduce of its gradients: `Cluster.reduce_s`; of one that overlaps, what the last backward does not hide
    p   how far apart micro-batches are in the long run: max(t, c), or what stages a to b take with transfers between
        them, over b - a + 1: as many more are in flight on a than on b, and one (`schedules/one_f_one_b.py`)
    T   max over s of [ sum t + sum c + (M - 1) p - slack_s + A_s ], where slack_s = sum over p < s of B_p, and half of
        the transfers up to s: so much earlier than stage 0 does the stage end its last backward
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jvpipe.planners.model.replicas_local import Known, Local
from jvpipe.planners.model.replicas_plan import ReplicaPlan
from jvpipe.planners.model.replicas_problem import ReplicaProblem, check
from jvpipe.planners.model.segments import Cuts, Grid, between
from jvpipe.planners.model.shared_state import spared_bytes, surely_spared_bytes

MOST_CUTS, MOST_FINE = 32, 256
"""Of more cuts so many are in grids, of each share of the work that where least crosses; up to how many there are grids
of all as well, for plans that are looked at more closely.
"""
Places = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplicaStage:
    """One stage's seconds per micro-batch, of its all-reduce per step, and the bytes on each of its devices.

    `recompute_s` of a backward's seconds go into forwards that run again.
    """

    forward_s: float
    backward_s: float
    comm_s: float
    reduce_s: float
    peak_bytes: int
    recompute_s: float = 0.0

    @property
    def seconds(self) -> float:
        """How far apart micro-batches are."""
        return max(self.forward_s + self.backward_s, self.comm_s)


class _Part(NamedTuple):
    """A stage without its links: what it takes, what it receives and returns, and where its grids are."""

    stage: ReplicaStage
    crossing_bytes: float
    local: Local
    at: tuple[int, int]


class Tables:
    """The segments of a problem at every local batch that is asked for.

    `cuts` are all places where stages may begin; grids are of `coarse` ones, if there are many.
    """

    def __init__(self, problem: ReplicaProblem, roughly: "Tables | None" = None) -> None:
        self.problem, self._roughly = problem, roughly
        self._known: dict[bool, list[Known]] = {}
        self._locals: dict[tuple[int, bool], Local] = {}
        self._parts: dict[tuple[int, int, int, int, int], _Part] = {}
        self._fitting: dict[tuple[int, int, int], Grid] = {}
        self._ways: dict[tuple[Places, Places], tuple[float, float]] = {}
        self._rates: dict[Places, tuple[float, float]] = {}
        self._spared: dict[int, Grid] = {}
        self._exposed: dict[tuple[Local, float, float], Grid] = {}
        self._single: dict[tuple[Local, int, int], Local] = {}
        together = problem.costs.costs[0].together
        forbidden = {b for group in together for b in range(min(group) + 1, max(group) + 1)}
        self.cuts = np.array([b for b in range(problem.layers + 1) if b not in forbidden])
        if crossed := sorted(forbidden & set(problem.pins.bounds or ())):
            raise ValueError(
                f"cuts {problem.pins.cuts}: layers {crossed[0] - 1} and {crossed[0]} must share a stage"
            )
        self.most_stages = min(problem.devices, len(self.cuts) - 1)
        if (problem.pins.count or 1) > self.most_stages:
            raise ValueError(
                f"{problem.pins.count} stages: layers that must share a stage leave {len(self.cuts) - 1} pieces, use "
                f"at most {self.most_stages} stages"
            )
        self.coarse = self.cuts if roughly else np.array(problem.pins.bounds or self._few())
        self._places = {int(cut): place for place, cut in enumerate(self.coarse)}

    def _few(self) -> Cuts:
        b = self.problem.sizes[len(self.problem.sizes) // 2]
        known = [Known.of(costs, self.cuts) for costs in self.problem.costs.costs]
        return self.cuts[few_cuts(Local(self.problem.costs, known, b, self.most_stages), MOST_CUTS)]

    @cached_property
    def fine(self) -> "Tables":
        """The same with grids of all cuts."""
        return self if len(self.coarse) == len(self.cuts) else Tables(self.problem, self)

    def local(self, size: int, replicas: int, *, again: bool = False) -> Local:
        """The segments of a replica's slice.

        Args:
            size: examples of a micro-batch.
            replicas: that share it.
            again: layers run again before their backwards.
        """
        b, again = key = -(-size // replicas), again or self.problem.recomputes
        if key not in self._locals:
            costs = self.problem.again if again else self.problem.costs
            self._locals[key] = Local(costs, self._known_at(again), b, self.most_stages)
        return self._locals[key]

    def _known_at(self, again: bool) -> list[Known]:
        """The segments at the sizes whose costs are known."""
        if again not in self._known:
            costs = self.problem.again if again else self.problem.costs
            self._known[again] = (
                [known.at(self.coarse) for known in self._roughly._known_at(again)]
                if self._roughly
                else [Known.of(each, self.coarse) for each in costs.costs]
            )
        return self._known[again]

    def fitting_s(self, size: int, replicas: int, behind: int) -> Grid:
        """Seconds of each segment: kept if that keeps the limit, else run again, else infinite.

        Args:
            size: examples of a micro-batch.
            replicas: of the stage.
            behind: stages from it on.
        """
        key = size, replicas, behind
        if key not in self._fitting:
            self._fitting[key] = self._fitting_s(*key)
        return self._fitting[key]

    def _fitting_s(self, size: int, replicas: int, behind: int) -> Grid:
        limit, kept = self.problem.memory_limit_bytes, self.local(size, replicas)
        if limit is None:
            return kept.seconds
        given = behind, self.problem.batch // size, replicas
        fits = kept.peak_bytes(*given) - self._spared_bytes(replicas) <= limit
        if fits[0, -1]:
            return kept.seconds  # even the whole model fits
        again = self.local(size, replicas, again=True)
        other = np.where(
            again.peak_bytes(*given) - self._spared_bytes(replicas) <= limit, again.seconds, np.inf
        )
        return np.where(fits, kept.seconds, other)

    def _spared_bytes(self, replicas: int) -> Grid:
        """What each replica of every segment is spared of the optimizer's state."""
        if replicas not in self._spared:
            layers = self.problem.costs.costs[0].layers
            self._spared[replicas] = surely_spared_bytes(layers, self.coarse, replicas)
        return self._spared[replicas]

    def exposed_s(self, local: Local, latency_s: float, byte_s: float) -> Grid:
        """What the last backward of each segment does not hide of its all-reduce.

        Args:
            local: the segments.
            latency_s: of an all-reduce.
            byte_s: its seconds per byte.
        """
        key = local, latency_s, byte_s
        if key not in self._exposed:
            self._exposed[key] = self._shown_s(*key)
        return self._exposed[key]

    def _shown_s(self, local: Local, latency_s: float, byte_s: float) -> Grid:
        cuts, parameters = local.cuts, local.gradient_bytes
        total = np.where(between(parameters, cuts, cuts) > 0, latency_s, 0.0) + byte_s * between(
            parameters, cuts, cuts
        )
        if not self.problem.overlaps:
            return total
        # The last to be reduced is the first layer; it begins when its backward and the reduces of all after it end.
        lead = byte_s * parameters[1:] - local.backward_s[:-1]
        behind = byte_s * parameters - local.backward_s
        most = np.full((len(cuts), len(cuts)), -np.inf)
        for row, i in enumerate(cuts[:-1]):
            most[row, row + 1 :] = (
                np.maximum.accumulate(lead[i : cuts[-1]])[cuts[row + 1 :] - i - 1] - behind[i]
            )
        return np.where(total > 0, np.clip(most + latency_s, latency_s, None), 0.0)

    def stages(self, plan: ReplicaPlan) -> tuple[ReplicaStage, ...]:
        """What each stage of a plan takes."""
        check(self.problem, plan)
        return tuple(self._stage(plan, s, *ends) for s, ends in enumerate(pairwise(plan.bounds)))

    def _stage(self, plan: ReplicaPlan, s: int, i: int, j: int) -> ReplicaStage:
        devices = plan.places[s]
        key = plan.size, len(devices), plan.stages - s, i, j
        if key not in self._parts:
            self._parts[key] = self._part(*key)
        part, comm_s = self._parts[key], 0.0
        if s and part.crossing_bytes:
            latency_s, byte_s = self.way(plan.places[s - 1], devices)
            comm_s = 2 * latency_s + part.crossing_bytes * byte_s
        if not comm_s and len(devices) == 1:
            return part.stage
        shown = (
            self.exposed_s(part.local, *self.reduce_rate(devices))[part.at]
            if len(devices) > 1
            else 0.0
        )
        return replace(part.stage, comm_s=comm_s, reduce_s=float(shown))

    def way(self, senders: Places, readers: Places) -> tuple[float, float]:
        """The seconds of a transfer from stage to stage: of its latency, and of each byte."""
        key = senders, readers
        if key not in self._ways:
            self._ways[key] = line(
                lambda size: self.problem.cluster.transfer_s(senders, readers, size)
            )
        return self._ways[key]

    def reduce_rate(self, devices: Places) -> tuple[float, float]:
        """The seconds of an all-reduce over devices: of its latencies, and of each byte."""
        if devices not in self._rates:
            self._rates[devices] = line(lambda size: self.problem.cluster.reduce_s(devices, size))
        return self._rates[devices]

    def _part(self, size: int, replicas: int, behind: int, i: int, j: int) -> "_Part":
        """What a stage takes wherever its devices and those before it are.

        Args:
            size: examples of a micro-batch.
            replicas: of the stage.
            behind: stages from it on.
            i: its first layer.
            j: the layer after its last.
        """
        if len(self.cuts) <= MOST_FINE and not {i, j} <= self._places.keys():
            return self.fine._part(size, replicas, behind, i, j)
        limit, given = (
            self.problem.memory_limit_bytes,
            (behind, self.problem.batch // size, replicas),
        )
        spared = spared_bytes(self.problem.costs.costs[0].layers[i:j], replicas)
        local, *at = self._segment(self.local(size, replicas), i, j)
        peak_bytes = local.peak_bytes(*given)[*at] - spared
        if limit is not None and peak_bytes > limit:
            local, *at = self._segment(self.local(size, replicas, again=True), i, j)
            peak_bytes = local.peak_bytes(*given)[*at] - spared
        whole, *ends = self._segment(self.local(size, 1), i, j)
        forward_s, backward_s, recompute_s = (
            float(x[j] - x[i]) for x in (local.forward_s, local.backward_s, local.recompute_s)
        )
        stage = ReplicaStage(forward_s, backward_s, 0.0, 0.0, int(peak_bytes), recompute_s)
        return _Part(stage, float(whole.crossing_bytes[*ends]), local, (at[0], at[1]))

    def _segment(self, local: Local, i: int, j: int) -> tuple[Local, int, int]:
        """Where the grids of a segment [i, j) are, and its place there: those of the coarse cuts, or its own."""
        a, b = self._places.get(i), self._places.get(j)
        if a is not None and b is not None:
            return local, a, b
        key = local, i, j
        if key not in self._single:
            self._single[key] = local.at(np.array([i, j]))
        return self._single[key], 0, 1

    def fits(self, stages: tuple[ReplicaStage, ...]) -> bool:
        """Whether all devices keep the limit."""
        limit = self.problem.memory_limit_bytes
        return limit is None or max(stage.peak_bytes for stage in stages) <= limit


def few_cuts(local: Local, most: int) -> Int[np.ndarray, "n"]:
    """The positions of at most so many cuts: of each share of seconds and gradients that where least crosses."""
    cuts, last = local.cuts, len(local.cuts) - 1
    if last < most:
        return np.arange(last + 1)
    seconds, gradients = (local.forward_s + local.backward_s)[cuts], local.gradient_bytes[cuts]
    work = seconds / max(seconds[-1], 1e-30) + gradients / max(gradients[-1], 1.0)
    share = np.minimum((work / max(work[-1], 1e-30) * (most - 2)).astype(int), most - 3)
    crossing, best = local.crossing_at[cuts], dict[int, int]()
    for at in range(1, last):
        if share[at] not in best or crossing[at] < crossing[best[share[at]]]:
            best[int(share[at])] = at
    chosen = {0, last, *best.values()}
    others = sorted(set(range(last)) - chosen, key=lambda at: crossing[at])
    return np.array(sorted({*chosen, *others[: most - len(chosen)]}))


def least_s(stages: tuple[ReplicaStage, ...], microbatches: int) -> float:
    """Seconds that no simulation of these stages is below: all micro-batches on one, and the first one's way there.

    >>> stage = ReplicaStage(1.0, 2.0, 0.0, 5.0, 0)
    >>> least_s((stage, stage), 4)
    15.0
    """
    through = list(accumulate((x.forward_s + x.backward_s for x in stages), initial=0.0))
    every = zip(through, stages, strict=False)
    return max(before + microbatches * (x.forward_s + x.backward_s) for before, x in every)


def surrogate_s(stages: tuple[ReplicaStage, ...], microbatches: int) -> float:
    """The seconds of a step as the legend counts them.

    >>> from dataclasses import replace
    >>> alone = ReplicaStage(1.0, 2.0, 0.0, 5.0, 0)
    >>> surrogate_s((alone,), 4), surrogate_s((replace(alone, reduce_s=0.0), alone), 4)
    (17.0, 18.0)
    """
    fill = sum(x.forward_s + x.backward_s + x.comm_s for x in stages)
    step_s = fill + (microbatches - 1) * period_s(stages)
    late_s = slack_s = 0.0
    for stage in stages:
        slack_s += stage.comm_s / 2
        late_s = max(late_s, stage.reduce_s - slack_s)
        slack_s += stage.backward_s
    return step_s + late_s


def period_s(stages: tuple[ReplicaStage, ...]) -> float:
    """How far apart micro-batches are in the long run, as the legend has it.

    >>> first, second = ReplicaStage(1.0, 2.0, 0.0, 0.0, 0), ReplicaStage(1.0, 2.0, 2.0, 0.0, 0)
    >>> period_s((first,)), period_s((first, second))
    (3.0, 4.0)
    """
    through = [0.0, *accumulate(x.forward_s + x.backward_s + x.comm_s for x in stages)]
    longest_s = max(x.seconds for x in stages)
    for a, stage in enumerate(stages):
        before = through[a] + stage.comm_s
        for b in range(a + 2, len(through)):
            longest_s = max(longest_s, (through[b] - before) / (b - a))
    return longest_s


def line(seconds: Callable[[float], float]) -> tuple[float, float]:
    """The seconds of something by its bytes: of none, but for its latency, and of each more.

    Args:
        seconds: of so many bytes.

    >>> from jvpipe.cost.hardware import Link
    >>> latency_s, byte_s = line(Link(4.0, 0.5).seconds)
    >>> round(latency_s, 6), byte_s
    (0.5, 0.25)
    """
    latency_s = seconds(1e-12)
    return latency_s, (seconds(1e9) - latency_s) / 1e9
