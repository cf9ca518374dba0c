"""PipeDream's dynamic program with replicated stages and hierarchical bandwidth.

Paper: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
section 3.1.

Legend, in the paper's symbols (a stage has the layers [i, j) here):
    k               the level: its parts are the devices of a machine (1), or the machines of a
                    cluster (2)
    m_k, B_k        m_k is the number of parts of level k, B_k the bandwidth between them
    w               the bytes of the stage's parameters
    T^k(i, j, m)    seconds per micro-batch of one stage on m parts of level k, which share the work
                    and add up gradients:
                        max(A^(k-1)(i, j, m_(k-1)), 2 (m - 1) w / B_k) / m
    C^k(c, j)       seconds over B_k of the values that [c, j) reads from earlier layers, and of
                    their cotangents (the paper's 2 a_c / B_k)
    A^k(i, j, m)    seconds per micro-batch of the slowest stage in the best pipeline over m parts:
                    the least of T^k(i, j, m) and, over i < c < j and m' < m, of
                        max(A^k(i, c, m - m'), C^k(c, j), T^k(c, j, m'))
    behind          the number of devices of all later stages, divided by the stage's replicas

    level 2    [ machine 0, 1 ]  [ machine 2 ]    m_2 = 3: one part of the pipeline is replicated on
                                                  two machines, the next is on the third machine
    level 1      one stage on     stages on       each part is planned in the same way over the
                 4 devices        3 and 1         devices of a machine

A^0 is the seconds of a stage's forward and backward on one device. For each micro-batch in flight,
the device holds a version of its parameters, and activations. The number in flight is 1 + `behind`,
rounded up: S - s on stage s of S, if no stage is replicated. The program goes from the last stage
to the first. So `behind` is known when a stage is planned, and the memory constraint is exact.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from jaxtyping import Float, Int

from jvpipe.cost.hardware import Link
from jvpipe.papers.kept_stages import KeptStages
from jvpipe.papers.limits import no_cuts_fit
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.segments import Grid, between, link_seconds
from jvpipe.schedules.pipedream import PipeDream


@dataclass(frozen=True)
class Replicated:
    """A plan that keeps every residual: its bounds, and the number of devices of each stage."""

    bounds: tuple[int, ...]
    replicas: tuple[int, ...]


def replicated(problem: Problem) -> Replicated:
    """Finds the best pipeline over `problem.stages` devices in machines of `problem.cluster`.

    Without a cluster all devices count as one machine. Memory is counted for the paper's schedule,
    even if the problem has another one.

    Raises:
        Infeasible: no pipeline fits.
        ValueError: the devices do not fill the cluster's machines.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> convolution = LayerCost("convolution", 1.0, 2.0, (Option(8),))
    >>> dense = LayerCost("dense", 0.5, 0.5, (Option(8),), parameter_bytes=1000)
    >>> costs = Costs((convolution, convolution, convolution, dense))
    >>> replicated(Problem(costs, 4, find_schedule("pipedream"), 4, peer=Link(100.0)))
    Replicated(bounds=(0, 3, 4), replicas=(3, 1))
    """
    kept = KeptStages(replace(problem, schedule=PipeDream()))
    pipeline = _Fastest(kept).pipeline()
    if pipeline is None:
        least = _Smallest(kept).pipeline()
        assert least is not None, "without a limit there is a pipeline"
        peaks = [float(kept.peak_bytes(stage.s)[stage.a, stage.b]) for stage in least]
        raise no_cuts_fit("pipedream", problem.memory_limit_bytes, peaks)
    ends = [int(kept.cuts[stage.b]) for stage in pipeline]
    return Replicated((0, *ends), tuple(stage.replicas for stage in pipeline))


@dataclass(frozen=True)
class _Stage:
    """A stage from the a-th to the b-th cut.

    Each device has as many micro-batches in flight as stage s of a pipeline without replicas.
    """

    a: int
    b: int
    s: int
    replicas: int


@dataclass(frozen=True, eq=False)
class _Level:
    """A level k.

    Attributes:
        parts: m_k.
        devices: the number of devices of each part.
        comm_s: C^k.
        ring_s: 2 w / B_k.
    """

    parts: int
    devices: int
    comm_s: Grid
    ring_s: Grid


@dataclass(frozen=True, eq=False)
class _Pipelines:
    """The best pipelines of a level; item m - 1 of each list is for m parts.

    Attributes:
        cost: A^k(., ., m).
        begins: c, the cut at which the last stage begins, as an index.
        parts: m', the number of parts that the last stage is on.
    """

    cost: list[Grid]
    begins: list[Int[np.ndarray, "I J"]]
    parts: list[Int[np.ndarray, "I J"]]


class _Fastest:
    """The dynamic program, in seconds per micro-batch."""

    def __init__(self, kept: KeptStages) -> None:
        self.kept = kept
        self.levels = _levels(kept)
        self._known: dict[tuple[int, Fraction], _Pipelines] = {}

    def device(self, s: int) -> Grid:
        """Returns A^0 on a device with the memory needs of stage s of a straight pipeline."""
        return self.kept.where_it_fits(s, self.kept.compute_s(s))

    def share(
        self,
        level: _Level,
        m: int,
        cost: Grid,
    ) -> Grid:
        """Returns T^k.

        Args:
            level: the level k.
            m: the number of parts that the stage is on.
            cost: A^(k-1).
        """
        return np.maximum(cost, (m - 1) * level.ring_s) / m

    def follow(self, level: _Level, cost: Grid) -> Grid:
        """Returns the larger of T^k and C^k, for a stage that follows another one."""
        return np.maximum(cost, level.comm_s)

    def pipeline(self) -> list[_Stage] | None:
        """Returns the best stages; None if every pipeline is over the limit."""
        top = len(self.levels)
        last = len(self.kept.cuts) - 1
        least_s = self._cost(top, Fraction(0))[0, last]
        if not np.isfinite(least_s):
            return None
        return self._stages(top, Fraction(0), 0, last, 1)

    def _cost(self, k: int, behind: Fraction) -> Grid:
        """Returns A^k(., ., m_k)."""
        if k == 0:
            return self.device(self._alike(behind))
        return self._pipelines(k, behind).cost[-1]

    def _pipelines(self, k: int, behind: Fraction) -> _Pipelines:
        if self.kept.problem.memory_limit_bytes is None:
            behind = Fraction(0)  # without a limit nothing depends on the micro-batches in flight
        if (k, behind) not in self._known:
            self._known[k, behind] = self._search(k, behind)
        return self._known[k, behind]

    def _search(self, k: int, behind: Fraction) -> _Pipelines:
        level = self.levels[k - 1]
        n = len(self.kept.cuts)
        rows = 1 if k == len(self.levels) else n  # at the top, only pipelines from layer 0 count
        pipelines = _Pipelines([], [], [])
        for m in range(1, level.parts + 1):
            # Either one stage is on all m parts, or a pipeline is on the first m - last parts and
            # a stage on the others.
            cost = self._stage_cost(k, behind, m, m)[:rows]
            # `_stages` traces the stages back from these two: where the last stage begins, and how
            # many parts it is on.
            begins = np.repeat(np.arange(rows)[:, None], n, 1)
            parts = np.full((rows, n), m)
            for last in range(1, m):
                before = pipelines.cost[m - last - 1]
                closing = self.follow(level, self._stage_cost(k, behind, m, last))
                joined, middle = _join(
                    before,
                    closing,
                    np.maximum,
                )
                better = joined < cost
                cost = np.where(better, joined, cost)
                begins = np.where(better, middle, begins)
                parts = np.where(better, last, parts)
            pipelines.cost.append(cost)
            pipelines.begins.append(begins)
            pipelines.parts.append(parts)
        return pipelines

    def _stage_cost(
        self,
        k: int,
        behind: Fraction,
        m: int,
        last: int,
    ) -> Grid:
        """Returns T^k(., ., last) for a stage that is on the last `last` of m parts."""
        inside = self._cost(k - 1, self._behind(k, behind, m, last))
        return self.share(self.levels[k - 1], last, inside)

    def _behind(
        self,
        k: int,
        behind: Fraction,
        m: int,
        last: int,
    ) -> Fraction:
        """Returns `behind` for a stage that is on the last `last` of the first m parts."""
        level = self.levels[k - 1]
        return (behind + (level.parts - m) * level.devices) / last

    def _alike(self, behind: Fraction) -> int:
        """Returns s such that stage s of a straight pipeline has ceil(1 + behind) in flight."""
        return self.kept.problem.stages - math.ceil(1 + behind)

    def _stages(
        self,
        k: int,
        behind: Fraction,
        a: int,
        b: int,
        replicas: int,
    ) -> list[_Stage]:
        """Traces back the stages that make A^k(a, b, m_k), from the last to the first."""
        if k == 0:
            return [_Stage(a, b, self._alike(behind), replicas)]
        pipelines = self._pipelines(k, behind)
        m = self.levels[k - 1].parts
        stages: list[_Stage] = []
        # The loop ends because each round takes at least one of the m parts.
        while m:
            begin = int(pipelines.begins[m - 1][a, b])
            last = int(pipelines.parts[m - 1][a, b])
            inside = self._behind(k, behind, m, last)
            stages = self._stages(k - 1, inside, begin, b, replicas * last) + stages
            b, m = begin, m - last
        return stages


class _Smallest(_Fastest):
    """The same program with bytes of the fullest device in place of seconds.

    It finds the smallest limit that a pipeline keeps.
    """

    def device(self, s: int) -> Grid:
        return self.kept.peak_bytes(s)

    def share(
        self,
        level: _Level,
        m: int,
        cost: Grid,
    ) -> Grid:
        return cost

    def follow(self, level: _Level, cost: Grid) -> Grid:
        return cost


def _levels(kept: KeptStages) -> list[_Level]:
    problem = kept.problem
    devices, cluster = problem.stages, problem.cluster
    if cluster is None:
        return [_level(kept, devices, 1, problem.peer)]
    local = min(devices, cluster.devices_per_machine)
    # Replicas are planned only for machines that are used wholly and have equally many devices.
    machines, more = divmod(devices, local)
    if more or machines > cluster.machines:
        raise ValueError(
            f"{devices} devices: cluster {cluster.name} has {cluster.machines} machines of "
            f"{cluster.devices_per_machine}, replicas are planned for some of these machines, wholly used"
        )
    inside = _level(kept, local, 1, cluster.peer)
    if machines > 1:
        return [inside, _level(kept, machines, local, cluster.network)]
    return [inside]


def _level(
    kept: KeptStages,
    parts: int,
    devices: int,
    link: Link,
) -> _Level:
    weights = between(
        kept.segments.parameter_bytes,
        kept.cuts,
        kept.cuts,
    )
    comm_s = KeptStages(replace(kept.problem, peer=link)).comm_s
    return _Level(
        parts,
        devices,
        comm_s,
        link_seconds(link, 2 * weights),
    )


def _join(
    left: Float[np.ndarray, "I K"],
    right: Float[np.ndarray, "K J"],
    how: np.ufunc,
) -> tuple[Float[np.ndarray, "I J"], Int[np.ndarray, "I J"]]:
    """Finds for each (a, b) the least how(left[a, c], right[c, b]) over c > a, and the best c.

    >>> none = np.inf
    >>> left = np.array([[none, 3.0, 5.0]])
    >>> right = np.array([[none] * 3, [none, none, 4.0], [none] * 3])
    >>> values, middles = _join(left, right, np.maximum)
    >>> float(values[0, 2]), int(middles[0, 2])
    (4.0, 1)
    """
    rows = len(left)
    columns = right.shape[1]
    values = np.full((rows, columns), np.inf)
    middles = np.zeros((rows, columns), dtype=np.int64)
    for a in range(min(rows, columns - 1)):
        ways = how(left[a, a + 1 :, None], right[a + 1 :])
        least = ways.argmin(0)
        values[a], middles[a] = ways[least, np.arange(columns)], least + a + 1
    return values, middles
