"""What is asked of a planner about a model whose shapes alone are known, on hardware that is not here."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jvpipe.cost.costs import Costs
from jvpipe.cost.estimate import estimate
from jvpipe.cost.hardware import INFINITE, Accelerator, Cluster, Link
from jvpipe.cost.local_costs import LocalCosts
from jvpipe.cost.said import Said
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.papers.registry import shape_planners
from jvpipe.planners.model.pins import Pins
from jvpipe.planners.model.problem import Problem
from jvpipe.planners.model.shapes import Shapes
from jvpipe.planners.user_fates import with_state_fates
from jvpipe.programs.optimizer import OptimizerCut
from jvpipe.programs.store import ProgramStore, shared_store
from jvpipe.runtime.engine.compiled_plan import CompiledPlan
from jvpipe.runtime.engine.replicas import check_replicable
from jvpipe.schedules.auto import may_split
from jvpipe.schedules.schedule import Schedule
from jvpipe.session.arguments import micro_batch_shapes
from jvpipe.session.measuring import costs_with_state, slowness_by_kind, times_longer
from jvpipe.session.planning import Slowness, work_s
from jvpipe.session.settings import OptimizerCutter, Training
from jvpipe.trace.graph import Traced
from jvpipe.trace.layer_split import split_as_planned
from jvpipe.trace.leaves import is_initialiser
from jvpipe.trace.model import Model, trace_model
from jvpipe.trace.reshaped import OtherLayersError
from jvpipe.util.sizes import MOST_BYTES, MOST_S, limits_of_each

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Question(Training):
    """A model, how many devices pass a micro-batch on, and how; nothing of it is allocated.

    `params`, `batch` and `model_state` are arrays or shapes; `params` may be a function `key ->
    params`. `said` is what the compiler of the hardware has said of programs, `models` remembers
    what was traced, if the question is put again and again.
    """

    params: Tree
    batch: Tree
    stages: int
    model_state: Tree = None
    said: Said = field(default_factory=dict, repr=False, compare=False)
    models: dict[tuple[int, int | None], Model] | None = field(
        default=None, repr=False, compare=False
    )
    _cutters: dict[tuple[int, int], OptimizerCutter] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self.schedule.check(self.stages, self.microbatches)
        self.schedule.warn_of_idle(self.stages, self.microbatches)

    def trace(self, examples: int | None = None, present: Traced | None = None) -> Model:
        """Traces the model at the shapes of a micro-batch.

        Args:
            examples: of a micro-batch, if not as many as there are in one.
            present: the model with other examples, whose layers it is to have; None: it is cut by
                itself.
        """
        asked = self.microbatches, examples
        if present is None and self.models and asked in self.models:
            return self.models[asked]
        micro_batch = micro_batch_shapes(self.batch, self.microbatches)
        if examples is not None:
            resized = lambda x: jax.ShapeDtypeStruct((examples, *x.shape[1:]), x.dtype)  # noqa: E731
            micro_batch = jax.tree.map(resized, micro_batch)
        # Shapes do not depend on the key.
        key = jax.random.key(0)
        params = jax.eval_shape(self.params, key) if is_initialiser(self.params) else self.params
        model = trace_model(
            self.loss_fn,
            params,
            micro_batch,
            key,
            self.model_state,
            present,
            has_aux=self.has_aux,
            has_state=self.has_state,
        )
        model = replace(model, traced=self._cutter(model).freeze(model.traced))
        if present is None and self.models is not None:
            self.models[asked] = model
        return model

    def _cutter(self, model: Model) -> OptimizerCutter:
        """Finds what has traced the optimizer of a model, and does so once."""
        key = self.microbatches, id(model.params)
        if key not in self._cutters:
            self._cutters[key] = OptimizerCutter.of(self, model)
        return self._cutters[key]

    def cut(self, model: Model, traced: Traced) -> OptimizerCut:
        """Cuts the optimizer of a model for the layers of a trace."""
        return self._cutter(model).pieces(traced.graph, self.schedule)

    def costs(
        self, cluster: Cluster, traced: Traced | None = None, optimizer: OptimizerCut | None = None
    ) -> Costs:
        """Estimates the costs on the first device of a cluster.

        Args:
            cluster: on whose first device.
            traced: the model, if it is traced already.
            optimizer: then its optimizer, cut for that trace.
        """
        if traced is None:
            model = self.trace()
            traced, optimizer = model.traced, self.cut(model, model.traced)
        split = may_split(self.schedule, self.stages, self.microbatches)
        said = self.said
        costs = estimate(traced, cluster, optimizer, self.microbatches, split=split, said=said)
        if optimizer is None:
            return costs
        return costs_with_state(costs, traced.graph, optimizer, self.state_fates)

    def with_state_fates(self, traced: Traced, plan: Plan) -> Plan:
        """Puts the optimizer's state where it is wanted."""
        return with_state_fates(traced.graph, plan, self.state_fates)

    def slowness(
        self, cluster: Cluster, traced: Traced, costs: Costs, devices: int
    ) -> list[Slowness]:
        """Tells how many times longer each device takes for each layer than the first; nothing if as long.

        Args:
            cluster: has the devices.
            traced: the model.
            costs: on the first of them.
            devices: so many of them are used.
        """

        def longer(device: Accelerator) -> Slowness:
            alike = replace(cluster, device=device, unlike=())
            return times_longer(costs, estimate(traced, alike, fates=False))

        used = cluster.accelerators[:devices]
        return slowness_by_kind(used, str, longer)

    def held_bytes(self, plan: Plan) -> list[int]:
        """Returns the most that each device would hold in a run of a plan, compiled for the device at hand."""
        return [peak.bytes for peak in self.compiled(plan, shared_store()).peaks[:-1]]

    def compiled(self, plan: Plan, store: ProgramStore) -> CompiledPlan:
        """Compiles a plan as a run of it would; the first device at hand stands for all.

        Args:
            plan: one of this model, with as many micro-batches.
            store: compiles its programs.
        """
        model = self.trace()
        traced = split_as_planned(model.traced, plan.splits)
        devices = (jax.devices()[0],) * plan.device_count
        optimizer = self.cut(model, traced)
        return CompiledPlan(
            traced, plan, self.schedule, optimizer, self.microbatches, devices, store
        )

    def problem(
        self, cluster: Cluster, memory_limit: int | tuple[int, ...] | None = None
    ) -> Problem:
        """Makes the problem that a planner is asked.

        Args:
            cluster: of whose devices the first ones are used.
            memory_limit: for all, or for each; what the devices have unless given.
        """
        check_devices(self.stages, cluster)
        limits = limits_of_each(memory_limit, self.stages)
        model = self.trace()
        return self.problem_of(cluster, limits, model.traced, self.cut(model, model.traced))

    def problem_of(
        self, cluster: Cluster, limits: tuple[int, ...], traced: Traced, optimizer: OptimizerCut
    ) -> Problem:
        """Makes the problem of a trace of the model.

        Args:
            cluster: has the devices.
            limits: what each may hold; none: what it has.
            traced: the model.
            optimizer: in pieces.
        """
        costs, used = self.costs(cluster, traced, optimizer), cluster.accelerators[: self.stages]
        limits = limits or tuple(device.memory_bytes for device in used)
        stages = self.schedule.stages_on(self.stages)
        plain = on_cluster(Problem(costs, stages, self.schedule, self.microbatches), cluster)
        slowness = self.slowness(cluster, traced, costs, self.stages)
        return plain.told_apart(slowness, limits, [device.name for device in used])

    def shapes(
        self,
        cluster: Cluster,
        devices: int,
        pins: Pins,
        memory_limit: int | tuple[int, ...] | None = None,
    ) -> tuple[Shapes, LayerGraph]:
        """Describes the shapes that a planner may choose from.

        Also returns the layers of the model.

        Args:
            cluster: whose first devices are used.
            devices: how many.
            pins: what is given of a shape.
            memory_limit: for all, or for each; what the devices have unless given.
        """
        used = cluster.accelerators[:devices]
        limits = limits_of_each(memory_limit, devices) or tuple(x.memory_bytes for x in used)
        batch = jax.tree.leaves(self.batch)[0].shape[0]
        largest = pins.size or batch
        whole = self.trace(largest)
        optimizer = self.cut(whole, whole.traced)
        costs = {largest: self.costs(cluster, whole.traced, optimizer)}
        operations = [eqn.primitive for eqn in whole.traced.loss.eqns]
        for b in smaller(largest, devices):
            if 1 in costs:
                break
            # A loss of other layers or operations at this size has no replicas with so few
            # examples.
            with suppress(OtherLayersError):
                traced = self.trace(b, whole.traced).traced
                if [eqn.primitive for eqn in traced.loss.eqns] == operations:
                    costs[b] = self.costs(cluster, traced, optimizer)
        plain = Problem(costs[largest], self.schedule.chunks, self.schedule, 1, overlaps=True)
        model = on_cluster(plain, cluster)
        # What goes from machine to machine does not use the links to the hosts.
        model = replace(model, peer_uses_host=model.peer_uses_host and cluster.machines == 1)
        local = LocalCosts.of(costs.__getitem__, sorted(costs))
        # A single example may be another program, without its batch axis.
        pins = replace(pins, least_slice=1 if 1 in costs else 2)
        shapes = Shapes(model, local, cluster, devices, batch, pins)
        slowness = self.slowness(cluster, whole.traced, costs[largest], devices)
        return shapes.told_apart(slowness, limits, [x.name for x in used]), whole.traced.graph


def on_cluster(problem: Problem, cluster: Cluster) -> Problem:
    """Gives a problem the links of a cluster; stages on several machines are joined by the slower link."""
    check_devices(problem.devices, cluster)
    # Stages take devices machine by machine.
    within = problem.devices <= cluster.devices_per_machine
    peer: Link = cluster.peer if within else cluster.network
    return replace(
        problem,
        host=cluster.host,
        peer=peer,
        peer_uses_host=cluster.peer_uses_host and peer is not INFINITE,
        host_limit_bytes=cluster.host_memory_bytes,
        cluster=cluster,
    )


def profile_slowness(cluster: Cluster | None, devices: int, layers: int) -> list[Slowness]:
    """Tells how many times longer devices take than a profile says, which is one of the cluster's first device.

    Args:
        cluster: of whose devices the products per second are compared; None: they are alike.
        devices: how many are used.
        layers: of the profile.
    """
    if cluster is None:
        return [()] * devices
    check_devices(devices, cluster)
    rates = [device.products_per_s("float32") for device in cluster.accelerators[:devices]]
    return [() if rate == rates[0] else (rates[0] / rate,) * layers for rate in rates]


def given_pins(
    question: Question,
    cluster: Cluster,
    devices: int | None = None,
    *,
    stages: int | None = None,
    replicas: tuple[int, ...] | str | None = None,
    cuts: tuple[int, ...] | None = None,
    microbatches: int | None = None,
) -> tuple[int, Pins]:
    """Checks what is given of a shape.

    Args:
        question: has the model and a whole batch.
        cluster: has the devices.
        devices: how many there are; as many as `replicas` take, or all of the cluster's, unless
            given.
        stages: as all that follows, None if it is to be decided.
        replicas: devices of each stage; "auto" is None.
        cuts: layers of each stage.
        microbatches: in a step.

    Returns:
        How many devices there are, and what is given.

    Raises:
        ValueError: for what no plan has, with the values and the cure.
    """
    counts = replicas if isinstance(replicas, tuple) else None
    there = devices or (sum(counts) if counts else cluster.devices)
    if there > cluster.devices:
        raise ValueError(
            f"{there} devices: {cluster.name} has {cluster.devices}, use fewer devices or a cluster of more machines"
        )
    if stages is not None and stages > there:
        raise ValueError(
            f"{stages} stages on {there} devices: each stage needs one, use at most {there} stages or at least "
            f"{stages} devices"
        )
    schedule = question.schedule
    if cuts is not None and schedule.chunks > 1:
        raise ValueError(
            f"cuts {':'.join(map(str, cuts))} with {schedule.name}, which runs {schedule.chunks} stages per device: "
            "leave cuts out, or use a schedule of one stage per device"
        )
    size = None
    if microbatches is not None:
        shapes = micro_batch_shapes(question.batch, microbatches)
        size = jax.tree.leaves(shapes)[0].shape[0]
    return there, Pins(stages, counts, cuts, size)


def check_shape_planner(planners: Sequence[str], schedule: Schedule) -> None:
    """Raises ValueError for planners that give each stage one device, and schedules that run no replicas."""
    names = shape_planners()
    if others := [name for name in planners if name not in names]:
        raise ValueError(
            f"planner '{others[0]}' gives each stage one device: replicas are planned by {', '.join(names)}; "
            "name one of these, or leave out devices and replicas"
        )
    if len(planners) > 1:
        raise ValueError(
            f"planners {', '.join(planners)}: replicas are planned by one at a time, name one"
        )
    check_replicable(schedule)
    if not schedule.synchronous:
        raise ValueError(
            f"replicas are planned for synchronous schedules, not for '{schedule.name}': use '1f1b', 'zb-h1' or "
            "another of these, or leave out devices and replicas"
        )


def smaller(examples: int, devices: int) -> tuple[int, ...]:
    """Chooses the local batches at which layers are looked at beside the whole micro-batch.

    They are a replica's share, the least, and what is the least where one example is another
    program.

    Args:
        examples: of a micro-batch.
        devices: that there are.

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


def check_sums(problem: Problem) -> None:
    """Raises ValueError for seconds and bytes of which the planners cannot make sums."""
    layers, m, in_flight = problem.costs.layers, problem.microbatches, max(problem.in_flight)
    crossing = [edge.bytes for edge in problem.costs.edges]
    kept = [layer.options[0].kept_bytes for layer in layers]
    sums = {
        "the layers compute": m * sum(work_s(layers)),
        "links between stages are busy": 2 * m * sum(map(problem.peer.seconds, crossing)),
        "links to the host are busy": 2 * m * sum(map(problem.host.seconds, kept)),
    }
    for what, seconds in sums.items():
        # Written so that NaN, which is in no order, is refused too.
        if not seconds <= MOST_S:
            raise ValueError(
                f"{what} for {seconds:.3g} s in {m} micro-batches, at most {MOST_S:.0g} s can be planned: "
                "correct the times of the layers, or what the links carry and how fast"
            )
    versions = max(problem.schedule.versions(s, problem.stages) for s in range(problem.stages))
    once = sum(x.gradient_bytes + x.optimizer_bytes + x.temporary_bytes for x in layers)
    weights = versions * sum(layer.parameter_bytes for layer in layers)
    inputs = sum(layer.input_bytes for layer in layers)
    # What one device for all layers holds if it keeps everything: none holds more under any plan.
    held_bytes = weights + once + in_flight * (inputs + sum(kept) + sum(crossing))
    if held_bytes > MOST_BYTES:
        raise ValueError(
            f"the model takes {held_bytes} bytes with {in_flight} micro-batches in flight, at most {MOST_BYTES} can be "
            "planned: correct the sizes, or use smaller micro-batches"
        )
