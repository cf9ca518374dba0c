"""The seconds and bytes of a stage: the one definition that every planner is judged by.

Legend: stage s of S holds layers [i, j), that is, layers i to j - 1. F, B and `extra` are
seconds per micro-batch: of the layers' forwards, of their backwards, and of recomputing.
`link` is the time per micro-batch for which the stage's link to its host is busy. The link
carries what is swapped, out and back. If the problem has `peer_uses_host`, the link also
carries the values and cotangents that cross the stage's bounds.

    seconds   max(F + B + extra, link): the device computes while the link copies
    bytes     see the legend of `stage_bytes.py`
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jvpipe.cost.costs import Costs, LayerCost
from jvpipe.cost.hardware import Link
from jvpipe.ir.kinds import Kind
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Decision, Problem
from jvpipe.planners.model.stage_bytes import (
    StageBytes,
    early_s,
    joint_bytes,
    layers_bytes,
    stage_bytes,
)
from jvpipe.simulate.stages import StageLoad


@dataclass(frozen=True, slots=True)
class StageCost:
    """A stage's seconds, per micro-batch unless a comment says otherwise, and its bytes."""

    forward_s: float
    backward_s: float
    recompute_s: float
    swap_s: float  # of copying swapped residuals to the host and back
    comm_s: float  # of receiving values from earlier stages and returning their cotangents
    link_s: float  # how long the stage's own link to the host is busy
    held: StageBytes
    replicas: int = 1
    halves_s: tuple[float, float] = (0.0, 0.0)  # of the halves I and W, if backwards are split
    reduce_s: float = 0.0  # per step: of the all-reduce that adds up the replicas' gradients
    update_s: float = 0.0  # per update: of the optimizer
    early_s: float = 0.0  # the part of recompute_s that runs before the cotangents arrive

    @property
    def compute_s(self) -> float:
        """The seconds for which the device computes."""
        return self.forward_s + self.backward_s + self.recompute_s

    @property
    def waiting_s(self) -> float:
        """The part of `recompute_s` that runs after the cotangents have arrived."""
        return self.recompute_s - self.early_s

    def load(self, send_s: float = 0.0) -> StageLoad:
        """Describes the stage to the simulator.

        `swap_s` and `comm_s` count both directions, so one direction takes half of each.

        Args:
            send_s: seconds of sending the stage's values on. They are part of the next
                stage's `comm_s`, so the caller has to pass them.
        """
        input_s, weight_s = self.halves_s
        return StageLoad(
            forward_s=self.forward_s,
            backward_s=self.waiting_s + self.backward_s,
            recompute_s=self.early_s,
            out_s=self.swap_s / 2,
            in_s=self.swap_s / 2,
            send_s=send_s,
            return_s=self.comm_s / 2,
            input_s=self.waiting_s + input_s,
            weight_s=weight_s,
            reduce_s=self.reduce_s,
            update_s=self.update_s,
            static_bytes=self.held.static + self.held.beyond,
            kept_bytes=self.held.kept,
            swapped_bytes=self.held.swapped,
            handed_bytes=self.held.handed,
        )

    def task_s(self, kind: Kind) -> float:
        """Counts the seconds of a task, including what is recomputed before the task."""
        match kind:
            case Kind.F:
                return self.forward_s
            case Kind.B:
                return self.recompute_s + self.backward_s
            case Kind.I:
                return self.recompute_s + self.halves_s[0]
            case Kind.W:
                return self.halves_s[1]
            case _:
                raise AssertionError(f"{kind} is in no list at the level of stages")

    @property
    def seconds(self) -> float:
        """The seconds between micro-batches: of the device, or of the link if that is longer."""
        return max(self.compute_s, self.link_s)

    @property
    def in_flight(self) -> int:
        """The most micro-batches between their forward and their backward."""
        return self.held.in_flight

    @property
    def peak_bytes(self) -> int:
        """The most that a device of the stage holds at once."""
        return int(self.held.peak)

    @property
    def host_bytes(self) -> int:
        """The bytes that the host holds for all replicas."""
        return self.replicas * int(self.held.host)


Stages = Sequence[StageCost]


def stage_cost(
    problem: Problem,
    s: int,
    i: int,
    j: int,
    choices: Sequence[int],
) -> StageCost:
    """Counts the seconds per micro-batch and the bytes of stage `s` with layers [i, j).

    Args:
        problem: gives the costs, the schedule, the micro-batches and the links.
        s: the stage's number, from 0.
        i: the stage's first layer.
        j: the layer after the stage's last.
        choices: the choices of all layers of the model, as in `Decision.choices`.
    """
    layers = problem.layers_on(s)[i:j]
    held = stage_bytes(problem, s, i, j, choices)
    costs = problem.costs_of(s)
    group = problem.group(s)
    received, returned, sent = crossing_bytes(problem, i, j)
    halves = [(0.0, 0.0)]
    if problem.splits:
        halves = [halves_s(costs, at, layer) for at, layer in enumerate(layers, i)]
    input_s, weight_s = map(sum, zip(*halves, strict=True))
    swap_s = 2 * problem.host.seconds(held.swapped)
    peer = problem.link_into(s)
    onward = problem.link_out_of(s)
    traffic_s = 0.0
    if problem.peer_uses_host and onward == peer:
        traffic_s = peer.seconds(received + returned + sent)
    elif problem.peer_uses_host:
        traffic_s = peer.seconds(received + returned) + onward.seconds(sent)
    reduces = group.replicas > 1
    return StageCost(
        forward_s=sum(layer.forward_s for layer in layers),
        backward_s=sum(layer.backward_s for layer in layers),
        recompute_s=sum(x.extra_s for x in layers_bytes(layers, choices[i:j])),
        swap_s=swap_s,
        comm_s=peer.seconds(received) + peer.seconds(returned),
        link_s=swap_s + traffic_s,
        held=held,
        replicas=group.replicas,
        halves_s=(input_s, weight_s),
        reduce_s=_reduce_s(group.reduces, layers, problem.overlaps) if reduces else 0.0,
        update_s=_update_s(layers, group.replicas),
        early_s=early_s(layers, choices[i:j]),
    )


def crossing_bytes(
    problem: Problem,
    i: int,
    j: int,
) -> tuple[int, int, int]:
    """Counts the bytes of a micro-batch that cross the bounds of layers [i, j).

    Args:
        problem: gives the edges (tensors between layers).
        i: the first layer.
        j: the layer after the last.

    Returns:
        The bytes of the values received from earlier layers, of the cotangents returned for them,
        and of the values sent to later layers together with the cotangents that come back.
    """
    received = returned = sent = 0
    for edge in problem.costs.edges_at(i, j):
        back = edge.bytes if edge.differentiable else 0
        if edge.producer < i:
            received += edge.bytes
            returned += back
        elif max(edge.readers) >= j:
            sent += edge.bytes + back
    return received, returned, sent


def _reduce_s(
    link: Link,
    layers: Sequence[LayerCost],
    overlaps: bool,
) -> float:
    """Counts the seconds that an all-reduce of gradients adds after the last backward.

    Args:
        link: the all-reduce as a link, as `Group.reduces` has it.
        layers: the layers of a stage.
        overlaps: whether a layer's gradients are reduced as soon as its last backward has ended.
    """
    size = sum(layer.reduced_bytes for layer in layers)
    if not overlaps or not size:
        return link.seconds(size)
    # Backwards run from the last layer to the first. The reduction of a layer begins when
    # the backward of this layer and the reduction of the layer after it have both ended.
    computed_s = reduced_s = 0.0
    for layer in reversed(layers):
        computed_s += layer.backward_s
        reduced_s = max(reduced_s, computed_s) + layer.reduced_bytes / link.bytes_per_s
    return link.latency_s + max(0.0, reduced_s - computed_s)


def _update_s(layers: Sequence[LayerCost], replicas: int) -> float:
    """Counts the least seconds that an update can take on the slowest replica.

    Each layer is updated by one replica for all replicas. So an update takes at least as long as
    the slowest layer's update, and at least an even share of the seconds of all layers.
    """
    layer_s = [layer.update_s for layer in layers]
    return max(*layer_s, sum(layer_s) / replicas)


def once_s(problem: Problem, stage: StageCost) -> float:
    """Counts the seconds per step of a stage's all-reduce and updates."""
    return stage.reduce_s + problem.updates * stage.update_s


def halves_s(
    costs: Costs,
    layer: int,
    cost: LayerCost,
) -> tuple[float, float]:
    """Counts the seconds of the halves I and W of a layer's backward.

    I gives the cotangents of the layer's inputs, and W adds up its gradients. If no earlier
    layer waits for a cotangent, the whole backward is in W. Otherwise, a backward without
    halves is in I.

    Args:
        costs: the costs of the model.
        layer: the layer's number.
        cost: the layer's cost on its device.
    """
    if not costs.gives_cotangent(layer):
        return 0.0, cost.backward_s
    if cost.split is None:
        return cost.backward_s, 0.0
    return cost.split.input_s, cost.split.weight_s


def device_bytes(problem: Problem, stages: Stages) -> tuple[int, ...]:
    """Counts the most bytes that each device holds at once, over all its stages (`joint_bytes`)."""
    schedule = problem.schedule
    if schedule.chunks == 1 and not problem.splits:
        return tuple(stage.peak_bytes for stage in stages)
    mine: list[list[StageBytes]] = [[] for _ in range(problem.devices)]
    for place, stage in zip(problem.places, stages, strict=True):
        mine[place].append(stage.held)
    return tuple(map(joint_bytes, mine, schedule.held(problem.devices, problem.microbatches)))


def needed_bytes(problem: Problem, device_sizes: Sequence[int]) -> list[int]:
    """Lists, for each device, the smallest limit of the problem under which its bytes fit.

    The problem's limit is that of the roomiest device. Other devices have `less_bytes` less.
    """
    pairs = zip(device_sizes, problem.at_places, strict=True)
    return [size + group.less_bytes for size, group in pairs]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The stages that a decision gives, their bytes, and an estimate of the seconds of a step.

    The estimate `step_s` is a closed formula (`surrogate`). Legend: M micro-batches, v stages per
    device. One micro-batch takes t seconds in all stages together, and c in all transfers. T is the
    seconds between two micro-batches on the slowest device or link (`bottleneck_s`).

        asynchronous    M T
        synchronous     t / v + c + (M - 1 / v) T
        two phases      t + c + (M - 1) (slowest forward + slowest backward)

    In two phases, as in GPipe, all forwards run before the first backward. If a link is slower than
    the slowest forward or backward, the link's seconds count instead. Recomputing counts in full,
    although some of it may run while a backward waits for its cotangent. The simulator takes these
    waits into account, and planners ask it before they choose a plan.
    """

    stages: tuple[StageCost, ...]
    step_s: float
    bottleneck_s: float
    device_bytes: tuple[int, ...]
    limit_bytes: int  # the smallest limit of the roomiest device that the decision keeps

    @property
    def peak_bytes(self) -> int:
        """The most bytes on any device."""
        return max(self.device_bytes)


def evaluate_decision(problem: Problem, decision: Decision) -> Evaluation:
    """Counts the seconds and bytes of a decision; seconds per step are those of the surrogate.

    Args:
        problem: the problem that the decision answers.
        decision: has bounds for all stages and a choice for every layer.

    Raises:
        ValueError: the decision does not answer this problem.
    """
    check(problem, decision)
    spans = enumerate(pairwise(decision.bounds))
    stages = [stage_cost(problem, s, i, j, decision.choices) for s, (i, j) in spans]
    return evaluation_of(problem, stages)


def evaluation_of(problem: Problem, stages: Stages) -> Evaluation:
    """Counts the seconds and bytes of a decision from the costs of its stages."""
    device_sizes = device_bytes(problem, stages)
    return Evaluation(
        tuple(stages),
        surrogate(problem, stages),
        slowest_s(problem, stages),
        device_sizes,
        max(needed_bytes(problem, device_sizes)),
    )


def slowest_s(problem: Problem, stages: Stages) -> float:
    """Counts the seconds between two micro-batches on the slowest device or the slowest link.

    A stage with t seconds per micro-batch, and A seconds once per step, is busy for M t + A
    seconds in a step of M micro-batches. So it counts as t + A / M.
    """
    # The stages of one device take turns, so their seconds add up.
    busy_s = [0.0] * problem.devices
    for place, c in zip(problem.places, stages, strict=True):
        busy_s[place] += c.seconds + once_s(problem, c) / problem.microbatches
    return max(*busy_s, *(c.comm_s for c in stages))


def surrogate(problem: Problem, stages: Stages) -> float:
    """Estimates the seconds of a step by a closed formula, so that planners can search quickly.

    The simulator then decides between the plans that they find. The estimate equals the
    simulated seconds if all stages are alike, transfers take no time, backwards are whole, and
    each device has one stage or M is a multiple of the number of devices
    (tests/planners/model/test_stage_cost.py). `Evaluation` has the formula.

    Args:
        problem: gives the schedule, the micro-batches and the places.
        stages: the costs of all stages.
    """
    m = problem.microbatches
    slowest = slowest_s(problem, stages)
    chunks = problem.schedule.chunks
    if not problem.schedule.synchronous:
        return m * slowest
    transfers = sum(c.comm_s for c in stages)
    each_s = [c.seconds + once_s(problem, c) / m for c in stages]
    if problem.phases == 2:
        forward = [c.forward_s for c in stages]
        backward = [t - f for t, f in zip(each_s, forward, strict=True)]
        link_s = max(c.comm_s for c in stages) / 2
        longest_s = max(*forward, link_s) + max(*backward, link_s)
        return sum(forward) + sum(backward) + transfers + (m - 1) * longest_s
    return sum(each_s) / chunks + transfers + (m - 1 / chunks) * slowest


def check(problem: Problem, decision: Decision) -> None:
    """Raises ValueError unless a decision has bounds and choices that the problem allows."""
    bounds, choices = decision.bounds, decision.choices
    layers = len(problem.costs.layers)
    if bounds[0] != 0 or bounds[-1] != layers or any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(f"bounds {bounds} must rise from 0 to the number of layers, {layers}")
    if len(bounds) != problem.stages + 1:
        raise ValueError(f"{len(bounds) - 1} stages were planned, {problem.stages} were asked for")
    if len(choices) != layers:
        raise ValueError(f"{len(choices)} choices for {layers} layers")
    for s, (i, j) in enumerate(pairwise(bounds)):
        for layer, cost in enumerate(problem.costs_of(s).layers[i:j], i):
            choice, options = choices[layer], len(cost.options)
            if not RECOMPUTE_CHAIN <= choice < options:
                raise ValueError(f"layer {layer} has {options} options, option {choice} was chosen")
            if choice == RECOMPUTE_CHAIN and (layer == i or choices[layer - 1] >= 0):
                raise ValueError(
                    f"layer {layer} is run again without its input, "
                    "but the layer before it is not run again"
                )
    for group in problem.together:
        if any(min(group) < bound <= max(group) for bound in bounds[1:-1]):
            raise ValueError(f"layers {group} must share a stage, the bounds are {bounds}")


def valid(problem: Problem, proposals: Iterable[Decision]) -> Iterator[Decision]:
    """Mends the runs of proposed decisions, and yields those that are then valid.

    A run is layers whose forwards run again together. A `RECOMPUTE_CHAIN` continues the run of the
    layer before. If that layer is in another stage or does not run again, the choice becomes
    `RECOMPUTE`, which begins a run.
    """
    for proposal in proposals:
        bounds = proposal.bounds
        mended = list(proposal.choices)
        for layer, choice in enumerate(mended):
            begins_run = layer in bounds or mended[layer - 1] >= 0
            if choice == RECOMPUTE_CHAIN and begins_run:
                mended[layer] = RECOMPUTE
        decision = Decision(bounds, tuple(mended))
        try:
            check(problem, decision)
        except ValueError:
            continue
        yield decision


def keeps_limits(problem: Problem, evaluation: Evaluation) -> bool:
    """Tells whether all devices are within their limits, and swapped bytes within the host's."""
    memory, host = problem.memory_limit_bytes, problem.host_limit_bytes
    if memory is not None and evaluation.limit_bytes > memory:
        return False
    host_bytes = sum(stage.host_bytes for stage in evaluation.stages)
    return host is None or host_bytes <= host
