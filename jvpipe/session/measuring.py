"""A plan is asked for: what planners want to know of a traced model and of the devices is measured."""

import json
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from jvpipe._jax import Device, is_own
from jvpipe.cost.archive import Archive
from jvpipe.cost.costs import Costs
from jvpipe.cost.hardware import INFINITE, Cluster, Link
from jvpipe.cost.lending import measured_lending
from jvpipe.cost.links import Links, links_between
from jvpipe.cost.local_costs import LocalCosts
from jvpipe.cost.measure import Runs, measured_costs
from jvpipe.cost.model import Work, costs_of
from jvpipe.cost.presets import accelerator_like, accelerator_of
from jvpipe.cost.state_away import with_state_away
from jvpipe.ir.examples import Examples
from jvpipe.ir.fates import states_away
from jvpipe.ir.plan import Plan
from jvpipe.papers.registry import FateRule, find_planner
from jvpipe.planners.model.pins import Pins
from jvpipe.planners.model.problem import Problem, single_groups
from jvpipe.planners.model.shapes import Shape, Shapes
from jvpipe.planners.user_fates import with_state_fates
from jvpipe.programs.model import forward_program, layer_programs
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.engine.hosts import Hosts
from jvpipe.schedules.auto import AUTO, may_split
from jvpipe.schedules.schedule import Schedule
from jvpipe.trace.graph import Traced
from jvpipe.trace.slices import sliced, taken_apart
from jvpipe.trace.spread import CoupledError
from jvpipe.util.brief import brief
from jvpipe.util.given import is_whole, several
from jvpipe.util.sizes import limits_of_each


@dataclass(frozen=True)
class LimitEffort:
    """How long a plan is sought whose run keeps a memory limit.

    Attributes:
        attempts: how often a planner is asked, each time under a limit that is smaller by as much as
            the run of its answer would be over it.
        counted_times: how many times what a run holds the planner may have counted, at most.
        alike: devices that report at least this share of what the roomiest of them has are taken to
            have the same.
        noticed: by how much longer steps are than with everything kept, from which on a plan is asked
            for whose optimizer state leaves.
    """

    attempts: int = 5
    counted_times: float = 1.2
    alike: float = 0.98
    noticed: float = 0.01


LIMITS = LimitEffort()


_SPEEDS = "such as [2.0, 1.0] for a device twice as fast as the other"


def checked_speeds(name: str, speeds: Any) -> tuple[float, ...]:
    """How fast each device is beside the others; none if nobody says.

    >>> checked_speeds("speeds", np.array([2, 1]))
    (2.0, 1.0)
    >>> checked_speeds("speeds", [2, 0])
    Traceback (most recent call last):
    ValueError: speeds [2, 0]: each must be a number above 0, such as [2.0, 1.0] for a device twice as fast as the other
    """
    given: list[Any] = (
        [speeds] if isinstance(speeds, str | Mapping | Set) else several(speeds) or [speeds]
    )
    numbers = all(
        (is_whole(x) or isinstance(x, float | np.floating)) and 0 < x < math.inf for x in given
    )
    if not numbers:
        raise ValueError(f"{name} {brief(speeds)}: each must be a number above 0, {_SPEEDS}")
    return tuple(float(x) for x in given)


def check_speeds(speeds: tuple[float, ...], devices: int) -> None:
    """Raises ValueError unless there is a speed for each device, or none."""
    if speeds and len(speeds) != devices:
        raise ValueError(
            f"{len(speeds)} speeds for {devices} devices: give one for each, {_SPEEDS}"
        )


def given_slowness(
    speeds: Sequence[float], first: int, device: int, layers: int
) -> tuple[float, ...]:
    """How many times longer a device takes for each layer than the first one; nothing if as long.

    Args:
        speeds: of all devices; none: they are alike.
        first: the device that layers are measured on.
        device: in question.
        layers: how many there are.

    >>> given_slowness([2.0, 1.0], 0, 1, 3), given_slowness([2.0, 1.0], 0, 0, 3)
    ((2.0, 2.0, 2.0), ())
    """
    alike = not speeds or speeds[first] == speeds[device]
    return () if alike else (speeds[first] / speeds[device],) * layers


def measured_slowness(
    devices: Sequence[Device], measured_on: Callable[[Device], Costs], costs: Costs
) -> list[tuple[float, ...]]:
    """How many times longer each device takes for each layer than the first one: layers are timed once per kind.

    Args:
        devices: in question. What another process has is judged by its products per second.
        measured_on: times layers on a device.
        costs: as the first one takes.
    """
    first_s = [layer.forward_s + layer.backward_s for layer in costs.layers]
    known: dict[str, tuple[float, ...]] = {_kind(devices[0]): ()}
    for device in devices:
        if _kind(device) in known:
            continue
        if is_own(device):
            other_s = (layer.forward_s + layer.backward_s for layer in measured_on(device).layers)
            known[_kind(device)] = tuple(
                b / a if a else 1.0 for a, b in zip(first_s, other_s, strict=True)
            )
        else:
            rates = [
                accelerator_like(_kind(x), x.platform).products_per_s("float32")
                for x in (devices[0], device)
            ]
            known[_kind(device)] = (rates[0] / rates[1],) * len(first_s)
    return [known[_kind(device)] for device in devices]


def _kind(device: Device) -> str:
    return getattr(device, "device_kind", "")


def device_limits(
    given: int | tuple[int, ...] | None,
    devices: Sequence[Device],
    planned: int,
    hosts: Hosts | None,
) -> tuple[int, ...]:
    """What each device may hold: as given, else as it reports; none if it does not (CPUs).

    Args:
        given: one limit for all devices, or one for each that is planned for. Others may hold as much as the least.
        devices: that there are.
        planned: so many of them, the first ones.
        hosts: the processes of the run, if there are several.

    Raises:
        ValueError: there are more or fewer limits than devices.
    """
    if given is None or hosts is not None:  # all tell, for one of them may be given no limit
        reported = reported_limits(devices, hosts)
        if given is None:
            return reported
    if isinstance(given, int) or len(given) == len(devices):
        return limits_of_each(given, len(devices))
    each = limits_of_each(given, planned)
    return (*each, *(min(each),) * (len(devices) - len(each)))


def reported_limits(devices: Sequence[Device], hosts: Hosts | None = None) -> tuple[int, ...]:
    """The memory that each device of all processes reports, those that have nearly the same alike."""
    told_by = {device.id: _reported(device) for device in devices if is_own(device)}
    limits = {at: limit for at, limit in told_by.items() if limit is not None}
    if hosts is not None:
        told = hosts.exchange("devices' memory", json.dumps(list(limits.items())).encode())
        limits = {at: limit for process in told for at, limit in json.loads(process)}
    if not limits:
        return ()
    each = [limits.get(device.id, min(limits.values())) for device in devices]
    return tuple(min(other for other in each if other >= LIMITS.alike * limit) for limit in each)


def _reported(device: Device) -> int | None:
    return (device.memory_stats() or {}).get("bytes_limit")


# A plan is asked for: what planners want to know of a traced model and of the devices is measured.


@dataclass(frozen=True)
class Request:
    """A request for a plan; `places[s]` is the device of stage s, `groups[p]` all devices of place p if some have more.

    `limits` are what each device may hold (none: there is no limit), `speeds` how fast each is beside the others (none:
    what is measured tells). Unlike devices get stages in another order if that is better, unless they are `fixed`.
    `state_fates` are the user's, by patterns of paths.
    """

    planner: str
    stages: int
    schedule: Schedule
    microbatches: int
    places: tuple[int, ...]
    limits: tuple[int, ...] = ()
    host_limit_bytes: int | None = None
    speeds: tuple[float, ...] = ()
    fixed: bool = False
    groups: tuple[tuple[int, ...], ...] = ()
    state_fates: Mapping[str, str] = field(default_factory=dict)

    @property
    def chooses(self) -> bool:
        """True if fates are to be chosen: by a planner that does, under a limit."""
        return bool(self.limits) and find_planner(self.planner).fate_rule is FateRule.CHOOSES

    @property
    def asks_fates(self) -> bool:
        """True if it matters what layers take that do not keep everything: it is chosen, or all is computed again."""
        return self.chooses or find_planner(self.planner).fate_rule is FateRule.RECOMPUTES

    @property
    def splits(self) -> bool:
        """True if the schedule runs backwards in two halves, or may come to."""
        return may_split(self.schedule, self.stages // self.schedule.chunks, self.microbatches)


@dataclass(frozen=True)
class Measurement:
    """What is measured for a request: bytes always; seconds and links between devices if the planner asks for them.

    Fates and links to the host are, if it chooses fates.

    Args:
        request: what is wanted of a plan.
        traced: the model.
        optimizer: in pieces.
        store: where programs are compiled.
        devices: there are; layers are measured on that of the first stage.
        runs: what was measured of programs before and is not measured again; the others are added.
        room_bytes: that the device has for a program; what needs more is not run.
        archive: where seconds are found that earlier processes have measured, and others are kept.
        between_hosts: the link from the devices of one process to those of another, if there are several.
    """

    request: Request
    traced: Traced
    optimizer: OptimizerCut
    store: ProgramStore
    devices: Sequence[Device]
    runs: Runs | None = None
    room_bytes: int | None = None
    archive: Archive | None = None
    between_hosts: Link | None = None

    @property
    def asks_seconds(self) -> bool:
        """Whether the planner looks at seconds."""
        return find_planner(self.request.planner).asks_seconds

    @cached_property
    def used(self) -> list[int]:
        """The numbers of the devices that are planned for, that of the first stage first."""
        if self.request.groups:
            return list(range(len(self.devices)))
        return list(dict.fromkeys(self.request.places))

    @property
    def first(self) -> Device:
        """The device on which layers are measured."""
        return self.devices[self.used[0]]

    @cached_property
    def costs(self) -> Costs:
        """The costs of a whole micro-batch."""
        return self.costs_of(self.traced)

    def costs_of(self, traced: Traced) -> Costs:
        """The costs of the model, or of slices of it, with the optimizer's state where the user wants it."""
        costs = self._costs_of(traced)
        if not self.request.state_fates:
            return costs
        whole = Plan.from_cuts([len(traced.graph.layers)])
        plan = with_state_fates(traced.graph, whole, self.request.state_fates)
        return with_state_away(costs, self.optimizer, states_away(traced.graph, plan))

    def _costs_of(self, traced: Traced) -> Costs:
        request = self.request
        if not self.asks_seconds:
            signatures = [programs.signature for programs in layer_programs(self.store, traced)]
            works = [Work(0.0, 0.0)] * len(signatures)
            counted = signatures, works, None, self.optimizer, request.microbatches
            return costs_of(traced.graph, *counted)
        return measured_costs(
            traced,
            self.first,
            self.store,
            self.optimizer,
            request.microbatches,
            fates=request.asks_fates,
            split=request.splits,
            known=self.runs,
            **self._timed,
        )

    @property
    def _timed(self) -> dict[str, Any]:
        return {"room_bytes": self.room_bytes, "archive": self.archive}

    @cached_property
    def links(self) -> Links | None:
        """The links of the first device to another one, and to its host; None if nobody asks for them."""
        others = [self.devices[d] for d in self.used[1:] if is_own(self.devices[d])]
        wanted = self.asks_seconds and (others or self.request.chooses)
        return (
            links_between(self.first, others[0] if others else None, self.archive)
            if wanted
            else None
        )

    @cached_property
    def slowness(self) -> list[tuple[float, ...]]:
        """How many times longer each device takes for each layer than the first one, in the order of `used`."""
        request, layers = self.request, len(self.costs.layers)
        if request.speeds or not self.asks_seconds:
            first = self.used[0]
            return [given_slowness(request.speeds, first, d, layers) for d in self.used]
        costs_of = partial(
            measured_costs, self.traced, store=self.store, fates=False, **self._timed
        )
        return measured_slowness([self.devices[d] for d in self.used], costs_of, self.costs)

    def problem(self) -> Problem:
        """The problem that a planner is asked.

        Raises:
            CoupledError: stages have several devices, and the loss cannot be computed on slices.
        """
        request = self.request
        if request.groups and request.schedule.synchronous and self.asks_seconds:
            examples = self.traced.graph.examples
            shares = {-(-examples // len(group)) for group in request.groups} - {examples}
            return self.shapes(self._on_slices(shares)).problem(Shape(request.groups, examples))
        plain = self._plain(request.stages)
        numbers = request.places[: plain.devices]
        of = dict(zip(self.used, self.slowness, strict=True))
        limits = [request.limits[d] for d in numbers if request.limits]
        names = [str(self.devices[d]) for d in numbers]
        return plain.told_apart([of.get(d, ()) for d in numbers], limits, names, numbers)

    def _plain(self, stages: int) -> Problem:
        """The problem of devices that are alike."""
        request, links = self.request, self.links
        chooses = links is not None and request.chooses
        return Problem(
            self.costs,
            stages,
            request.schedule,
            request.microbatches,
            host_limit_bytes=request.host_limit_bytes,
            host=links.host if links and chooses else INFINITE,
            peer=self.between_hosts or (links.send if links else INFINITE),
            peer_uses_host=bool(links and chooses and links.send_uses_host),
            lent=self._lent(),
            overlaps=True,
        )

    def _lent(self) -> float:
        """Measures by the longest forward what idle devices lend, where an order of tasks is to be found."""
        devices, layers = [self.devices[d] for d in self.used], self.costs.layers
        if self.request.schedule != AUTO or not all(map(is_own, devices)):
            return 0.0
        longest = max(range(len(layers)), key=lambda at: layers[at].forward_s)
        programs = layer_programs(self.store, self.traced)[longest]
        program = forward_program(programs, recompute=True)
        return measured_lending(self.store, program, devices, self.archive)

    def shapes(self, local: LocalCosts, pins: Pins | None = None) -> Shapes:
        """The shapes of the model on all devices.

        Args:
            local: what it takes on slices.
            pins: what is given of them.
        """
        request, examples = self.request, self.traced.graph.examples
        limit, apart = single_groups(self.slowness, request.limits, list(map(str, self.devices)))
        alike = len({group.kind for group in apart}) == 1 and not apart[0].slowness
        model = replace(self._plain(request.schedule.chunks), memory_limit_bytes=limit)
        return Shapes(
            model,
            local,
            self.cluster(),
            len(self.devices),
            request.microbatches * examples,
            pins or Pins(size=examples),
            () if alike else apart,
        )

    def cluster(self) -> Cluster:
        """The devices of each process as a machine, with what is measured of the links in this one and between them."""
        first, links = next(filter(is_own, self.devices)), self.links
        device, peer = accelerator_of(first), links.send if links else INFINITE
        if self.between_hosts is None:
            return Cluster("here", device, len(self.devices), peer=peer)
        each = per_machine([device.process_index for device in self.devices])
        machines = -(-len(self.devices) // each)
        return Cluster("here", device, each, machines, peer=peer, network=self.between_hosts)

    def slices(self) -> tuple[LocalCosts, int]:
        """The costs on a whole micro-batch and on slices of it, and the fewest examples that a slice has.

        Raises:
            CoupledError: the loss cannot be computed on slices.
        """
        examples = self.traced.graph.examples
        least = self._least_slice(examples)
        return self._on_slices(slice_sizes(examples, len(self.devices), least)), least

    def _on_slices(self, sizes: Sequence[int] | set[int]) -> LocalCosts:
        """The costs on a whole micro-batch, and on slices of so many examples."""
        costs = {self.traced.graph.examples: self.costs}
        for b in sizes:
            apart = taken_apart(self.traced, [b])
            costs[b] = self.costs_of(sliced(self.traced, Examples(0, b), apart))
        return LocalCosts.of(costs.__getitem__, sorted(costs))

    def _least_slice(self, examples: int) -> int:
        """The fewest examples that a slice has; CoupledError if there are none."""
        if examples < 2:
            raise CoupledError("a micro-batch has one example, use fewer micro-batches")
        try:
            sliced(self.traced, Examples(0, 1), taken_apart(self.traced, [1]))
        except CoupledError:
            if examples < 4:
                raise
            sliced(self.traced, Examples(0, 2), taken_apart(self.traced, [2]))
            return 2
        return 1


def per_machine(processes: Sequence[int]) -> int:
    """The devices that each process but the last has, if they stand together; else 1, as if each were by itself.

    Args:
        processes: that of each device.

    >>> per_machine([0, 0, 1, 1]), per_machine([0, 0, 1]), per_machine([0, 1, 0]), per_machine([0, 1, 1])
    (2, 2, 1, 1)
    """
    known = list(dict.fromkeys(processes))
    each = processes.count(known[0])
    together = [known.index(p) for p in processes] == [i // each for i in range(len(processes))]
    return each if together else 1


def slice_sizes(examples: int, devices: int, least: int) -> tuple[int, ...]:
    """The sizes of slices that layers are measured on: the smallest there can be, and a half if that is far from it.

    Args:
        examples: of a micro-batch.
        devices: that there are.
        least: the fewest examples that a slice can have.

    >>> slice_sizes(16, 2, 1), slice_sizes(16, 8, 1), slice_sizes(4, 8, 2)
    ((8,), (8, 2), (2,))
    """
    smallest = max(least, examples // devices)
    half = examples // 2
    return tuple(dict.fromkeys((half, smallest) if half > 2 * smallest else (smallest,)))
