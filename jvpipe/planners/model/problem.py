"""What a planner is asked, and what it answers."""

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
"""The layer's forward runs again before its backward, from its input, which is kept."""
RECOMPUTE_CHAIN = -2
"""The same, but its input is dropped too: the layer before it, run again too, makes it again."""


@dataclass(frozen=True)
class Group:
    """The devices at one place of the pipeline: its replicas, each of which works on its share of a
    micro-batch.

    Attributes:
        devices: their numbers outside of the problem.
        slowness: how many times as long as the costs say the slowest of them takes for each layer;
            none: as long.
        less_bytes: by how much less than the limit the one with the least memory may hold.
        name: what people call them.
        costs: of the largest share of a micro-batch; None: each works on whole ones.
        receives: the link from the place before, for what all replicas receive together; None: the
            problem's.
        reduces: the link on which the replicas add up gradients, for the bytes of one of them.
        machines: where they are, if places share the networks of machines.

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
        """How many times longer layers take on it, on average."""
        return sum(self.slowness) / len(self.slowness) if self.slowness else 1.0

    @property
    def kind(self) -> tuple[tuple[float, ...], int]:
        """What makes a device one like others."""
        return self.slowness, self.less_bytes


@dataclass(frozen=True)
class Problem:
    """A model to be spread over devices, cut into `stages`: so many per device as the schedule has
    chunks.

    `costs` are those of whole micro-batches. `host`, `peer` are the links of a device to its host
    and to the next stage's device; `peer_uses_host` says that they are one. The memory limit is
    that of the roomiest device, the host's that of all devices together; None means that there is
    no limit.

    `groups` are the devices of each place of the pipeline, in the order in which a micro-batch
    passes them; none: each place has one, and all are alike. A limit of a device holds for each
    device of a group. With `overlaps` replicas add up the gradients of a layer while the last
    backwards of the layers before it run; without, after all backwards of the stage. `lent` is the
    share of an idle device's time that the others use: with it an order of tasks is judged by less
    than its idle time.

    A plan that needs more than its devices may hold is over the limit by the same number on each: a
    limit that is raised, is raised for all.
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
        """How many places the pipeline has, each with a device, or several that are replicas."""
        return self.stages // self.schedule.chunks

    @property
    def replicated(self) -> bool:
        """Whether a stage runs on several devices."""
        return any(group.replicas > 1 for group in self.groups)

    @property
    def phases(self) -> int:
        """How often a step waits for its slowest stage: see `Schedule.phases`."""
        return self.schedule.phases(self.devices, self.microbatches)

    @property
    def together(self) -> tuple[tuple[int, ...], ...]:
        """The groups of layers that must share a stage."""
        # Model state that goes to the next micro-batch stays in one of a device's stages.
        carried = self.costs.carried if self.schedule.chunks > 1 else ()
        return (*self.costs.together, *carried)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches between their forward and their backward, on each stage."""
        return self.schedule.in_flight(self.devices, self.microbatches)

    @property
    def updates(self) -> float:
        """How often a step's micro-batches update each stage, on average."""
        return self.schedule.updates(self.microbatches)

    @property
    def splits(self) -> bool:
        """Whether backwards run in two halves."""
        return self.schedule.splits(self.devices, self.microbatches)

    @property
    def places(self) -> tuple[int, ...]:
        """The device of each stage."""
        return tuple(self.schedule.device_of(s, self.devices) for s in range(self.stages))

    @property
    def where(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each stage, by their numbers outside."""
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
        """Returns the costs of the largest share of a micro-batch on a device of a stage."""
        costs = self.group(s).costs if self.groups else None
        return costs or self.costs

    def slowness(self, s: int) -> tuple[float, ...]:
        """Returns how many times longer a stage's devices take for each layer, if longer at all."""
        return self.group(s).slowness if self.groups else ()

    def less_bytes(self, s: int) -> int:
        """Returns by how much less than the limit the devices of a stage may hold."""
        return self.group(s).less_bytes if self.groups else 0

    def link_into(self, s: int) -> Link:
        """Returns the link between a stage and the one before it, of values and cotangents.

        A place knows the link from the place before it; where a schedule goes back along the
        pipeline, that link is the receiver's neighbour's.
        """
        if not self.groups or s == 0:
            return self.peer
        sender = self.schedule.device_of(s - 1, self.devices)
        receiver = self.schedule.device_of(s, self.devices)
        # In a vee the second half of the stages goes back along the devices.
        goes_back = sender == receiver + 1
        link = self.groups[sender if goes_back else receiver].receives
        return self.peer if link is None else link

    def limit_of(self, device: int) -> int | None:
        """Returns what the device at a place of the pipeline may hold."""
        limit = self.memory_limit_bytes
        if limit is None or not self.groups:
            return limit
        return limit - self.groups[device].less_bytes

    @property
    def limits(self) -> tuple[int, ...]:
        """What each device may hold, in the order of their numbers outside, if there is a limit."""
        limit = self.memory_limit_bytes
        if limit is None:
            return ()
        if not self.groups:
            return (limit,) * self.devices
        by_number = {d: limit - group.less_bytes for group in self.groups for d in group.devices}
        return tuple(by_number[number] for number in sorted(by_number))

    def layers_on(self, s: int) -> tuple[LayerCost, ...]:
        """Returns the layers of the model, as the devices of a stage take them."""
        return self._layers_on[self.schedule.device_of(s, self.devices)]

    @cached_property
    def _layers_on(self) -> list[tuple[LayerCost, ...]]:
        """The layers, as the devices of each place take them."""
        if not self.groups:
            return [self.costs.layers] * self.devices
        cache: dict[tuple[int, tuple[float, ...]], tuple[LayerCost, ...]] = {}
        every = []
        # Devices that are alike share one tuple of layers: models are large, and kinds are few.
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
        """The problem as it is where everything may be kept."""
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
        """Returns the problem of devices that may be unlike, one for each place.

        Args:
            slowness: of each device, as `Group` has it.
            limits: what each may hold; none: there is no limit.
            names: of each, for people.
            numbers: of each outside, if not 0, 1, 2, ...

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
    """Returns the limit of the roomiest device, and a group of each; none if all are alike.

    Args:
        slowness: of each device.
        limits: what each may hold; none: there is no limit.
        names: of each.
        numbers: of each outside.
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
    # Devices that are all alike need no groups, and what looks at groups is slower.
    are_alike = len({group.kind for group in groups}) == 1 and not groups[0].slowness
    return limit, () if are_alike else tuple(groups)


Entry = TypeVar("Entry")


def with_entry(
    row: tuple[Entry, ...],
    at: int,
    entry: Entry,
) -> tuple[Entry, ...]:
    """Makes a row with one entry replaced: a bound, a choice, the devices of a place.

    >>> with_entry((0, 2, 4), 1, 3)
    (0, 3, 4)
    """
    return (*row[:at], entry, *row[at + 1 :])


@dataclass(frozen=True)
class Decision:
    """Where layers go and how what they leave is treated.

    Stage s holds layers `bounds[s]` to `bounds[s + 1]`; `choices[layer]` is an index into the
    layer's options on the devices of its stage, or `RECOMPUTE` or `RECOMPUTE_CHAIN`.
    """

    bounds: tuple[int, ...]
    choices: tuple[int, ...]

    @staticmethod
    def keeping_all(bounds: Sequence[int]) -> "Decision":
        """Makes the decision that keeps everything between these cuts."""
        return Decision(tuple(bounds), (0,) * bounds[-1])

    def plan(
        self, problem: Problem, planner: str, where: Sequence[tuple[int, ...]] | None = None
    ) -> Plan:
        """Converts the decision to a plan.

        Args:
            problem: that was decided.
            planner: the name of whoever decided.
            where: the devices of each stage; None: those that the problem says.
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
            # The input is dropped too: what the layer before makes for this one.
            for edge in costs.edges:
                if edge.producer == layer - 1 and layer in edge.readers:
                    fates[edge.name] = Fate.RECOMPUTE
        return fates
