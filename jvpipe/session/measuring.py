"""Measurements of a traced model and of devices for planners: seconds, bytes and links."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from jvpipe.cost.archive import Archive
from jvpipe.cost.costs import Costs
from jvpipe.cost.hardware import INFINITE, Cluster, Link
from jvpipe.cost.lending import devices_per_core, measured_lending
from jvpipe.cost.links import Links, links_between
from jvpipe.cost.local_costs import LocalCosts
from jvpipe.cost.measure import Runs, measured_costs
from jvpipe.cost.model_costs import Work, costs_of
from jvpipe.cost.presets import accelerator_of
from jvpipe.cost.slowness import Slowness, given_slowness, measured_slowness
from jvpipe.cost.state_away import with_state_away
from jvpipe.ir.examples import Examples
from jvpipe.ir.fates import states_away
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.papers.registry import find_planner
from jvpipe.planners.model.pins import Pins
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.shapes import Shape, Shapes
from jvpipe.planners.user_fates import with_state_fates
from jvpipe.programs.model_programs import forward_program, layer_programs
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.engine.replicas import check_replicable
from jvpipe.schedules.auto import AUTO, may_split
from jvpipe.session.planning import ChosenShape, HeldBytes, decide_shape
from jvpipe.session.settings import Settings
from jvpipe.trace.coupled import CoupledError
from jvpipe.trace.graph import Traced
from jvpipe.trace.jaxprs import every
from jvpipe.trace.slices import sliced, taken_apart
from jvpipe.util.devices import Device, first_of, is_own


def costs_with_state(
    costs: Costs, graph: LayerGraph, optimizer: OptimizerCut, state_fates: Mapping[str, str]
) -> Costs:
    """Returns the costs of layers with the optimizer's state where the user puts it.

    Args:
        costs: the costs if all state lies on the devices.
        graph: the layers.
        optimizer: the optimizer, cut for these layers.
        state_fates: the user's fates, keep or swap, by patterns of parameters.
    """
    if not state_fates:
        return costs
    # The fates of state do not depend on the cuts, so a plan of one stage has them for all layers.
    plan = with_state_fates(graph, Plan.from_cuts([len(graph.layers)]), state_fates)
    return with_state_away(costs, optimizer, states_away(graph, plan))


@dataclass(frozen=True)
class Bench:
    """The tools for timing programs, and the measurements so far.

    Args:
        store: compiles programs.
        runs: the measurements of programs in this process; new measurements are added.
        room_bytes: the memory that a timed program may take; programs that need more are not run.
        archive: the measurements on disk, of earlier processes and of this one.
        between_hosts: the link from the devices of one process to those of another, if
            there are several processes.
    """

    store: ProgramStore
    runs: Runs
    room_bytes: int | None
    archive: Archive
    between_hosts: Link | None = None


@dataclass(frozen=True)
class Measurement:
    """The measurements for a plan, each of which is made when it is first read.

    Bytes are always counted. Layers and links between devices are timed if the planner uses
    seconds. Recomputation is timed if the planner also chooses fates, or recomputes all values.

    Args:
        settings: what the user asked for.
        stages: the number of stages of the plan.
        places: the device of each stage; layers are measured on the first stage's device.
        traced: the model.
        optimizer: the optimizer, cut into pieces for the layers.
        bench: times programs.
    """

    settings: Settings
    stages: int
    places: tuple[int, ...]
    traced: Traced
    optimizer: OptimizerCut
    bench: Bench

    @cached_property
    def devices(self) -> list[Device]:
        """The devices of the run; a mesh is replaced by its first device, timed on whole arrays."""
        return list(map(first_of, self.settings.devices))

    @property
    def asks_seconds(self) -> bool:
        """Whether the planner uses seconds."""
        return find_planner(self.settings.planner).asks_seconds

    @cached_property
    def used(self) -> list[int]:
        """The numbers of the devices that the plan may use, beginning with the first stage's."""
        if self.settings.replicas:
            return list(range(len(self.devices)))
        return list(dict.fromkeys(self.places))

    @property
    def _used_devices(self) -> list[Device]:
        return [self.devices[d] for d in self.used]

    @property
    def first(self) -> Device:
        """The device on which layers are measured."""
        return self.devices[self.used[0]]

    @cached_property
    def costs(self) -> Costs:
        """The costs of a whole micro-batch."""
        return self.costs_of(self.traced)

    def costs_of(self, traced: Traced) -> Costs:
        """Returns the costs of the model, traced at a micro-batch or at a slice of one.

        A slice is the part of a micro-batch that one replica processes. The optimizer's state
        counts on the device or the host, as the user puts it.

        Raises:
            ValueError: layers have to be measured, and the loss calls `jax.shard_map`.
        """
        settings, store, optimizer = self.settings, self.bench.store, self.optimizer
        schedule, microbatches = settings.schedule, settings.microbatches
        if self.asks_seconds:
            if any(eqn.primitive.name == "shard_map" for eqn in every(traced.loss.eqns)):
                raise ValueError(
                    f"planner {settings.planner!r} measures layers on one device, which "
                    "jax.shard_map does not allow: give planner='even', or a plan as stages="
                )
            costs = measured_costs(
                traced,
                self.first,
                store,
                optimizer,
                microbatches,
                fates=settings.asks_fates,
                split=may_split(schedule, self.stages // schedule.chunks, microbatches),
                earlier=self.bench.runs,
                **self._timed,
            )
        else:
            signatures = [programs.signature for programs in layer_programs(store, traced)]
            # Bytes follow from shapes, so nothing is compiled or run.
            works = [Work(0.0, 0.0)] * len(signatures)
            costs = costs_of(traced.graph, signatures, works, None, optimizer, microbatches)
        return costs_with_state(costs, traced.graph, optimizer, settings.state_fates)

    @property
    def _timed(self) -> dict[str, Any]:
        return {
            "room_bytes": self.bench.room_bytes,
            "archive": self.bench.archive,
            "devices_per_core": devices_per_core(self._used_devices),
        }

    @cached_property
    def links(self) -> Links | None:
        """The first device's links to another one and to its host; None if they are not needed."""
        other = next(filter(is_own, self._used_devices[1:]), None)
        if not self.asks_seconds or not (other or self.settings.chooses_fates):
            return None
        return links_between(self.first, other, self.bench.archive)

    @cached_property
    def slowness(self) -> list[Slowness]:
        """For each device of `used`, the ratio of its seconds to the first device's, by layer."""
        speeds, layers = self.settings.speeds, len(self.costs.layers)
        if speeds or not self.asks_seconds:
            return [given_slowness(speeds, self.used[0], d, layers) for d in self.used]
        store = self.bench.store
        costs_of = partial(measured_costs, self.traced, store=store, fates=False, **self._timed)
        return measured_slowness(self._used_devices, costs_of, self.costs)

    def problem(self) -> Problem:
        """Returns the problem for a planner.

        Raises:
            CoupledError: stages have several devices, and the loss cannot be computed on slices.
        """
        settings, groups = self.settings, self.settings.replicas
        if groups and settings.schedule.synchronous and self.asks_seconds:
            examples = self.traced.graph.examples
            # A stage of r devices works on slices of ceil(examples / r).
            shares = {-(-examples // len(group)) for group in groups} - {examples}
            return self.shapes(self._on_slices(shares)).problem(Shape(groups, examples))
        plain = self._plain(self.stages)
        numbers = self.places[: plain.devices]
        of = dict(zip(self.used, self.slowness, strict=True))
        limits = [settings.limits[d] for d in numbers if settings.limits]
        names = [str(self.devices[d]) for d in numbers]
        return plain.told_apart([of.get(d, ()) for d in numbers], limits, names, numbers)

    def _plain(self, stages: int) -> Problem:
        """Returns the problem in which all devices equal the first device."""
        settings, links = self.settings, self.links
        # The link to the host is used only if the planner may swap values.
        to_host = links if settings.chooses_fates else None
        return Problem(
            self.costs,
            stages,
            settings.schedule,
            settings.microbatches,
            host_limit_bytes=settings.host_limit_bytes,
            host=to_host.host if to_host else INFINITE,
            peer=self.bench.between_hosts or (links.send if links else INFINITE),
            peer_uses_host=bool(to_host and to_host.send_uses_host),
            lent=self._lent(),
            overlaps=True,
        )

    def _lent(self) -> float:
        """Measures how much of an idle CPU device's time other devices of this process use.

        Only the search for an order of tasks needs this share. Without a search, 0 is returned.
        """
        devices, layers = self._used_devices, self.costs.layers
        if self.settings.schedule != AUTO or not all(map(is_own, devices)):
            return 0.0
        # The longest forward is measured, because a short one spends most time on its dispatch.
        longest = max(range(len(layers)), key=lambda at: layers[at].forward_s)
        programs = layer_programs(self.bench.store, self.traced)[longest]
        program = forward_program(programs, recompute=True)
        return measured_lending(self.bench.store, program, devices, self.bench.archive)

    def shapes(self, local: LocalCosts, pins: Pins | None = None) -> Shapes:
        """Returns the shapes (which devices each stage has) that a planner may choose from.

        Args:
            local: the costs of the model on slices of a micro-batch.
            pins: the given parts of a shape; None gives only a micro-batch's number of examples.
        """
        settings, examples = self.settings, self.traced.graph.examples
        shapes = Shapes(
            self._plain(settings.schedule.chunks),
            local,
            self.cluster(),
            len(self.devices),
            settings.microbatches * examples,
            pins or Pins(size=examples),
        )
        return shapes.told_apart(self.slowness, settings.limits, list(map(str, self.devices)))

    def cluster(self) -> Cluster:
        """Describes the processes as machines, with the measured links inside and between them."""
        devices, links, network = self.devices, self.links, self.bench.between_hosts
        first, peer = next(filter(is_own, devices)), links.send if links else INFINITE
        count = len(devices)
        if network is not None:
            count = per_machine([device.process_index for device in devices])
        # The number of machines is rounded up, because the last machine may have fewer devices.
        machines = -(-len(devices) // count)
        return Cluster(
            "here",
            accelerator_of(first),
            count,
            machines,
            peer=peer,
            network=network or INFINITE,
        )

    def slices(self) -> tuple[LocalCosts, int]:
        """Returns the costs on a micro-batch and on slices, and the fewest examples of a slice.

        Raises:
            CoupledError: the loss cannot be computed on slices.
        """
        examples = self.traced.graph.examples
        least = self._least_slice(examples)
        return self._on_slices(slice_sizes(examples, len(self.devices), least)), least

    def _on_slices(self, sizes: Sequence[int] | set[int]) -> LocalCosts:
        """Returns the costs on a micro-batch, and on slices with these numbers of examples."""
        smaller = {b: self.costs_of(self._slice(b)) for b in sizes}
        return LocalCosts.of({self.traced.graph.examples: self.costs} | smaller)

    def _least_slice(self, examples: int) -> int:
        """Returns the fewest examples of a slice; raises CoupledError if slices are impossible."""
        if examples < 2:
            raise CoupledError("a micro-batch has one example, use fewer micro-batches")
        try:
            self._slice(1)
        except CoupledError:
            if examples < 4:
                raise
            self._slice(2)
            return 2
        return 1

    def _slice(self, examples: int) -> Traced:
        return sliced(self.traced, Examples(0, examples), taken_apart(self.traced, [examples]))


def per_machine(processes: Sequence[int]) -> int:
    """Counts the devices per machine, where each process is a machine; 1 if machines are not alike.

    Machines are alike if the devices of each process are consecutive, and each process has
    equally many. Only the last process may have fewer.

    Args:
        processes: the process of each device.

    >>> per_machine([0, 0, 1, 1]), per_machine([0, 0, 1]), per_machine([0, 1, 0]), per_machine([0, 1, 1])
    (2, 2, 1, 1)
    """
    distinct = list(dict.fromkeys(processes))
    count = processes.count(distinct[0])
    # If machines are equal, the p-th block of `count` devices belongs to the p-th process.
    blocks = [i // count for i in range(len(processes))]
    return count if list(map(distinct.index, processes)) == blocks else 1


def slice_sizes(examples: int, devices: int, least: int) -> tuple[int, ...]:
    """Chooses the sizes of slices to measure.

    One size is the smallest slice that a replica can get. The other size is half a micro-batch, if
    half is more than twice the smallest size.

    Args:
        examples: the number of examples of a micro-batch.
        devices: how many devices there are.
        least: the fewest examples that a slice can have.

    >>> slice_sizes(16, 2, 1), slice_sizes(16, 8, 1), slice_sizes(4, 8, 2)
    ((8,), (8, 2), (2,))
    """
    smallest = max(least, examples // devices)
    half = examples // 2
    return (half, smallest) if half > 2 * smallest else (smallest,)


# The functions below choose the shape (the devices of each stage) after timing layers on slices.


def find_shape(measurement: Measurement, held_bytes_of: HeldBytes) -> ChosenShape:
    """Finds the shape whose simulated step is fastest under the limit.

    Args:
        measurement: measures the model and has the user's settings.
        held_bytes_of: returns the bytes of each stage's fullest device, from the lowered rows.
    """
    shape = _shape(measurement, held_bytes_of)
    if isinstance(shape, ChosenShape):
        return shape
    # Each stage has one device. If the user gives no number of stages, it is the most that devices
    # and layers allow.
    settings, layers = measurement.settings, len(measurement.traced.graph.layers)
    places = settings.stages
    if not isinstance(places, int):
        places = max(1, min(len(measurement.devices), layers // settings.schedule.chunks))
    return ChosenShape(places, (f"each stage has one device: {shape}",))


def _shape(measurement: Measurement, held_bytes_of: HeldBytes) -> ChosenShape | str:
    """Returns the shape as `find_shape` does, or why stages cannot have several devices."""
    settings, schedule = measurement.settings, measurement.settings.schedule
    try:
        check_replicable(schedule)
    except ValueError as cannot:
        return str(cannot)
    if not schedule.synchronous:
        return f"under {schedule.name} they are not planned yet"
    if len(measurement.devices) < 2:
        return "there are no more"
    try:
        local, least = measurement.slices()
    except CoupledError as coupled:
        return str(coupled)
    stages = settings.stages if isinstance(settings.stages, int) else None
    # The model was traced for this size of a micro-batch, so the size is fixed.
    pins = Pins(stages, size=measurement.traced.graph.examples, least_slice=least)
    return decide_shape(settings.planner, measurement.shapes(local, pins), held_bytes_of)
