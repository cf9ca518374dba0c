"""Defines shapes of pipelines: the devices at each place, and the examples of a micro-batch.

Planners compare shapes. For each shape, `Shapes.problem` makes the problem that is then solved.

Legend: the devices of a cluster are divided among places, the positions along the pipeline. The
devices of a place are its replicas, which share the work of each micro-batch. A micro-batch has mu
examples, and a step has batch / mu micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from jvpipe.cost.hardware import Cluster
from jvpipe.cost.local_costs import LocalCosts
from jvpipe.planners.model.pins import UNPINNED, Pins
from jvpipe.planners.model.problem import Bounds, Devices, Group, Problem, Slowness, single_groups


@dataclass(frozen=True)
class Shape:
    """The devices of each place of a pipeline, and the examples of a micro-batch.

    >>> Shape(((0, 1, 2), (3,)), 6)
    3:1 devices, micro-batches of 6
    """

    places: tuple[Devices, ...]
    size: int

    @staticmethod
    def along(
        order: Sequence[int],
        starts: Sequence[int],
        replicas: Sequence[int],
        size: int,
    ) -> "Shape":
        """Makes the shape in which each place has consecutive devices of an order.

        Args:
            order: the devices, in the order along which places are laid out.
            starts: for each place, the position of its first device in the order.
            replicas: how many devices each place has.
            size: examples of a micro-batch.
        """
        spans = zip(starts, replicas, strict=True)
        places = (tuple(sorted(order[start : start + count])) for start, count in spans)
        return Shape(tuple(places), size)

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of devices of each place."""
        return tuple(map(len, self.places))

    @property
    def kind(self) -> str:
        """The name of the shape's kind: "data parallel", "straight", "two stages" or "hybrid"."""
        if len(self.places) == 1:
            return "data parallel"
        if max(self.replicas) == 1:
            return "straight"
        return "two stages" if len(self.places) == 2 else "hybrid"

    def __repr__(self) -> str:
        return f"{':'.join(map(str, self.replicas))} devices, micro-batches of {self.size}"


Path = tuple[Shape, Bounds]
"""A shape, and the bounds of its stages."""


@dataclass(frozen=True)
class Shapes:
    """The shapes of a model on the first `devices` of a cluster, and the problem of each.

    Attributes:
        model: what is the same in the problem of every shape: the schedule, limits, the links to
            the host. Its costs are read only for numbers that do not depend on the batch.
        local: the model's costs by local batch, which is the number of examples that one device
            works on at a time.
        cluster: the machines and their links.
        devices: how many devices of the cluster are used.
        batch: how many examples a step has.
        pins: the parts of a plan that the user has fixed.
        apart: for each device a group of its own, with its slowness and its memory; empty: all
            devices are alike.
    """

    model: Problem
    local: LocalCosts
    cluster: Cluster
    devices: int
    batch: int
    pins: Pins = UNPINNED
    apart: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= self.cluster.devices:
            raise ValueError(
                f"{self.devices} devices: {self.cluster.name} has {self.cluster.devices}, "
                "use fewer devices or a cluster of more machines"
            )
        if self.batch < 1:
            raise ValueError(f"a batch of {self.batch} examples: there must be at least one")
        self.pins.check(self.devices, self.batch, self.layers)

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return len(self.model.costs.layers)

    def under(self, limit_bytes: int) -> "Shapes":
        """Returns the same shapes under another `Problem.memory_limit_bytes`."""
        return replace(self, model=replace(self.model, memory_limit_bytes=limit_bytes))

    def told_apart(
        self,
        slowness: Sequence[Slowness],
        limits: Sequence[int],
        names: Sequence[str],
    ) -> "Shapes":
        """Returns the same shapes on devices that may differ.

        Args:
            slowness: for each device, its `Group.slowness`.
            limits: the bytes that each device may hold; empty: no limit.
            names: the kind of each device, for messages; empty: no names.
        """
        limit, groups = single_groups(slowness, limits, names)
        model = replace(self.model, memory_limit_bytes=limit)
        return replace(self, model=model, apart=groups)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The possible sizes of micro-batches, largest first, that feed all replicas in `pins`."""
        if self.pins.size is not None:
            return (self.pins.size,)
        largest = max(self.pins.replicas or (1,))
        divisors = (mu for mu in range(self.batch, 0, -1) if self.batch % mu == 0)
        return tuple(mu for mu in divisors if self.pins.feeds(largest, mu))

    @cached_property
    def orders(self) -> tuple[Devices, ...]:
        """The orders of devices along which places are laid out: DAPPLE's placements.

        "Append first" lists the devices machine by machine. "Scatter first" lists one device of
        each machine of a block in turn. All machines form one block, or several blocks are listed
        one after another. Here two machines, with a | between them, have two devices each:

            0 1 | 2 3       append first   0 1 2 3
                            scatter first  0 2 1 3

        DAPPLE's "fresh first", which begins each stage on an unused machine, needs no order of its
        own: it is "append first" with some devices left out (`starts` of `Shape.along`).

        Devices that differ are also listed by their speed and by their memory, up and down.
        """
        devices = np.arange(self.devices)
        per_machine = self.cluster.devices_per_machine
        machines = self.devices // per_machine
        orders = [tuple(range(self.devices))]
        if self.devices % per_machine == 0:
            sizes = [q for q in range(2, machines + 1) if machines % q == 0]
            # One block of all machines is tried, and blocks of the next smaller size.
            for q in sizes[-2:]:
                by_block = devices.reshape(-1, q, per_machine)
                orders.append(tuple(by_block.transpose(0, 2, 1).ravel().tolist()))
        if self.apart:
            orders += map(tuple, sorted_orders(self.apart))
        # If machines have one device each, or if there is one machine, all orders are the first.
        return tuple(dict.fromkeys(orders))

    @cached_property
    def fastest(self) -> tuple[Devices, ...]:
        """The devices that are at least as fast as a speed, for each speed but the slowest."""
        slowness = [group.mean_slowness for group in self.apart]
        return tuple(
            tuple(d for d, slower in enumerate(slowness) if slower <= speed)
            for speed in sorted(set(slowness))[:-1]
        )

    def problem(self, shape: Shape) -> Problem:
        """Makes the problem of a shape, in which the devices of each place form a group."""
        groups = []
        for p, devices in enumerate(shape.places):
            # Replicas wait for the one with the largest share, so this share counts.
            share = -(-shape.size // len(devices))
            group = replace(
                self._joined(devices),
                costs=None if share == shape.size else self.local.at(share),
                # For p = 0, this is the link from the last place, as in a loop of stages.
                receives=self.cluster.way(shape.places[p - 1], devices),
                reduces=self.cluster.reducing(devices),
                machines=self.cluster.machines_of(devices) if self.cluster.machines > 1 else (),
            )
            groups.append(group)
        costs = self.local.at(shape.size)
        # Fixed bounds are expressed by `together`: layers between two bounds must share a stage.
        if self.pins.bounds:
            together = tuple(tuple(range(i, j)) for i, j in pairwise(self.pins.bounds))
            costs = replace(costs, together=together)
        return replace(
            self.model,
            costs=costs,
            stages=len(groups) * self.model.schedule.chunks,
            microbatches=self.batch // shape.size,
            groups=tuple(groups),
        )

    def _joined(self, devices: Devices) -> Group:
        """Joins devices into a group with their greatest slowness and their least memory."""
        if not self.apart:
            return Group(devices)
        kinds = [self.apart[d] for d in devices]
        slowest: Slowness = ()
        if any(kind.slowness for kind in kinds):
            slowness = [kind.slowness or (1.0,) * self.layers for kind in kinds]
            slowest = tuple(map(max, zip(*slowness, strict=True)))
        names = dict.fromkeys(kind.name for kind in kinds if kind.name)
        less_bytes = max(kind.less_bytes for kind in kinds)
        return Group(devices, slowest, less_bytes, ", ".join(names))


def sorted_orders(groups: Sequence[Group]) -> list[list[int]]:
    """Lists the groups by their speed, then by their memory, each of them falling and rising."""
    by_speed = [group.mean_slowness for group in groups]
    by_memory = [group.less_bytes for group in groups]
    return [
        sorted(range(len(groups)), key=rank.__getitem__, reverse=rising)
        for rank in (by_speed, by_memory)
        for rising in (False, True)
    ]
