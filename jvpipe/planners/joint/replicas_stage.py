"""What replicated stages take: seconds and bytes of all segments of layers at a local batch, and of a plan's stages.

Legend: stage s of S on r replicas, M micro-batches.

    t   forward and backward of a micro-batch, at the local batch ceil(mu / r)
    c   what the stage receives, and the cotangents that it returns: `Cluster.transfer_s`
    A   the all-reduce of its gradients: `Cluster.reduce_s`; of one that overlaps, what the last backward does not hide
    T   max over s of [ sum t + sum c + (M - 1) max(t, c) - slack_s + A_s ], where slack_s = sum over p < s of B_p, and
        half of the transfers up to s: so much earlier than stage 0 does the stage end its last backward
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from jvpipe.cost.hardware import Cluster, Link
from jvpipe.planners.joint.replicas_problem import ReplicaPlan, ReplicaProblem, check
from jvpipe.planners.model.keep_all import KeepAll
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.segments import Cuts, Grid, between, sums
from jvpipe.schedules.one_f_one_b import one_f_one_b
from jvpipe.schedules.schedule import Schedule

_SCHEDULE = Schedule(name="1f1b", lists=one_f_one_b)


@dataclass(frozen=True, slots=True)
class ReplicaStage:
    """One stage's seconds per micro-batch, of its all-reduce per step, and the bytes on each of its devices."""

    forward_s: float
    backward_s: float
    comm_s: float
    reduce_s: float
    peak_bytes: int

    @property
    def seconds(self) -> float:
        """How far apart micro-batches are."""
        return max(self.forward_s + self.backward_s, self.comm_s)


class Local:
    """All segments at one local batch."""

    def __init__(self, problem: ReplicaProblem, cuts: Cuts, b: int, microbatches: int, most_stages: int) -> None:
        self._costs = problem.local.at(b)
        self._stages, self._microbatches = most_stages, microbatches
        self.cuts = cuts
        layers = self._costs.layers
        self.forward_s = sums(layer.forward_s for layer in layers)
        self.backward_s = sums(layer.backward_s + layer.options[0].extra_s for layer in layers)
        self.gradient_bytes = sums(layer.gradient_bytes or layer.parameter_bytes for layer in layers)
        self._peaks: dict[int, Grid] = {}

    @cached_property
    def _kept(self) -> KeepAll:
        """The problem of straight pipelines, whose links take a second per byte."""
        return KeepAll(Problem(self._costs, self._stages, _SCHEDULE, self._microbatches, peer=Link(1.0)))

    @cached_property
    def seconds(self) -> Grid:
        """Forward and backward of each segment, infinite where it holds no layer."""
        every = between(self.forward_s + self.backward_s, self.cuts, self.cuts)
        return np.where(self.cuts > self.cuts[:, None], every, np.inf)

    @cached_property
    def crossing_bytes(self) -> Grid:
        """What each segment receives and returns; of a micro-batch if the local batch is one."""
        return self._kept.comm_s

    def peak_bytes(self, behind: int) -> Grid:
        """The bytes of each segment on a device, with so many stages from it on."""
        if behind not in self._peaks:
            self._peaks[behind] = self._kept.peak_bytes(self._stages - behind)
        return self._peaks[behind]


class Tables:
    """The segments of a problem at every local batch that is asked for."""

    def __init__(self, problem: ReplicaProblem) -> None:
        self.problem = problem
        self._known: dict[tuple[int, int], Local] = {}
        self._exposed: dict[tuple[Local, float, float], Grid] = {}
        together = problem.costs.costs[0].together
        forbidden = {b for group in together for b in range(min(group) + 1, max(group) + 1)}
        self.cuts = np.array([b for b in range(problem.layers + 1) if b not in forbidden])
        self.most_stages = min(problem.devices, len(self.cuts) - 1)

    def local(self, size: int, replicas: int) -> Local:
        """The segments of a replica's slice."""
        key = math.ceil(size / replicas), min(self.problem.batch // size, self.most_stages)  # no more are in flight
        if key not in self._known:
            self._known[key] = Local(self.problem, self.cuts, *key, self.most_stages)
        return self._known[key]

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
        total = np.where(between(parameters, cuts, cuts) > 0, latency_s, 0.0) + byte_s * between(parameters, cuts, cuts)
        if not self.problem.overlaps:
            return total
        # The last to be reduced is the first layer; it begins when its backward and the reduces of all after it end.
        lead = byte_s * parameters[1:] - local.backward_s[:-1]
        behind = byte_s * parameters - local.backward_s
        most = np.full((len(cuts), len(cuts)), -np.inf)
        for row, i in enumerate(cuts[:-1]):
            most[row, row + 1 :] = np.maximum.accumulate(lead[i:])[cuts[row + 1 :] - i - 1] - behind[i]
        return np.where(total > 0, np.clip(most + latency_s, latency_s, None), 0.0)

    def stages(self, plan: ReplicaPlan) -> tuple[ReplicaStage, ...]:
        """What each stage of a plan takes."""
        check(self.problem, plan)
        whole, stages = self.local(plan.size, 1), []
        ends = np.searchsorted(self.cuts, plan.bounds)
        for s, (a, b) in enumerate(pairwise(ends)):
            local, devices = self.local(plan.size, len(plan.places[s])), plan.places[s]
            i, j = self.cuts[a], self.cuts[b]
            crossing = float(whole.crossing_bytes[a, b]) / 2
            comm_s = 2 * self.problem.cluster.transfer_s(plan.places[s - 1], devices, crossing) if s else 0.0
            rate = reduce_rate(self.problem.cluster, devices)
            exposed_s = self.exposed_s(local, *rate)[a, b] if len(devices) > 1 else 0.0
            stages.append(
                ReplicaStage(
                    forward_s=float(local.forward_s[j] - local.forward_s[i]),
                    backward_s=float(local.backward_s[j] - local.backward_s[i]),
                    comm_s=comm_s,
                    reduce_s=float(exposed_s),
                    peak_bytes=int(local.peak_bytes(plan.stages - s)[a, b]),
                )
            )
        return tuple(stages)

    def fits(self, stages: tuple[ReplicaStage, ...]) -> bool:
        """Whether all devices keep the limit."""
        limit = self.problem.memory_limit_bytes
        return limit is None or max(stage.peak_bytes for stage in stages) <= limit


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
    step_s = fill + (microbatches - 1) * max(x.seconds for x in stages)
    late_s = slack_s = 0.0
    for stage in stages:
        slack_s += stage.comm_s / 2
        late_s = max(late_s, stage.reduce_s - slack_s)
        slack_s += stage.backward_s
    return step_s + late_s


def reduce_rate(cluster: Cluster, devices: tuple[int, ...]) -> tuple[float, float]:
    """The seconds of an all-reduce over devices: of its latencies, and of each byte."""
    if len(devices) < 2:
        return 0.0, 0.0
    latency_s = cluster.reduce_s(devices, 1e-12)
    return latency_s, (cluster.reduce_s(devices, 1e9) - latency_s) / 1e9
