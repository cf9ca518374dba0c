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

    level 2    [ machine 0, 1 ]  [ machine 2 ]    m_2 = 3: the first layers are replicated on two
                                                  machines, the last layers are on the third
    level 1      one stage on     stages on       the layers of a machine are planned in the same
                 4 devices        3 and 1         way over its devices

A^0 is the seconds of a stage's forward and backward on one device. For each micro-batch in flight,
the device holds a version of its parameters, and activations. The number in flight is 1 + `behind`,
rounded up. Without replication, it is S - s on stage s of S. A pipeline over the first m parts of a
level leaves all other parts to later stages. So the program knows `behind` when it plans a stage,
and the memory constraint is exact.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jvpipe.cost.hardware import Link
from jvpipe.papers.kept_stages import KeptStages
from jvpipe.planners.model.grids import between, link_seconds
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.spans import Grid
from jvpipe.schedules.pipedream import PipeDream


class Replicated(NamedTuple):
    """A plan that keeps every residual: its bounds, and the number of devices of each stage."""

    bounds: tuple[int, ...]
    replicas: tuple[int, ...]


def replicated(problem: Problem) -> Replicated | None:
    """Finds the best pipeline over `problem.stages` devices on machines of `problem.cluster`.

    Without a cluster all devices count as one machine. Memory is counted for the paper's schedule,
    even if the problem has another one.

    Args:
        problem: the layers, the devices and the limit.

    Returns:
        The pipeline; None if every pipeline is over the limit.

    Raises:
        ValueError: the devices do not fill whole machines of the cluster.

    >>> from jvpipe.cost.costs import Costs, LayerCost, Option
    >>> from jvpipe.schedules import find_schedule
    >>> convolution = LayerCost("convolution", 1.0, 2.0, (Option(8),))
    >>> dense = LayerCost("dense", 0.5, 0.5, (Option(8),), parameter_bytes=1000)
    >>> costs = Costs((convolution, convolution, convolution, dense))
    >>> replicated(Problem(costs, 4, find_schedule("pipedream"), 4, peer=Link(100.0)))
    Replicated(bounds=(0, 3, 4), replicas=(3, 1))
    """
    kept = KeptStages(replace(problem, schedule=PipeDream()))
    program = _Program(kept)
    top = len(program.levels)
    last = len(kept.cuts) - 1
    if not np.isfinite(program.cost(top, Fraction(0))[0, last]):
        return None
    stages = program.stages(top, Fraction(0), 0, last, 1)
    ends = [int(kept.cuts[b]) for b, _ in stages]
    replicas = tuple(count for _, count in stages)
    return Replicated((0, *ends), replicas)


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


class _Pipelines(NamedTuple):
    """The best pipelines over m parts of a level.

    Attributes:
        cost: A^k(., ., m).
        begins: c, the index of the cut at which the last stage begins.
        parts: m', the number of parts on which the last stage runs.
    """

    cost: Grid
    begins: Int[np.ndarray, "I J"]
    parts: Int[np.ndarray, "I J"]


class _Program:
    """The dynamic program, in seconds per micro-batch."""

    def __init__(self, kept: KeptStages) -> None:
        self.kept = kept
        self.levels = _levels(kept)
        self._pipelines = cache(self._search)

    def cost(self, k: int, behind: Fraction) -> Grid:
        """Returns A^k(., ., m_k).

        Args:
            k: the level; 0 is a single device.
            behind: see the legend.
        """
        if k:
            return self.pipelines(k, behind)[-1].cost
        # The planned stage has ceil(1 + behind) micro-batches in flight. Stage s of a pipeline
        # without replicas has equally many, so its bytes are counted.
        s = self.kept.problem.stages - math.ceil(1 + behind)
        return self.kept.where_it_fits(s, self.kept.compute_s(s))

    def pipelines(self, k: int, behind: Fraction) -> list[_Pipelines]:
        """Returns the best pipelines of level k; item m - 1 is for m parts.

        Args:
            k: the level.
            behind: see the legend.
        """
        if self.kept.problem.memory_limit_bytes is None:
            behind = Fraction(0)  # without a limit nothing depends on the micro-batches in flight
        return self._pipelines(k, behind)

    def _search(self, k: int, behind: Fraction) -> list[_Pipelines]:
        """Finds the best pipelines of level k, for one part, two parts and so on."""
        level = self.levels[k - 1]
        n = len(self.kept.cuts)
        rows = 1 if k == len(self.levels) else n  # at the top, only pipelines from layer 0 count
        found = list[_Pipelines]()
        for m in range(1, level.parts + 1):
            # Either one stage is on all m parts, or a pipeline is on the first m - last parts and
            # a stage on the others.
            cost = self._stage_cost(k, behind, m, m)[:rows]
            # `begins` and `parts` say where the last stage begins, and on how many parts it runs.
            # `stages` traces all stages back from these arrays.
            begins = np.repeat(np.arange(rows)[:, None], n, 1)
            parts = np.full((rows, n), m)
            for last in range(1, m):
                before = found[m - last - 1].cost
                closing = np.maximum(self._stage_cost(k, behind, m, last), level.comm_s)
                joined, middle = _join(before, closing)
                better = joined < cost
                cost = np.where(better, joined, cost)
                begins = np.where(better, middle, begins)
                parts = np.where(better, last, parts)
            found.append(_Pipelines(cost, begins, parts))
        return found

    def _stage_cost(
        self,
        k: int,
        behind: Fraction,
        m: int,
        last: int,
    ) -> Grid:
        """Returns T^k(., ., last) for a stage on the last `last` of the first m parts.

        Args:
            k: the level.
            behind: see the legend; here it is the value for all parts of the level together.
            m: the number of parts of the pipeline.
            last: on how many of these parts the stage runs.
        """
        inside = self.cost(k - 1, self._behind(k, behind, m, last))
        reduce_s = (last - 1) * self.levels[k - 1].ring_s
        return np.maximum(inside, reduce_s) / last

    def _behind(
        self,
        k: int,
        behind: Fraction,
        m: int,
        last: int,
    ) -> Fraction:
        """Returns `behind` for a stage on the last `last` of the first m parts."""
        level = self.levels[k - 1]
        return (behind + (level.parts - m) * level.devices) / last

    def stages(
        self,
        k: int,
        behind: Fraction,
        a: int,
        b: int,
        replicas: int,
    ) -> list[tuple[int, int]]:
        """Traces back the stages of the pipeline of A^k(a, b, m_k), from the last to the first.

        Args:
            k: the level.
            behind: see the legend.
            a: the index of the cut at which the first stage begins.
            b: the index of the cut at which the last stage ends.
            replicas: how many copies of these stages run, because of the levels above.

        Returns:
            The stages in order, each as the index of the cut at its end and its number of devices.
        """
        if k == 0:
            return [(b, replicas)]
        pipelines = self.pipelines(k, behind)
        m = self.levels[k - 1].parts
        stages: list[tuple[int, int]] = []
        # The loop ends because each round takes at least one of the m parts.
        while m:
            begin = int(pipelines[m - 1].begins[a, b])
            last = int(pipelines[m - 1].parts[a, b])
            inside = self._behind(k, behind, m, last)
            stages = self.stages(k - 1, inside, begin, b, replicas * last) + stages
            b = begin
            m -= last
        return stages


def _levels(kept: KeptStages) -> list[_Level]:
    """Returns level 1 and, if the devices are in several machines, level 2."""
    problem = kept.problem
    devices = problem.stages
    cluster = problem.cluster
    if cluster is None:
        return [_level(kept, devices, 1, problem.peer)]
    local = min(devices, cluster.devices_per_machine)
    # Replicas are planned only on whole machines that all have equally many devices.
    machines, more = divmod(devices, local)
    if more or machines > cluster.machines:
        raise ValueError(
            f"{devices} devices: cluster {cluster.name} has {cluster.machines} machines of "
            f"{cluster.devices_per_machine}, and replicas are planned only on whole machines: use "
            "all devices of one or several of these machines"
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
    """Returns a level whose parts are joined by a link.

    Args:
        kept: the costs of all segments.
        parts: the number of parts.
        devices: the number of devices of each part.
        link: the link between the parts.
    """
    weights = between(kept.segments.parameter_bytes, kept.cuts, kept.cuts)
    over_link = KeptStages(replace(kept.problem, peer=link))
    return _Level(
        parts,
        devices,
        comm_s=over_link.comm_s(0),
        ring_s=link_seconds(link, 2 * weights),
    )


def _join(
    left: Float[np.ndarray, "I K"],
    right: Float[np.ndarray, "K J"],
) -> tuple[Float[np.ndarray, "I J"], Int[np.ndarray, "I J"]]:
    """Finds for each (a, b) the least max(left[a, c], right[c, b]) over c > a, and the best c.

    >>> none = np.inf
    >>> left = np.array([[none, 3.0, 5.0]])
    >>> right = np.array([[none] * 3, [none, none, 4.0], [none] * 3])
    >>> values, middles = _join(left, right)
    >>> float(values[0, 2]), int(middles[0, 2])
    (4.0, 1)
    """
    rows = len(left)
    columns = right.shape[1]
    values = np.full((rows, columns), np.inf)
    middles = np.zeros((rows, columns), dtype=np.int64)
    for a in range(min(rows, columns - 1)):
        first = a + 1  # the first c
        ways = np.maximum(left[a, first:, None], right[first:])
        least = ways.argmin(0)
        values[a] = ways[least, np.arange(columns)]
        middles[a] = least + first
    return values, middles
