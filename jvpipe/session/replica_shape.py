"""How many devices each stage of a pipeline is to have: layers are measured on slices, and the planner asked.

Where stages cannot have several devices, or none should, each has one and cuts and fates are planned as ever.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from jvpipe._jax import is_own
from jvpipe.cost.archive import Archive
from jvpipe.cost.costs import Costs
from jvpipe.cost.hardware import INFINITE, Cluster, Link
from jvpipe.cost.links import links_between
from jvpipe.cost.measure import Runs, measured_costs
from jvpipe.cost.presets import accelerator_of
from jvpipe.ir.examples import Examples
from jvpipe.ir.plan import Plan
from jvpipe.papers.replicas import ask_replicas
from jvpipe.planners.model.infeasible import Infeasible
from jvpipe.planners.model.pins import Pins
from jvpipe.planners.model.replicas_costs import local_costs
from jvpipe.planners.model.replicas_problem import ReplicaProblem
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.store import ProgramStore
from jvpipe.report.replica_answers import reasons, summary
from jvpipe.runtime.replicas import check_replicable
from jvpipe.session.replica_question import as_plan
from jvpipe.session.settings import Settings
from jvpipe.trace.graph import Traced
from jvpipe.trace.slices import Apart, sliced, taken_apart
from jvpipe.trace.spread import CoupledError

_ATTEMPTS = 4


@dataclass(frozen=True)
class Shape:
    """A plan whose stages have several devices, or how many stages of one device each there are; and why, in lines."""

    stages: int
    why: tuple[str, ...]
    plan: Plan | None = None


@dataclass(frozen=True)
class ShapeSearch:
    """What it takes to find the shape of a traced model.

    Args:
        settings: what the user asked for; `stages` is their number if that is given.
        traced: the model, on a whole micro-batch.
        optimizer: in pieces.
        store: where programs are compiled.
        runs: seconds of programs that are known; what is measured is added.
        room_bytes: that a device has for a program that is timed.
        archive: where earlier processes kept what they measured.
        between_hosts: the link from one process to another, if there are several.
    """

    settings: Settings
    traced: Traced
    optimizer: OptimizerCut
    store: ProgramStore
    runs: Runs
    room_bytes: int | None
    archive: Archive
    between_hosts: Link | None = None

    def find(self, held_bytes_of: Callable[[Plan], Sequence[int]]) -> Shape:
        """Finds the shape of the fastest simulated step under the limit.

        Args:
            held_bytes_of: what the fullest device of each stage of a plan holds, by the lowered lists.
        """
        if refused := self._refused():
            return self.one_each(refused)
        try:
            problem = self._problem()
        except CoupledError as coupled:
            return self.one_each(str(coupled))
        limit = problem.memory_limit_bytes
        for _ in range(_ATTEMPTS):
            try:
                answer = ask_replicas(self.settings.planner, problem)
            except Infeasible:
                break
            best, why = answer.best, (summary(problem, answer), *reasons(problem, answer))
            if (name := self.settings.schedule.name) != "1f1b":
                why = (f"how stages share devices is planned for 1f1b, and runs under {name}", *why)
            if max(best.plan.replicas) == 1:
                return Shape(best.plan.stages, why)
            plan = replace(
                as_plan(self.traced.graph, best, answer.planner),
                schedule=self.settings.schedule.name,
            )
            try:
                held = max(held_bytes_of(plan))
            except ValueError as unlike:  # a layer leaves other things on slices than on the whole
                return self.one_each(str(unlike))
            if limit is None or held <= limit:
                return Shape(best.plan.stages, why, plan)
            assert problem.memory_limit_bytes is not None
            problem = replace(
                problem, memory_limit_bytes=max(1, problem.memory_limit_bytes - (held - limit))
            )
        return self.one_each(
            f"no plan with replicas was found that keeps the limit of {limit} bytes"
        )

    def one_each(self, why: str) -> Shape:
        """As many stages as are asked for, or as there can be, of one device each.

        Args:
            why: they have no more.
        """
        settings, layers = self.settings, len(self.traced.graph.layers)
        most = max(1, min(len(settings.devices), layers // settings.schedule.chunks))
        return Shape(
            most if settings.stages is None else _number(settings.stages),
            (f"each stage has one device: {why}",),
        )

    def _refused(self) -> str | None:
        """Why stages cannot have several devices, whatever the loss is."""
        settings = self.settings
        try:
            check_replicable(settings.schedule)
        except ValueError as cannot:
            return str(cannot)
        if not settings.schedule.synchronous:
            return f"under {settings.schedule.name} they are not planned yet"
        if len(settings.devices) < 2:
            return "there are no more"
        if (
            len({device.device_kind for device in settings.devices}) > 1
            or len(set(settings.limits)) > 1
        ):
            return "devices are not alike, for which replicas are not planned yet"
        return None

    def _problem(self) -> ReplicaProblem:
        """What the planner is asked; CoupledError if the loss cannot be computed on slices."""
        settings, examples = self.settings, self.traced.graph.examples
        costs, least = self._costs(examples)
        cluster = self._cluster()
        stages = None if settings.stages is None else _number(settings.stages)
        return ReplicaProblem(
            local_costs(costs.__getitem__, sorted(costs)),
            cluster,
            len(settings.devices),
            settings.microbatches * examples,
            min(settings.limits, default=None),
            pins=Pins(stages, size=examples, least_slice=least),
        )

    def _cluster(self) -> Cluster:
        """The devices of each process as a machine, with what is measured of the links in this one and between them."""
        devices, network = self.settings.devices, self.between_hosts
        first, *others = (device for device in devices if is_own(device))
        peer = links_between(first, others[0], self.archive).send if others else INFINITE
        if network is None:
            return Cluster("here", accelerator_of(first), len(devices), peer=peer)
        each = per_machine([device.process_index for device in devices])
        return Cluster(
            "here",
            accelerator_of(first),
            each,
            -(-len(devices) // each),
            peer=peer,
            network=network,
        )

    def _costs(self, examples: int) -> tuple[Mapping[int, Costs], int]:
        """What layers take on a whole micro-batch and on slices of it, and the fewest examples that a slice has."""
        apart, least = self._apart(examples)
        costs = {examples: self._measured(self.traced)}
        for b in slice_sizes(examples, len(self.settings.devices), least):
            costs[b] = self._measured(sliced(self.traced, Examples(0, b), apart))
        return costs, least

    def _apart(self, examples: int) -> tuple[Apart, int]:
        """What is known of the loss on slices, and the fewest examples that one has; CoupledError if there is none."""
        if examples < 2:
            raise CoupledError("a micro-batch has one example, use fewer micro-batches")
        for least in (1, 2):
            try:
                apart = taken_apart(self.traced, [least])
                sliced(self.traced, Examples(0, least), apart)
            except CoupledError:
                if 2 * least >= examples or least == 2:
                    raise
            else:
                return apart, least
        raise AssertionError("slices of two examples can be had, or not")

    def _measured(self, traced: Traced) -> Costs:
        settings = self.settings
        return measured_costs(
            traced,
            next(filter(is_own, settings.devices)),
            self.store,
            self.optimizer,
            settings.microbatches,
            fates=False,
            known=self.runs,
            room_bytes=self.room_bytes,
            archive=self.archive,
        )


def per_machine(processes: Sequence[int]) -> int:
    """The devices that each process but the last has, if they stand together; else 1, as if each were by itself.

    Args:
        processes: that of each device.

    >>> per_machine([0, 0, 1, 1]), per_machine([0, 0, 1]), per_machine([0, 1, 0]), per_machine([0, 1, 1])
    (2, 2, 1, 1)
    """
    known = list(dict.fromkeys(processes))
    each = processes.count(known[0])
    return (
        each
        if [known.index(p) for p in processes] == [i // each for i in range(len(processes))]
        else 1
    )


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


def _number(stages: int | Plan) -> int:
    assert isinstance(stages, int)
    return stages
