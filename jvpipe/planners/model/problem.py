"""The problem that a planner solves, and the decision that it answers with.

A planner cuts the layers of a model, which are in the order of the forward, into stages. It also
chooses what each layer keeps, swaps or recomputes between its forward and its backward.

    stage    consecutive layers; stages are numbered from 0
    place    a position along the pipeline, with one device or with several replicas
    chunk    one of several stages at one place; most schedules have one chunk per place
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

from jvpipe.cost.costs import Costs, LayerCost
from jvpipe.cost.hardware import INFINITE, Cluster, Link
from jvpipe.ir.plan import Fate, Plan, Stage
from jvpipe.schedules.schedule import Schedule

Devices = tuple[int, ...]
"""Devices, by their numbers outside of a problem, such as in a plan."""
Slowness = tuple[float, ...]
"""For each layer, the seconds on a device as a multiple of those in the costs; empty: all are 1."""
Bounds = tuple[int, ...]
"""The first layer of each stage, and the number of layers."""

RECOMPUTE = -1
"""A choice: the layer's forward runs again before its backward, from its input, which is kept."""
RECOMPUTE_CHAIN = -2
"""A choice like `RECOMPUTE`, except that the input is not kept: the layer before makes it again."""


@dataclass(frozen=True)
class Group:
    """The devices at one place of the pipeline: replicas that share the work of a micro-batch.

    A problem counts its places from 0, in the order in which a micro-batch passes them.
    Outside of the problem, such as in a plan, the devices have other numbers (`devices`).

    Attributes:
        devices: the numbers of these devices outside of the problem.
        slowness: the slowness of the slowest of these devices.
        less_bytes: by how many bytes the limit of these devices is below the problem's
            limit. The device with the least memory counts.
        name: the kind of these devices, for messages.
        costs: the layers' costs for the largest share of a micro-batch that one of these devices
            works on; None: the problem's, because each device works on whole micro-batches.
        receives: the link from the place before (for place 0, from the last place), for the bytes
            that all replicas receive together; None: the problem's `peer`.
        reduces: the all-reduce of gradients as a link, for the gradient bytes of one replica.
        machines: the machine of each of these devices; empty if the cluster has only one.
    """

    devices: Devices
    slowness: Slowness = ()
    less_bytes: int = 0
    name: str = ""
    costs: Costs | None = None
    receives: Link | None = None
    reduces: Link = INFINITE
    machines: tuple[int, ...] = ()

    @property
    def replicas(self) -> int:
        """The number of devices at this place."""
        return len(self.devices)

    @property
    def mean_slowness(self) -> float:
        """The average of `slowness` over the layers; 1 if it is empty."""
        return sum(self.slowness) / len(self.slowness) if self.slowness else 1.0

    @property
    def kind(self) -> tuple[Slowness, int]:
        """The properties by which groups of one device differ; equal for devices that are alike."""
        return self.slowness, self.less_bytes


@dataclass(frozen=True)
class Problem:
    """A model that is to be cut into stages, and the devices that the stages are to be placed on.

    Attributes:
        costs: the costs of the model's layers, for whole micro-batches.
        stages: how many stages there are: the schedule's chunks times the number of places.
        schedule: the order of tasks.
        microbatches: how many micro-batches a step has.
        memory_limit_bytes: the bytes that the roomiest device (the one with the most
            memory) may hold; None: no limit. The limit of any other device is this number
            minus `less_bytes` of its group. So raising this number raises all limits by the
            same number of bytes.
        host_limit_bytes: the bytes that the host may hold for all devices together; None:
            no limit.
        host: the link between a device and its host.
        peer: the link between a device and the device of the next stage.
        peer_uses_host: whether `host` and `peer` are the same physical link.
        cluster: the machines, if they are known.
        groups: the devices of each place, in the order in which a micro-batch passes the
            places; empty: each place has one device, and all devices are alike. The limit
            of a place holds for each of its devices.
        overlaps: whether replicas add up the gradients of a layer while the last backwards
            of the layers before it still run; if not, they add them up after all backwards
            of the stage.
        lent: the share of an idle device's time that other devices can use. It is above 0
            if devices share the cores of one machine. This share of idle time does not
            count when orders of tasks are compared.
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
        layers, chunks = len(self.costs.layers), self.schedule.chunks
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
        """How many phases, each with its own slowest stage, a step has: see `Schedule.phases`."""
        return self.schedule.phases(self.devices, self.microbatches)

    @property
    def together(self) -> tuple[tuple[int, ...], ...]:
        """The sets of layers that must share a stage."""
        # With several chunks, layers that pass model state on to the next micro-batch
        # (`carried`) must stay in one stage.
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
    def where(self) -> tuple[Devices, ...]:
        """The devices of each stage, by their numbers outside of the problem."""
        return tuple(self.at_places[place].devices for place in self.places)

    @cached_property
    def at_places(self) -> tuple[Group, ...]:
        """The devices of each place, even if `groups` is empty because all devices are alike."""
        return self.groups or tuple(Group((place,)) for place in range(self.devices))

    def group(self, s: int) -> Group:
        """Returns the devices of a stage."""
        return self.at_places[self.schedule.device_of(s, self.devices)]

    def name_of(self, s: int) -> str:
        """Names the devices of a stage."""
        group = self.group(s)
        what = "device" if group.replicas == 1 else "devices"
        numbers = ", ".join(map(str, group.devices))
        kind = f" ({group.name})" if group.name else ""
        return f"{what} {numbers}{kind}"

    def costs_of(self, s: int) -> Costs:
        """Returns the layers' costs for the largest share that a device of a stage works on."""
        return self.group(s).costs or self.costs

    def slowness(self, s: int) -> Slowness:
        """Returns the `slowness` of a stage's devices; empty if it is 1 for all layers."""
        return self.group(s).slowness

    def less_bytes(self, s: int) -> int:
        """Returns by how many bytes the limit of a stage's devices is below the problem's limit."""
        return self.group(s).less_bytes

    def link_into(self, s: int) -> Link:
        """Returns the link over which a stage receives values and returns cotangents.

        Each group has the link from the place before it (`receives`). In a vee the second
        half of the stages goes back along the places. The receiving place is then the one
        before the sending place, so the link between them is that of the sending group. At the
        turn of a vee, both stages have the same devices, so receiving takes no time. To keep it
        simple, all values that stage s receives count on this link, even those that a stage before
        s - 1 made; the simulator does the same.
        """
        if s == 0:
            return self.peer
        sender = self.schedule.device_of(s - 1, self.devices)
        receiver = self.schedule.device_of(s, self.devices)
        if sender == receiver:
            return INFINITE
        goes_back = sender == receiver + 1
        return self.at_places[sender if goes_back else receiver].receives or self.peer

    def link_out_of(self, s: int) -> Link:
        """Returns the link over which a stage sends values and gets cotangents back."""
        return self.link_into(s + 1) if s + 1 < self.stages else self.peer

    def limit_of(self, device: int) -> int | None:
        """Returns the bytes that each device at a place (`device`) may hold; None: no limit."""
        limit = self.memory_limit_bytes
        return None if limit is None else limit - self.at_places[device].less_bytes

    @property
    def limits(self) -> tuple[int, ...]:
        """The limit of each device in bytes, sorted by the devices' numbers; empty: no limit."""
        limit = self.memory_limit_bytes
        if limit is None:
            return ()
        pairs = ((d, limit - group.less_bytes) for group in self.at_places for d in group.devices)
        return tuple(of_device for _, of_device in sorted(pairs))

    @property
    def unlike_limits(self) -> bool:
        """Whether some devices have a smaller limit than others."""
        return any(group.less_bytes for group in self.groups)

    @property
    def limit_said(self) -> str:
        """The limit of the devices, for messages."""
        if self.unlike_limits:
            return "the limits of the devices"
        return f"the limit of {self.memory_limit_bytes} bytes per device"

    def enough_said(self, limit_bytes: int) -> str:
        """Words a larger limit of the roomiest device; unlike limits grow by the same bytes."""
        if self.unlike_limits:
            return f"{limit_bytes - (self.memory_limit_bytes or 0)} bytes more on each device"
        return f"{limit_bytes} bytes"

    def layers_on(self, s: int) -> tuple[LayerCost, ...]:
        """Returns the costs of all layers of the model on the devices of a stage."""
        return self._layers_on[self.schedule.device_of(s, self.devices)]

    @cached_property
    def _layers_on(self) -> list[tuple[LayerCost, ...]]:
        """The costs of all layers, for the devices of each place."""
        cache: dict[tuple[int, Slowness], tuple[LayerCost, ...]] = {}
        every = []
        # Devices that are alike share one tuple of layers, because a model may have many
        # layers while a cluster has few kinds of devices.
        for group in self.at_places:
            costs = group.costs or self.costs
            key = id(costs), group.slowness
            if key not in cache:
                slower = tuple(map(LayerCost.slower, costs.layers, group.slowness))
                cache[key] = slower or costs.layers  # an empty slowness makes no layer slower
            every.append(cache[key])
        return every

    @property
    def unlimited(self) -> "Problem":
        """The same problem without limits, so that everything may be kept."""
        return replace(self, memory_limit_bytes=None, host_limit_bytes=None)

    def in_order(self, order: Sequence[int]) -> "Problem":
        """Returns the problem with its groups in another order: place p gets group `order[p]`."""
        return replace(self, groups=tuple(self.groups[at] for at in order))

    def told_apart(
        self,
        slowness: Sequence[Slowness],
        limits: Sequence[int],
        names: Sequence[str] = (),
        numbers: Sequence[int] = (),
    ) -> "Problem":
        """Returns the problem with one device at each place, where devices may differ.

        Args:
            slowness: for each device, its `Group.slowness`.
            limits: the bytes that each device may hold; empty: no limit.
            names: the kind of each device, for messages; empty: no names.
            numbers: the number of each device outside of the problem; empty: 0, 1, 2, ...

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
    slowness: Sequence[Slowness],
    limits: Sequence[int],
    names: Sequence[str] = (),
    numbers: Sequence[int] = (),
) -> tuple[int | None, tuple[Group, ...]]:
    """Makes one group for each device; `less_bytes` is relative to the roomiest device's limit.

    Args:
        slowness: for each device, its `Group.slowness`.
        limits: the bytes that each device may hold; empty: no limit.
        names: the kind of each device, for messages; empty: no names.
        numbers: the number of each device outside of the problem; empty: 0, 1, 2, ...

    Returns:
        The limit of the roomiest device, and the groups. If all devices are alike, there are no
        groups, and `names` and `numbers` are lost.
    """
    limit = max(limits, default=None)
    groups = tuple(
        Group(
            devices=(numbers[at] if numbers else at,),
            slowness=slower,
            less_bytes=0 if limit is None else limit - limits[at],
            name=names[at] if names else "",
        )
        for at, slower in enumerate(slowness)
    )
    # Devices that are all alike need no groups, and planning is faster without groups.
    are_alike = len({group.kind for group in groups}) == 1 and not groups[0].slowness
    return limit, () if are_alike else groups


Entry = TypeVar("Entry")


def with_entry(
    row: tuple[Entry, ...],
    at: int,
    entry: Entry,
) -> tuple[Entry, ...]:
    """Returns a copy of a tuple with one entry replaced, such as a bound or a choice.

    Args:
        row: the tuple.
        at: the index of the entry.
        entry: the new entry.

    >>> with_entry((0, 2, 4), 1, 3)
    (0, 3, 4)
    """
    return (*row[:at], entry, *row[at + 1 :])


@dataclass(frozen=True)
class Decision:
    """The answer to a problem: the layers of each stage, and a choice for each layer.

    Stage s holds layers `bounds[s]` to `bounds[s + 1] - 1`. A choice gives the fates of the values
    that the layer's forward leaves for its backward. `choices[layer]` is an index into the layer's
    options on the devices of its stage, or `RECOMPUTE`, or `RECOMPUTE_CHAIN`. Choice 0 keeps
    everything.
    """

    bounds: Bounds
    choices: tuple[int, ...]

    @staticmethod
    def keeping_all(bounds: Sequence[int]) -> "Decision":
        """Makes the decision with these bounds that keeps everything."""
        return Decision(tuple(bounds), (0,) * bounds[-1])

    def plan(
        self,
        problem: Problem,
        planner: str,
        where: Sequence[Devices] | None = None,
    ) -> Plan:
        """Converts the decision to a plan.

        Args:
            problem: the problem that the decision answers.
            planner: the name of the planner that made the decision.
            where: the devices of each stage; None: those of the problem.
        """
        ids = problem.costs.ids or tuple(range(self.bounds[-1]))
        where = where or problem.where
        stages = []
        for s, (i, j) in enumerate(pairwise(self.bounds)):
            costs = problem.costs_of(s)
            fates = dict[str, Fate]()
            for layer in range(i, j):
                fates.update(self._fates(costs, layer))
            stages.append(Stage(ids[i:j], where[s], fates))
        return Plan(tuple(stages), problem.schedule.name, planner)

    def _fates(self, costs: Costs, layer: int) -> Mapping[str, Fate]:
        """Returns the fates of a layer's values, by name; `costs` are those of its stage."""
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


Decide = Callable[[Problem], Decision]
"""A planner as a function."""
