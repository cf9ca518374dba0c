"""What is asked of the planner of replicated stages about a model whose shapes alone are known."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import jax

from jvpipe.cost.estimate import estimate
from jvpipe.cost.hardware import Cluster
from jvpipe.ir.layers import LayerGraph
from jvpipe.ir.plan import Plan
from jvpipe.ir.sizes import limits_of_each
from jvpipe.papers.replicas import REPLICA_PLANNERS
from jvpipe.planners.model.pins import Pins
from jvpipe.planners.model.replicas_answer import Simulated
from jvpipe.planners.model.replicas_costs import local_costs
from jvpipe.planners.model.replicas_problem import ReplicaProblem
from jvpipe.planners.user_fates import layers_again
from jvpipe.schedules import Schedule
from jvpipe.session.arguments import whole_number, whole_numbers
from jvpipe.session.batches import micro_batch_shapes
from jvpipe.session.question import Question
from jvpipe.trace.graph import Traced
from jvpipe.trace.reshaped import OtherLayersError


@dataclass(frozen=True)
class ReplicaQuestion:
    """A model and how many devices train it; the planner decides what is not pinned."""

    question: Question
    cluster: Cluster
    devices: int
    pins: Pins
    memory_limit: int | tuple[int, ...] | None = None
    planner: str = "jvpipe"

    @property
    def batch(self) -> int:
        """Examples of a step."""
        return jax.tree.leaves(self.question.batch)[0].shape[0]

    @property
    def limit_bytes(self) -> int:
        """What each device may hold."""
        limits = set(limits_of_each(self.memory_limit, self.devices)) or {
            self.cluster.device.memory_bytes
        }
        if len(limits) > 1:
            raise ValueError(
                f"memory limits {sorted(limits)}: replicas are planned for devices that are alike, give one limit"
            )
        return min(limits)

    def problem(self) -> tuple[ReplicaProblem, LayerGraph]:
        """What the planner is asked, and the layers that it is asked about."""
        most = self.pins.size or self.batch
        whole = self.question.trace(most)
        optimizer = self.question.cut(whole, whole.traced)
        costs = {most: estimate(whole.traced, self.cluster, optimizer, fates=False)}
        for b in smaller(most, self.devices):
            if 1 in costs:
                break
            with suppress(OtherLayersError):  # then replicas cannot have so few examples
                traced = self.question.trace(b, whole.traced).traced
                if _operations(traced) == _operations(whole.traced):  # likewise
                    costs[b] = estimate(traced, self.cluster, optimizer, fates=False)
        local = local_costs(costs.__getitem__, sorted(costs))
        pins = replace(self.pins, least_slice=1 if 1 in costs else 2)
        problem = ReplicaProblem(
            local, self.cluster, self.devices, self.batch, self.limit_bytes, pins=pins
        )
        return problem, whole.traced.graph


def replica_question(
    question: Question,
    planners: Sequence[str],
    cluster: Cluster,
    memory_limit: int | tuple[int, ...] | None = None,
    devices: int | None = None,
    *,
    stages: int | None = None,
    replicas: Sequence[int] | str | None = None,
    cuts: Sequence[int] | str | None = None,
    microbatches: int | None = None,
) -> ReplicaQuestion:
    """Checks what is given of a plan.

    Args:
        question: has the model and a whole batch.
        planners: the name of one.
        cluster: has the devices.
        memory_limit: what each may hold; what they have unless given.
        devices: how many there are; as many as `replicas` take, or all of the cluster's, unless given.
        stages: as all that follows, None where it is to be decided.
        replicas: devices of each stage; "auto" is None.
        cuts: layers of each stage.
        microbatches: in a step.

    Raises:
        ValueError: for what no plan has, with the values and the cure.
    """
    check_replica_planner(planners, question.schedule)
    counts = None if replicas in (None, "auto") else whole_numbers("replicas", replicas)
    there = (
        (sum(counts) if counts else cluster.devices)
        if devices is None
        else whole_number("devices", devices)
    )
    if there > cluster.devices:
        raise ValueError(
            f"{there} devices: {cluster.name} has {cluster.devices}, use fewer devices or a cluster of more machines"
        )
    if stages is not None and whole_number("stages", stages) > there:
        raise ValueError(
            f"{stages} stages on {there} devices: each stage needs one, use at most {there} stages or at least "
            f"{stages} devices"
        )
    if cluster.unlike:
        raise ValueError(
            f"{cluster.name} has devices that are not alike, for which replicas are not planned yet: use one device "
            "for each stage, without devices and replicas"
        )
    size = None
    if microbatches is not None:
        shapes = micro_batch_shapes(question.batch, whole_number("microbatches", microbatches))
        size = jax.tree.leaves(shapes)[0].shape[0]
    pins = Pins(stages, counts, None if cuts is None else whole_numbers("cuts", cuts), size)
    return ReplicaQuestion(question, cluster, there, pins, memory_limit, planners[0])


def check_replica_planner(planners: Sequence[str], schedule: Schedule) -> None:
    """Raises ValueError for planners that give each stage one device, and schedules that have no replicas planned."""
    if others := [name for name in planners if name not in REPLICA_PLANNERS]:
        raise ValueError(
            f"planner '{others[0]}' gives each stage one device: replicas are planned by "
            f"{', '.join(REPLICA_PLANNERS)}; name one of these, or leave out devices and replicas"
        )
    if len(planners) > 1:
        raise ValueError(
            f"planners {', '.join(planners)}: replicas are planned by one at a time, name one"
        )
    if schedule.name != "1f1b":
        raise ValueError(
            f"replicas are planned for schedule '1f1b', not for '{schedule.name}': use '1f1b', or leave out devices "
            "and replicas"
        )


def smaller(examples: int, devices: int) -> tuple[int, ...]:
    """The local batches at which layers are looked at beside the whole micro-batch: a replica's share, the least, and
    what is the least where that is another program.

    Args:
        examples: of a micro-batch.
        devices: that there are.

    >>> smaller(64, 16), smaller(8, 2), smaller(1, 4)
    ((4, 1, 2), (4, 1, 2), ())
    """
    sizes = dict.fromkeys((max(2, examples // devices), 1, 2))
    return tuple(b for b in sizes if b < examples)


def as_plan(graph: LayerGraph, best: Simulated, planner: str) -> Plan:
    """A plan of replicated stages as one that runs; stages that do not fit otherwise run their layers again.

    Args:
        graph: the model's layers.
        best: the planner's.
        planner: its name.
    """
    plan = Plan.from_cuts(best.plan.layers, best.plan.places, schedule="1f1b", planner=planner)
    every = zip(plan.stages, best.stages, strict=True)
    fated = (
        replace(x, fates=layers_again(graph, x.layers)) if cost.recompute_s else x
        for x, cost in every
    )
    return replace(plan, stages=tuple(fated))


def _operations(traced: Traced) -> list[str]:
    """What must be alike for a loss to be made of the same layers at two sizes."""
    return [eqn.primitive.name for eqn in traced.loss.eqns]
