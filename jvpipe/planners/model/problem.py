"""What a planner is asked, and what it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jvpipe.cost.costs import Costs
from jvpipe.cost.hardware import INFINITE, Cluster, Link
from jvpipe.ir.plan import Plan, Stage
from jvpipe.schedules.schedule import Schedule

RECOMPUTE = -1
"""The layer's forward runs again before its backward, from its input, which is kept."""
RECOMPUTE_CHAIN = -2
"""The same, but its input is dropped too: the layer before it, run again as well, makes it again."""


@dataclass(frozen=True)
class Problem:
    """A model to be spread over devices, cut into `stages`: so many per device as the schedule has chunks.

    `host`, `peer` are the links of a device to its host and to the next stage's device; `peer_uses_host` says that
    they are one. Limits are per device, and for all devices of a host together; None is no limit.
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
            raise ValueError(f"{self.stages} stages: there can be 1 to {layers}, as many as the model has layers")
        if self.microbatches < 1:
            raise ValueError(f"{self.microbatches} micro-batches: there must be at least one")

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return self.stages // self.schedule.chunks

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

    def plan(self, costs: Costs, schedule: str, planner: str, devices: Sequence[int] | None = None) -> Plan:
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

    def _fates(self, costs: Costs, layer: int) -> Mapping[str, str]:
        choice, options = self.choices[layer], costs.layers[layer].options
        if choice >= 0:
            return options[choice].fates
        fates = dict.fromkeys(options[-1].fates, "recompute")
        if choice == RECOMPUTE_CHAIN:
            fates |= {e.name: "recompute" for e in costs.edges if e.producer == layer - 1 and layer in e.readers}
        return fates
