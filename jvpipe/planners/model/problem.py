"""A problem that a planner is asked to solve, and the decision that it answers with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

from jvpipe.cost.costs import Costs, LayerCost
from jvpipe.cost.hardware import INFINITE, Cluster, Link
from jvpipe.ir.plan import Fate, Plan, Stage
from jvpipe.schedules.schedule import Schedule

RECOMPUTE = -1
"""A choice: the layer's forward runs again before its backward, from its input, which is kept."""
RECOMPUTE_CHAIN = -2
"""The same choice without the layer's input: the layer before, which also runs again, makes it."""


@dataclass(frozen=True)
class Group:
    """The devices at one place of the pipeline: replicas that share the work of a micro-batch.

    A place is a position along the pipeline, counted from 0. A problem counts its places in the
    order in which a micro-batch passes them, whatever numbers the devices have elsewhere.

    Attributes:
        devices: the numbers that these devices have outside of the problem.
        slowness: for each layer, how many times as long as `costs` the slowest of these devices
            takes; empty: exactly as long.
        less_bytes: by how many bytes the device with the least memory is below the problem's limit.
        name: for people.
        costs: of the largest share of a micro-batch that a device works on; None: each device works
            on whole micro-batches, and the problem's costs hold.
        receives: the link from the place before, for the bytes that all replicas receive together;
            None: the problem's.
        reduces: the link on which replicas add up gradients, for the bytes of one replica.
        machines: the machines of these devices, if several places share the network of a machine.

    """

    devices: tuple[int, ...]
    slowness: tuple[float, ...] = ()
    less_bytes: int = 0
    name: str = ""
    costs: Costs | None = None
    receives: Link | None = None
    reduces: Link = INFINITE
    machines: tuple[int, ...] = ()

    @property
    def replicas(self) -> int:
        """How many devices there are."""
        return len(self.devices)

    @property
    def mean_slowness(self) -> float:
        """How many times as long layers take on these devices, on average over the layers."""
        return sum(self.slowness) / len(self.slowness) if self.slowness else 1.0

    @property
    def kind(self) -> tuple[tuple[float, ...], int]:
        """What two groups of one device have in common if these devices are alike."""
        return self.slowness, self.less_bytes


@dataclass(frozen=True)
class Problem:
    """A model that is to be cut into stages, and the devices that the stages are to be placed on.

    Attributes:
        costs: of the model's layers, for whole micro-batches.
        stages: how many stages there are: the schedule's chunks times the number of places.
        schedule: the order of tasks.
        microbatches: of a step.
        memory_limit_bytes: what the roomiest device may hold; None: no limit. The limit of any
            other device is this number less its group's `less_bytes`, so that a limit that is
            raised is raised by the same number of bytes for all devices.
        host_limit_bytes: what the host may hold for all devices together; None: no limit.
        host: the link between a device and its host.
        peer: the link between a device and the device of the next stage.
        peer_uses_host: whether `host` and `peer` are the same physical link.
        cluster: the machines, if they are known.
        groups: the devices of each place, in the order in which a micro-batch passes the places;
            empty: each place has one device, and all devices are alike. The limit of a place holds
            for each of its devices.
        overlaps: whether replicas add up the gradients of a layer while the last backwards of the
            layers before it still run; if not, they do so after all backwards of the stage.
        lent: the share of an idle device's time that other devices can use (devices that share the
            cores of one machine). An order of tasks is charged for the rest of its idle time alone.
    """

    costs: Costs
    stages: int
    schedule: Schedule
    microbatches: int
    memory_limit_bytes: int | None = None
    host_limit_bytes: int | None = None
    host: Link = INFINITE
    peer: Link = INFINITE
    peer_uses_host: bool = True
    cluster: Cluster | None = None
    groups: tuple[Group, ...] = ()
    overlaps: bool = False
    lent: float = 0.0

    def __post_init__(self) -> None:
        layers = len(self.costs.layers)
        chunks = self.schedule.chunks
        if self.stages % chunks:
            raise ValueError(
                f"{self.stages} stages: {self.schedule.name} has {chunks} per device, "
                f"so that there must be a multiple of {chunks}"
            )
        if chunks > 1:
            self.schedule.check_layers(self.devices, layers)
        if not 1 <= self.stages <= layers:
            raise ValueError(
                f"{self.stages} stages: there can be 1 to {layers}, as many as the model has layers"
            )
        if self.microbatches < 1:
            raise ValueError(f"{self.microbatches} micro-batches: there must be at least one")
        assert len(self.groups) in (0, self.devices), (
            "every place has its devices, or none says which"
        )

    @property
    def devices(self) -> int:
        """The number of places of the pipeline; a place has one device or several replicas."""
        return self.stages // self.schedule.chunks

    @property
    def replicated(self) -> bool:
        """Whether any stage runs on several devices."""
        return any(group.replicas > 1 for group in self.groups)

    @property
    def phases(self) -> int:
        """How often a step waits for its slowest stage: see `Schedule.phases`."""
        return self.schedule.phases(self.devices, self.microbatches)

    @property
    def together(self) -> tuple[tuple[int, ...], ...]:
        """The groups of layers that must share a stage."""
        # With several chunks, layers that pass model state on to the next micro-batch (`carried`)
        # must stay in one stage.
        carried = self.costs.carried if self.schedule.chunks > 1 else ()
        return (*self.costs.together, *carried)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage, the most micro-batches between their forward and their backward."""
        return self.schedule.in_flight(self.devices, self.microbatches)

    @property
    def updates(self) -> float:
        """The number of updates of a stage per step, on average."""
        return self.schedule.updates(self.microbatches)

    @property
    def splits(self) -> bool:
        """Whether backwards run in two halves."""
        return self.schedule.splits(self.devices, self.microbatches)

    @property
    def places(self) -> tuple[int, ...]:
        """The place of each stage."""
        return tuple(self.schedule.device_of(s, self.devices) for s in range(self.stages))

    @property
    def where(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each stage, by their numbers outside of the problem."""
        if not self.groups:
            return tuple((place,) for place in self.places)
        return tuple(self.groups[place].devices for place in self.places)

    def group(self, s: int) -> Group:
        """Returns the devices of a stage."""
        place = self.schedule.device_of(s, self.devices)
        return self.groups[place] if self.groups else Group((place,))

    def name_of(self, s: int) -> str:
        """Names the devices of a stage."""
        group = self.group(s)
        what = "device" if group.replicas == 1 else "devices"
        numbers = ", ".join(map(str, group.devices))
        kind = f" ({group.name})" if group.name else ""
        return f"{what} {numbers}{kind}"

    def costs_of(self, s: int) -> Costs:
        """Returns the costs of the largest share of a micro-batch that a device of a stage has."""
        costs = self.group(s).costs if self.groups else None
        return costs or self.costs

    def slowness(self, s: int) -> tuple[float, ...]:
        """Returns how many times as long a stage's devices take for each layer; empty: as long."""
        return self.group(s).slowness if self.groups else ()

    def less_bytes(self, s: int) -> int:
        """Returns by how many bytes the limit of a stage's devices is below the problem's limit."""
        return self.group(s).less_bytes if self.groups else 0

    def link_into(self, s: int) -> Link:
        """Returns the link between a stage and the one before it, of values and cotangents.

        A group knows the link from the place before it. In a vee the second half of the stages goes
        back along the places: the receiver then comes before the sender, and the link that joins
        them is the sender's.
        """
        if not self.groups or s == 0:
            return self.peer
        sender = self.schedule.device_of(s - 1, self.devices)
        receiver = self.schedule.device_of(s, self.devices)
        goes_back = sender == receiver + 1
        link = self.groups[sender if goes_back else receiver].receives
        return self.peer if link is None else link

    def limit_of(self, device: int) -> int | None:
        """Returns the bytes that each device at a place may hold; None: no limit."""
        limit = self.memory_limit_bytes
        if limit is None or not self.groups:
            return limit
        return limit - self.groups[device].less_bytes

    @property
    def limits(self) -> tuple[int, ...]:
        """The bytes that each device may hold, by their numbers outside; empty: no limit."""
        limit = self.memory_limit_bytes
        if limit is None:
            return ()
        if not self.groups:
            return (limit,) * self.devices
        by_number = {d: limit - group.less_bytes for group in self.groups for d in group.devices}
        return tuple(by_number[number] for number in sorted(by_number))

    def layers_on(self, s: int) -> tuple[LayerCost, ...]:
        """Returns the costs of all layers of the model on the devices of a stage."""
        return self._layers_on[self.schedule.device_of(s, self.devices)]

    @cached_property
    def _layers_on(self) -> list[tuple[LayerCost, ...]]:
        """The costs of all layers, for the devices of each place."""
        if not self.groups:
            return [self.costs.layers] * self.devices
        cache: dict[tuple[int, tuple[float, ...]], tuple[LayerCost, ...]] = {}
        every = []
        # Devices that are alike share one tuple of layers, because a model may have many layers
        # while a cluster has few kinds of devices.
        for group in self.groups:
            costs = group.costs or self.costs
            key = id(costs), group.slowness
            if key not in cache:
                cache[key] = costs.layers
                if group.slowness:
                    cache[key] = tuple(map(LayerCost.slower, costs.layers, group.slowness))
            every.append(cache[key])
        return every

    @property
    def unlimited(self) -> "Problem":
        """The same problem without limits, so that everything may be kept."""
        return replace(self, memory_limit_bytes=None, host_limit_bytes=None)

    def in_order(self, order: Sequence[int]) -> "Problem":
        """Returns the problem with its devices in another order along the pipeline."""
        return replace(self, groups=tuple(self.groups[at] for at in order))

    def told_apart(
        self,
        slowness: Sequence[tuple[float, ...]],
        limits: Sequence[int],
        names: Sequence[str] = (),
        numbers: Sequence[int] = (),
    ) -> "Problem":
        """Returns the problem with one device for each place, where devices may differ.

        Args:
            slowness: of each device, as in `Group.slowness`.
            limits: the bytes that each device may hold; empty: no limit.
            names: of each device, for people.
            numbers: of each device outside of the problem; empty: 0, 1, 2, ...

        >>> from jvpipe.cost.costs import Option
        >>> from jvpipe.schedules import find_schedule
        >>> costs = Costs((LayerCost("block", 1.0, 2.0, (Option(0),)),) * 4)
        >>> problem = Problem(costs, 2, find_schedule("1f1b"), 4)
        >>> apart = problem.told_apart([(), (2.0,) * 4], [24, 11])
        >>> apart.memory_limit_bytes, apart.limit_of(1), apart.layers_on(1)[0].forward_s
        (24, 11, 2.0)
        """
        limit, groups = single_groups(slowness, limits, names, numbers)
        return replace(self, memory_limit_bytes=limit, groups=groups)


def single_groups(
    slowness: Sequence[tuple[float, ...]],
    limits: Sequence[int],
    names: Sequence[str] = (),
    numbers: Sequence[int] = (),
) -> tuple[int | None, tuple[Group, ...]]:
    """Returns the limit of the roomiest device, and one group per device; none if all are alike.

    Args:
        slowness: of each device, as in `Group.slowness`.
        limits: the bytes that each device may hold; empty: no limit.
        names: of each device, for people.
        numbers: of each device outside of the problem; empty: 0, 1, 2, ...
    """
    limit = max(limits, default=None)
    groups = list[Group]()
    for at, slower in enumerate(slowness):
        group = Group(
            devices=(numbers[at] if numbers else at,),
            slowness=slower,
            less_bytes=0 if limit is None else limit - limits[at],
            name=names[at] if names else "",
        )
        groups.append(group)
    # Devices that are all alike need no groups, and planning is faster without groups.
    are_alike = len({group.kind for group in groups}) == 1 and not groups[0].slowness
    return limit, () if are_alike else tuple(groups)


Entry = TypeVar("Entry")


def with_entry(
    row: tuple[Entry, ...],
    at: int,
    entry: Entry,
) -> tuple[Entry, ...]:
    """Makes a tuple with one entry replaced: a bound, a choice, the devices of a place.

    >>> with_entry((0, 2, 4), 1, 3)
    (0, 3, 4)
    """
    return (*row[:at], entry, *row[at + 1 :])


@dataclass(frozen=True)
class Decision:
    """The layers of each stage, and the fates of what the layers leave for their backwards.

    Stage s holds layers `bounds[s]` to `bounds[s + 1] - 1`. `choices[layer]` is an index into the
    layer's options on the devices of its stage, or `RECOMPUTE`, or `RECOMPUTE_CHAIN`. Choice 0
    keeps everything.
    """

    bounds: tuple[int, ...]
    choices: tuple[int, ...]

    @staticmethod
    def keeping_all(bounds: Sequence[int]) -> "Decision":
        """Makes the decision with these bounds that keeps everything."""
        return Decision(tuple(bounds), (0,) * bounds[-1])

    def plan(
        self, problem: Problem, planner: str, where: Sequence[tuple[int, ...]] | None = None
    ) -> Plan:
        """Converts the decision to a plan.

        Args:
            problem: that the decision answers.
            planner: the name of the planner that made the decision.
            where: the devices of each stage; None: those of the problem.
        """
        ids = problem.costs.ids or tuple(range(len(problem.costs.layers)))
        where = problem.where if where is None else where
        stages = []
        for s, (i, j) in enumerate(pairwise(self.bounds)):
            costs = problem.costs_of(s)
            fates = dict[str, Fate]()
            for layer in range(i, j):
                fates.update(self._fates(costs, layer))
            stages.append(
                Stage(
                    ids[i:j],
                    where[s],
                    fates,
                )
            )
        return Plan(tuple(stages), problem.schedule.name, planner)

    def _fates(self, costs: Costs, layer: int) -> Mapping[str, Fate]:
        choice = self.choices[layer]
        options = costs.layers[layer].options
        if choice >= 0:
            return options[choice].fates
        fates = dict.fromkeys(options[-1].fates, Fate.RECOMPUTE)
        if choice == RECOMPUTE_CHAIN:
            # The input, which the layer before makes for this one, is dropped too.
            for edge in costs.edges:
                if edge.producer == layer - 1 and layer in edge.readers:
                    fates[edge.name] = Fate.RECOMPUTE
        return fates
