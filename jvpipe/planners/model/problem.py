"""What a planner is asked, and what it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from jvpipe.cost.costs import Costs, LayerCost
from jvpipe.cost.hardware import INFINITE, Cluster, Link
from jvpipe.ir.plan import Fate, Plan, Stage
from jvpipe.schedules.schedule import Schedule

RECOMPUTE = -1
"""The layer's forward runs again before its backward, from its input, which is kept."""
RECOMPUTE_CHAIN = -2
"""The same, but its input is dropped too: the layer before it, run again as well, makes it again."""


@dataclass(frozen=True)
class Traits:
    """How a device differs from the one that the costs and the limit are of.

    Layer l takes `slowness[l]` times as long on it (none: as long), and it may hold `less_bytes` less than the limit.
    `device` is its number outside of the problem, `name` what people call it.
    """

    device: int
    slowness: tuple[float, ...] = ()
    less_bytes: int = 0
    name: str = ""

    @property
    def mean_slowness(self) -> float:
        """How many times longer layers take on it, on average."""
        return sum(self.slowness) / len(self.slowness) if self.slowness else 1.0

    @property
    def kind(self) -> tuple[tuple[float, ...], int]:
        """What makes it a device like others."""
        return self.slowness, self.less_bytes


@dataclass(frozen=True)
class Problem:
    """A model to be spread over devices, cut into `stages`: so many per device as the schedule has chunks.

    `host`, `peer` are the links of a device to its host and to the next stage's device; `peer_uses_host` says that
    they are one. The memory limit is that of the roomiest device, the host's that of all devices together; None is no
    limit. `traits` tell unlike devices apart, in the order in which a micro-batch passes them; none: all are alike.
    `lent` is the share of an idle device's time that the others use: with it an order of tasks is judged by less than
    its idle time.
    A plan that needs more than its devices may hold is over the limit by the same number on each: a limit that is
    raised, is raised for all.
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
    traits: tuple[Traits, ...] = ()
    lent: float = 0.0

    def __post_init__(self) -> None:
        layers, chunks = len(self.costs.layers), self.schedule.chunks
        if self.stages % chunks:
            raise ValueError(
                f"{self.stages} stages: {self.schedule.name} has {chunks} per device, so that there must be a multiple "
                f"of {chunks}"
            )
        if chunks > 1:
            self.schedule.check_layers(self.devices, layers)
        if not 1 <= self.stages <= layers:
            raise ValueError(
                f"{self.stages} stages: there can be 1 to {layers}, as many as the model has layers"
            )
        if self.microbatches < 1:
            raise ValueError(f"{self.microbatches} micro-batches: there must be at least one")
        assert len(self.traits) in (0, self.devices), "all devices have traits, or none"

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return self.stages // self.schedule.chunks

    @property
    def phases(self) -> int:
        """How often a step waits for its slowest stage: see `Schedule.phases`."""
        return self.schedule.phases(self.devices, self.microbatches)

    @property
    def together(self) -> tuple[tuple[int, ...], ...]:
        """The groups of layers that must share a stage."""
        return (*self.costs.together, *(self.costs.carried if self.schedule.chunks > 1 else ()))

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches between their forward and their backward, on each stage."""
        return self.schedule.in_flight(self.devices, self.microbatches)

    @property
    def splits(self) -> bool:
        """Whether backwards run in two halves."""
        return self.schedule.splits(self.devices, self.microbatches)

    @property
    def places(self) -> tuple[int, ...]:
        """The device of each stage."""
        return tuple(self.schedule.device_of(s, self.devices) for s in range(self.stages))

    @property
    def where(self) -> tuple[int, ...]:
        """The device of each stage, by its number outside."""
        return (
            tuple(self.traits[place].device for place in self.places)
            if self.traits
            else self.places
        )

    def name_of(self, s: int) -> str:
        """Names the device of a stage."""
        device = self.where[s]
        name = next((each.name for each in self.traits if each.device == device), "")
        return f"device {device}" + (f" ({name})" if name else "")

    def slowness(self, s: int) -> tuple[float, ...]:
        """How many times longer the device of a stage takes for each layer; none if for none."""
        return self.traits[self.schedule.device_of(s, self.devices)].slowness if self.traits else ()

    def less_bytes(self, s: int) -> int:
        """By how much less than the limit the device of a stage may hold."""
        return (
            self.traits[self.schedule.device_of(s, self.devices)].less_bytes if self.traits else 0
        )

    def limit_of(self, device: int) -> int | None:
        """What the device at a place of the pipeline may hold."""
        limit = self.memory_limit_bytes
        return limit if limit is None or not self.traits else limit - self.traits[device].less_bytes

    @property
    def limits(self) -> tuple[int, ...]:
        """What each device may hold, in the order of their numbers outside; none if there is no limit."""
        numbers = [each.device for each in self.traits] or range(self.devices)
        each = {number: self.limit_of(place) for place, number in enumerate(numbers)}
        return tuple(limit for number in sorted(each) if (limit := each[number]) is not None)

    def layers_on(self, s: int) -> tuple[LayerCost, ...]:
        """The layers of the model, as the device of a stage takes them."""
        return self._layers_on[self.slowness(s)] if self.traits else self.costs.layers

    @cached_property
    def _layers_on(self) -> dict[tuple[float, ...], tuple[LayerCost, ...]]:
        """The layers on devices of each slowness."""
        layers, every = self.costs.layers, {traits.slowness for traits in self.traits}
        slower = {
            x: tuple(layer.slower(by) for layer, by in zip(layers, x, strict=True))
            for x in every
            if x
        }
        return {(): layers, **slower}

    def in_order(self, order: Sequence[int]) -> "Problem":
        """The problem with its devices in another order along the pipeline."""
        return replace(self, traits=tuple(self.traits[at] for at in order))

    def told_apart(
        self,
        slowness: Sequence[tuple[float, ...]],
        limits: Sequence[int],
        names: Sequence[str] = (),
        numbers: Sequence[int] = (),
    ) -> "Problem":
        """The problem of devices that may be unlike.

        Args:
            slowness: of each device, as `Traits` has it.
            limits: what each may hold; none: there is no limit.
            names: of each, for people.
            numbers: of each outside, if not 0, 1, 2, ...

        >>> from jvpipe.cost.costs import Option
        >>> from jvpipe.schedules import find_schedule
        >>> problem = Problem(Costs((LayerCost("block", 1.0, 2.0, (Option(0),)),) * 4), 2, find_schedule("1f1b"), 4)
        >>> apart = problem.told_apart([(), (2.0,) * 4], [24, 11])
        >>> apart.memory_limit_bytes, apart.limit_of(1), apart.layers_on(1)[0].forward_s
        (24, 11, 2.0)
        """
        limit = max(limits, default=None)
        less = [limit - x for x in limits] if limit is not None else [0] * len(slowness)
        called, at = names or [""] * len(slowness), numbers or range(len(slowness))
        traits = tuple(Traits(*each) for each in zip(at, slowness, less, called, strict=True))
        alike = len({each.kind for each in traits}) == 1 and not traits[0].slowness
        return replace(self, memory_limit_bytes=limit, traits=() if alike else traits)


@dataclass(frozen=True)
class Decision:
    """Where layers go and how what they leave is treated.

    Stage s holds layers `bounds[s]` to `bounds[s + 1]`; `choices[layer]` is an index into the layer's options, or
    `RECOMPUTE` or `RECOMPUTE_CHAIN`. `replicas[s]` devices hold stage s (empty: one each).
    """

    bounds: tuple[int, ...]
    choices: tuple[int, ...]
    replicas: tuple[int, ...] = ()

    @staticmethod
    def keeping_all(bounds: Sequence[int], replicas: Sequence[int] = ()) -> "Decision":
        """These cuts, everything kept."""
        return Decision(tuple(bounds), (0,) * bounds[-1], tuple(replicas))

    def plan(
        self, costs: Costs, schedule: str, planner: str, devices: Sequence[int] | None = None
    ) -> Plan:
        """The decision as a plan; stage s runs on `devices[s]`.

        Args:
            costs: those that it was made for.
            schedule: the name of its schedule.
            planner: the name of whoever decided.
            devices: of each stage; None: stage s is on device s.
        """
        layer_ids = costs.ids or tuple(range(len(costs.layers)))
        stages = []
        for s, (i, j) in enumerate(pairwise(self.bounds)):
            where = (s,) if devices is None else (devices[s],)
            fates = {k: v for layer in range(i, j) for k, v in self._fates(costs, layer).items()}
            stages.append(Stage(layer_ids[i:j], where, fates))
        return Plan(tuple(stages), schedule, planner)

    def _fates(self, costs: Costs, layer: int) -> Mapping[str, Fate]:
        choice, options = self.choices[layer], costs.layers[layer].options
        if choice >= 0:
            return options[choice].fates
        fates = dict.fromkeys(options[-1].fates, Fate.RECOMPUTE)
        if choice == RECOMPUTE_CHAIN:
            fates |= {
                e.name: Fate.RECOMPUTE
                for e in costs.edges
                if e.producer == layer - 1 and layer in e.readers
            }
        return fates
