"""Data and pipeline parallelism together: what is asked.

Legend: G devices of a cluster; a plan has S stages, stage s on r_s devices (its replicas), which share each micro-batch
of mu examples; M = batch / mu micro-batches a step.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from jvpipe.cost.hardware import Cluster
from jvpipe.planners.model.pins import UNPINNED, Pins
from jvpipe.planners.model.replicas_costs import LocalCosts
from jvpipe.planners.model.replicas_plan import ReplicaPlan


@dataclass(frozen=True)
class ReplicaProblem:
    """A model to be trained on the first `devices` of a cluster, `batch` examples a step, synchronously.

    With `overlaps` the gradients of a layer are reduced while the last backwards of those before it run; without, after
    all backwards of the stage. A stage that does not keep the limit runs its layers again before their backwards; with
    `recomputes` all do. What is pinned is not decided.
    """

    costs: LocalCosts
    cluster: Cluster
    devices: int
    batch: int
    memory_limit_bytes: int | None = None
    overlaps: bool = False
    recomputes: bool = False
    pins: Pins = UNPINNED

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= self.cluster.devices:
            raise ValueError(
                f"{self.devices} devices: {self.cluster.name} has {self.cluster.devices}, "
                "use fewer devices or a cluster of more machines"
            )
        if self.batch < 1:
            raise ValueError(f"a batch of {self.batch} examples: there must be at least one")
        self.pins.check(self.devices, self.batch, self.layers)

    @cached_property
    def again(self) -> LocalCosts:
        """What layers take that run again before their backwards."""
        return self.costs.recomputed()

    @property
    def local(self) -> LocalCosts:
        """What layers take at least."""
        return self.again if self.recomputes else self.costs

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return len(self.costs.costs[0].layers)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The micro-batch sizes that there can be: the divisors of the batch, falling."""
        if self.pins.size is not None:
            return (self.pins.size,)
        most = max(self.pins.replicas or (1,))
        return tuple(
            mu
            for mu in range(self.batch, 0, -1)
            if self.batch % mu == 0 and self.pins.feeds(most, mu)
        )

    @cached_property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        """Orders of the devices, along which stages are placed: DAPPLE's placements.

        Machine by machine (append first, and fresh first where devices are left out), and one device of each machine
        in turn (scatter first), over all machines or over groups of them.
        """
        devices, each = np.arange(self.devices), self.cluster.devices_per_machine
        machines = self.devices // each
        orders = [tuple(range(self.devices))]
        if each > 1 and machines > 1 and self.devices % each == 0:
            groups = [q for q in range(2, machines + 1) if machines % q == 0]
            for q in groups[-2:]:
                turned = devices.reshape(machines // q, q, each).transpose(0, 2, 1)
                orders.append(tuple(int(d) for d in turned.ravel()))
        return tuple(orders)

    def recomputing(self) -> "ReplicaProblem":
        """The same with every layer run again."""
        return replace(self, recomputes=True)


def check(problem: ReplicaProblem, plan: ReplicaPlan) -> None:
    """Raises ValueError unless a plan is complete and contiguous, its places are apart, and every replica is fed."""
    used = [device for places in plan.places for device in places]
    if (
        plan.bounds[0]
        or plan.bounds[-1] != problem.layers
        or any(a >= b for a, b in pairwise(plan.bounds))
    ):
        raise ValueError(
            f"bounds {plan.bounds} must rise from 0 to the number of layers, {problem.layers}"
        )
    if len(plan.bounds) != plan.stages + 1:
        raise ValueError(
            f"bounds {plan.bounds} are of {len(plan.bounds) - 1} stages, places of {plan.stages}"
        )
    if len(set(used)) < len(used) or not all(0 <= d < problem.devices for d in used):
        raise ValueError(f"places {plan.places} must be different devices of {problem.devices}")
    if problem.batch % plan.size:
        raise ValueError(
            f"micro-batches of {plan.size}: they must divide the batch of {problem.batch}"
        )
    if not 1 <= min(plan.replicas) <= max(plan.replicas) <= plan.size:
        raise ValueError(
            f"{max(plan.replicas)} replicas cannot share micro-batches of {plan.size}: "
            f"use at most {plan.size} replicas, or larger micro-batches"
        )
