"""A model's shapes and its pipeline, from which problems for absent hardware are made."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import jax

from jvpipe.cost.costs import Costs
from jvpipe.cost.estimate import estimate
from jvpipe.cost.hardware import INFINITE, Accelerator, Cluster
from jvpipe.cost.local_costs import LocalCosts
from jvpipe.cost.reported_temporaries import Said
from jvpipe.cost.slowness import Slowness, given_slowness, slowness_by_kind, times_longer
from jvpipe.ir.plan import Plan
from jvpipe.papers.registry import shape_planners
from jvpipe.planners.model.pins import Pins
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.shapes import Shapes
from jvpipe.planners.state_on_host import away_s, state_bytes
from jvpipe.planners.user_fates import with_state_fates
from jvpipe.programs.optimizer_pieces import OptimizerCut
from jvpipe.programs.store import ProgramStore
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.replicas import check_replicable
from jvpipe.schedules.auto import may_split
from jvpipe.schedules.schedule import Schedule
from jvpipe.session.arguments import Limits
from jvpipe.session.measuring import costs_with_state
from jvpipe.session.settings import OptimizerCutter, Training
from jvpipe.trace.batches import micro_batch_shapes, resized
from jvpipe.trace.graph import Traced
from jvpipe.trace.layer_split import split_as_planned
from jvpipe.trace.leaves import is_initializer
from jvpipe.trace.model import Model, trace_model
from jvpipe.trace.reshaped import OtherLayersError
from jvpipe.util.sizes import limits_of_each

Tree = Any
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Question(Training):
    """A model and its pipeline; no array of the model is allocated.

    Args:
        params: arrays, or shapes, or a function `key -> params`.
        batch: a whole batch, as arrays or shapes.
        stages: the number of devices; each runs one stage, or several under some schedules.
        model_state: arrays or shapes, if the loss has a model state.
        said: the bytes of programs that the hardware's compiler has reported so far.
        remembered: the traces, optimizer cutters and costs so far, shared by copies of the
            question. Copies may differ only in `stages`, `schedule`, `microbatches`, `state_fates`
            and `said`. Keys differ wherever these fields change an entry.
    """

    params: Tree
    batch: Tree
    stages: int
    model_state: Tree = None
    said: Said = field(default_factory=dict, repr=False, compare=False)
    remembered: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.schedule.check(self.stages, self.microbatches)

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the result of `make`, which is called once per key."""
        if key not in self.remembered:
            self.remembered[key] = make()
        return self.remembered[key]

    def trace(self, examples: int | None = None, present: Traced | None = None) -> Model:
        """Traces the model at the shapes of a micro-batch.

        Args:
            examples: how many examples to trace with; None stands for a micro-batch's number.
            present: a trace with another number of examples, from which the cuts into layers are
                taken over; None to find cuts.
        """
        # `present` is a trace that this question keeps, so no other object gets its id.
        key = "trace", self.microbatches, examples, id(present)
        return self._once(key, partial(self._trace, examples, present))

    def _trace(self, examples: int | None, present: Traced | None) -> Model:
        micro_batch = micro_batch_shapes(self.batch, self.microbatches)
        if examples is not None:
            micro_batch = resized(micro_batch, examples)
        # Shapes do not depend on the key, so any key can be used.
        key = jax.random.key(0)
        params = jax.eval_shape(self.params, key) if is_initializer(self.params) else self.params
        model = trace_model(
            self.loss_fn,
            params,
            micro_batch,
            key,
            self.model_state,
            present,
            has_aux=self.has_aux,
            has_state=self.has_state,
            whole_layers=self.whole_layers,
        )
        return replace(model, traced=self._cutter(model).freeze(model.traced))

    def _cutter(self, model: Model) -> OptimizerCutter:
        # The cutter keeps `model.params`, so no other object gets the same id.
        key = "cutter", self.microbatches, id(model.params)
        return self._once(key, lambda: OptimizerCutter(self, model.params, model.stacks))

    def cut(self, model: Model) -> OptimizerCut:
        """Cuts the optimizer of a model into pieces for the model's layers."""
        return self._cutter(model).pieces(model.traced.graph, self.schedule)

    def costs(self, cluster: Cluster, traced: Traced, optimizer: OptimizerCut) -> Costs:
        """Estimates the seconds and bytes of layers on the first device of a cluster.

        Args:
            cluster: the hardware.
            traced: the model.
            optimizer: the optimizer, cut for the model's layers.
        """
        said, device = self.said, cluster.device
        split = may_split(self.schedule, self.stages, self.microbatches)

        def make() -> tuple[Costs, Any]:
            costs = estimate(traced, cluster, optimizer, self.microbatches, split=split, said=said)
            # The entry keeps the objects whose ids the key has, so no other object gets these ids.
            return costs, (traced, said, device)

        # Empty mappings are equal although their ids differ, so all share the key None.
        key = "costs", id(traced), id(said) if said else None, id(device), split
        costs, _ = self._once(key, make)
        return costs_with_state(costs, traced.graph, optimizer, self.state_fates)

    def slowness(
        self, cluster: Cluster, traced: Traced, costs: Costs, devices: int
    ) -> list[Slowness]:
        """Returns each device's seconds per layer, divided by those of the first device.

        The entry of a device that is as fast as the first is empty.

        Args:
            cluster: has the devices.
            traced: the model.
            costs: the costs on the first device.
            devices: how many devices are used, from the first on.
        """

        def longer(device: Accelerator) -> Slowness:
            alike = replace(cluster, device=device, unlike=())
            return times_longer(costs, estimate(traced, alike, fates=False))

        return slowness_by_kind(cluster.accelerators[:devices], str, longer)

    def compiled(self, plan: Plan, store: ProgramStore) -> CompiledPlan:
        """Compiles a plan as a run would; this machine's first device replaces every device.

        Args:
            plan: a plan for this model and its number of micro-batches.
            store: compiles the programs.
        """
        model = self.trace_as(plan.splits)
        return CompiledPlan(
            model.traced,
            plan,
            self.schedule,
            self.cut(model),
            self.microbatches,
            (jax.devices()[0],) * plan.device_count,
            store,
        )

    def trace_as(self, splits: tuple[int, ...]) -> Model:
        """Traces the model at the shapes of a micro-batch, with layers cut in two at `splits`."""

        def make() -> Model:
            model = self.trace()
            return replace(model, traced=split_as_planned(model.traced, splits))

        return self._once(("split", self.microbatches, splits), make)

    def state_bytes(self) -> dict[str, int]:
        """Counts the bytes of optimizer state of each parameter, by the parameter's path."""
        model = self.trace()
        return state_bytes(model.traced.graph, self.cut(model))

    def with_state(
        self, plan: Plan, problem: Problem, splits: tuple[int, ...]
    ) -> tuple[Plan, float]:
        """Gives a plan's optimizer state its fates; also returns the seconds of copies per step.

        Args:
            plan: the plan.
            problem: the problem to which the plan is an answer.
            splits: the places at which the problem has layers cut in two.
        """
        if not self.state_fates:
            return plan, 0.0
        plan = with_state_fates(self.trace_as(splits).traced.graph, plan, self.state_fates)
        return plan, away_s(plan, self.state_bytes(), problem)

    def problem(
        self,
        cluster: Cluster,
        memory_limit: Limits = None,
        splits: tuple[int, ...] = (),
    ) -> Problem:
        """Makes the problem for a planner.

        Args:
            cluster: the hardware; its first devices are used.
            memory_limit: bytes per device, as one number or one for each; by default, all it has.
            splits: the places at which layers are cut in two, as `Plan.splits` has them.
        """
        check_devices(self.stages, cluster)
        limits = limits_on(cluster, memory_limit, self.stages)
        return self.problem_of(cluster, limits, self.trace_as(splits))

    def problem_of(self, cluster: Cluster, limits: tuple[int, ...], model: Model) -> Problem:
        """Makes the problem for a trace of the model.

        Args:
            cluster: the hardware; its first devices are used.
            limits: the bytes that each device may hold.
            model: the model.
        """
        costs = self.costs(cluster, model.traced, self.cut(model))
        stages = self.schedule.stages_on(self.stages)
        plain = on_cluster(Problem(costs, stages, self.schedule, self.microbatches), cluster)
        slowness = self.slowness(cluster, model.traced, costs, self.stages)
        return plain.told_apart(slowness, limits, _names(cluster, self.stages))

    def shapes(
        self,
        cluster: Cluster,
        devices: int,
        pins: Pins,
        memory_limit: Limits = None,
    ) -> Shapes:
        """Returns the shapes that a planner may choose from.

        A shape says which devices each stage has, and how many examples a micro-batch has.

        Args:
            cluster: the hardware; its first devices are used.
            devices: how many devices are used.
            pins: the parts of the shape that the user gives.
            memory_limit: bytes per device, as one number or one for each; by default, all it has.
        """
        limits = limits_on(cluster, memory_limit, devices)
        batch = jax.tree.leaves(self.batch)[0].shape[0]
        largest = pins.size or batch
        whole = self.trace(largest)
        optimizer = self.cut(whole)
        costs = {largest: self.costs(cluster, whole.traced, optimizer)}
        operations = [eqn.primitive for eqn in whole.traced.loss.eqns]
        for b in smaller(largest, devices):
            if 1 in costs:
                break
            # A replica may have `b` examples only if the loss then has the same layers and
            # operations as with a whole micro-batch.
            with suppress(OtherLayersError):
                traced = self.trace(b, whole.traced).traced
                if [eqn.primitive for eqn in traced.loss.eqns] == operations:
                    costs[b] = self.costs(cluster, traced, optimizer)
        plain = Problem(costs[largest], self.schedule.chunks, self.schedule, 1, overlaps=True)
        model = on_cluster(plain, cluster)
        # With several machines, copies between devices are assumed not to use the links to hosts.
        model = replace(model, peer_uses_host=model.peer_uses_host and cluster.machines == 1)
        # For a single example, the loss may have other operations. Slices then have at least two.
        pins = replace(pins, least_slice=1 if 1 in costs else 2)
        shapes = Shapes(model, LocalCosts.of(costs), cluster, devices, batch, pins)
        slowness = self.slowness(cluster, whole.traced, costs[largest], devices)
        return shapes.told_apart(slowness, limits, _names(cluster, devices))


def _names(cluster: Cluster, devices: int) -> list[str]:
    return [device.name for device in cluster.accelerators[:devices]]


def limits_on(cluster: Cluster, limits: Limits, devices: int) -> tuple[int, ...]:
    """Returns the bytes that each of the first devices of a cluster may hold.

    Args:
        cluster: the hardware.
        limits: bytes per device, as one number or one for each; None stands for all it has.
        devices: how many devices are used.
    """
    used = cluster.accelerators[:devices]
    return limits_of_each(limits, devices) or tuple(device.memory_bytes for device in used)


def on_cluster(problem: Problem, cluster: Cluster) -> Problem:
    """Returns a problem with a cluster's links.

    If the devices are on several machines, all links between devices are those of the network.

    Args:
        problem: the problem, with any links.
        cluster: the hardware; its first devices are used.

    Raises:
        ValueError: the cluster has too few devices.
    """
    check_devices(problem.devices, cluster)
    # Stages take all devices of the first machine before any of the next one.
    is_within = problem.devices <= cluster.devices_per_machine
    peer = cluster.peer if is_within else cluster.network
    return replace(
        problem,
        host=cluster.host,
        peer=peer,
        peer_uses_host=cluster.peer_uses_host and peer is not INFINITE,
        host_limit_bytes=cluster.host_memory_bytes,
        cluster=cluster,
    )


def profile_slowness(cluster: Cluster | None, devices: int, layers: int) -> list[Slowness]:
    """Returns each device's seconds per layer, divided by those in a profile.

    The profile is assumed to be of the cluster's first device. The entry of an equally fast device
    is empty.

    Args:
        cluster: the hardware, whose products per second are compared; None means equal devices.
        devices: how many devices are used.
        layers: how many layers the profile has.
    """
    rates = list[float]()
    if cluster is not None:
        check_devices(devices, cluster)
        rates += [device.products_per_s("float32") for device in cluster.accelerators[:devices]]
    return [given_slowness(rates, 0, device, layers) for device in range(devices)]


def given_pins(
    question: Question,
    cluster: Cluster,
    devices: int | None,
    *,
    stages: int | None,
    replicas: tuple[int, ...] | str | None,
    cuts: tuple[int, ...] | None,
    microbatches: int | None,
) -> tuple[int, Pins]:
    """Checks the parts of a shape that the user gives.

    Args:
        question: has the model and a whole batch.
        cluster: has the devices.
        devices: the number of devices; None stands for the sum of `replicas`, or else all devices
            of the cluster.
        stages: the number of stages. Here and below, None lets the planner decide.
        replicas: how many devices each stage has; "auto" also lets the planner decide.
        cuts: how many layers each stage has.
        microbatches: how many micro-batches a step has.

    Returns:
        How many devices there are, and the given parts.

    Raises:
        ValueError: no plan can have these parts; the message has the values and a remedy.
    """
    counts = replicas if isinstance(replicas, tuple) else None
    there = devices or (sum(counts) if counts else cluster.devices)
    if there > cluster.devices:
        raise ValueError(
            f"{there} devices: {cluster.name} has {cluster.devices}, use fewer devices or "
            "a cluster of more machines"
        )
    if stages is not None and stages > there:
        raise ValueError(
            f"{stages} stages on {there} devices: each stage needs one, use at most "
            f"{there} stages or at least {stages} devices"
        )
    schedule = question.schedule
    if cuts is not None and schedule.chunks > 1:
        raise ValueError(
            f"cuts {':'.join(map(str, cuts))} with {schedule.name}, which runs "
            f"{schedule.chunks} stages per device: leave cuts out, or use a schedule of "
            "one stage per device"
        )
    size = None
    if microbatches is not None:
        shapes = micro_batch_shapes(question.batch, microbatches)
        size = jax.tree.leaves(shapes)[0].shape[0]
    return there, Pins(stages, counts, cuts, size)


def check_shape_planner(planners: Sequence[str], schedule: Schedule) -> None:
    """Raises ValueError for planners and schedules that allow only one device per stage."""
    names = shape_planners()
    if others := [name for name in planners if name not in names]:
        raise ValueError(
            f"planner '{others[0]}' gives each stage one device: replicas are planned by "
            f"{', '.join(names)}; name one of these, or leave out devices and replicas"
        )
    if len(planners) > 1:
        raise ValueError(
            f"planners {', '.join(planners)}: replicas are planned by one at a time, name one"
        )
    check_replicable(schedule)
    if not schedule.synchronous:
        raise ValueError(
            f"replicas are planned for synchronous schedules, not for '{schedule.name}': "
            "use '1f1b', 'zb-h1' or another of these, or leave out devices and replicas"
        )


def smaller(examples: int, devices: int) -> tuple[int, ...]:
    """Chooses the numbers of examples at which layers are traced, besides a micro-batch's.

    The first number is each device's examples if all devices are replicas of one stage, but at
    least 2. The others are the fewest that a device can get: 1, or 2 if a single example has other
    operations.

    Args:
        examples: how many a micro-batch has.
        devices: how many devices there are.

    >>> smaller(64, 16), smaller(8, 2), smaller(1, 4)
    ((4, 1, 2), (4, 1, 2), ())
    """
    sizes = dict.fromkeys((max(2, examples // devices), 1, 2))
    return tuple(b for b in sizes if b < examples)


def check_devices(stages: int, cluster: Cluster) -> None:
    """Raises ValueError if there are fewer devices than stages."""
    if stages > cluster.devices:
        raise ValueError(
            f"{stages} stages need as many devices, {cluster.name} has {cluster.devices}: "
            "use fewer stages or a cluster of more machines"
        )
