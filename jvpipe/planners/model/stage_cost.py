"""What a stage takes, in seconds and bytes: the one definition that every planner is judged by.

Legend: stage s of S holds layers [i, j). Traffic is what crosses the stage's bounds, both ways, per
micro-batch.

    seconds   max(F + B + extra, seconds of its link)
              its link has the swaps, out and in, and the traffic where both share one
    bytes     as the legend of `stage_bytes.py` says
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from jvpipe.cost.costs import Costs, LayerCost
from jvpipe.cost.hardware import Link
from jvpipe.ir.kinds import Kind
from jvpipe.planners.model.problem import RECOMPUTE_CHAIN, Decision, Problem
from jvpipe.planners.model.shared_state import spared_bytes
from jvpipe.planners.model.stage_bytes import (
    LayerBytes,
    StageBytes,
    early_s,
    layers_bytes,
    on_device_bytes,
)
from jvpipe.schedules.schedule import Holding
from jvpipe.simulate.stages import StageLoad


@dataclass(frozen=True, slots=True)
class StageCost:
    """A stage's seconds per micro-batch, and its bytes."""

    forward_s: float
    backward_s: float
    recompute_s: float
    swap_s: float  # of swapped residuals on the link to the host, out and in
    comm_s: float  # of values from and cotangents to earlier stages
    link_s: float  # how long the stage's own link to the host is busy
    held: StageBytes[int]
    replicas: int = 1
    halves_s: tuple[float, float] = (0.0, 0.0)  # of a backward that is not whole
    reduce_s: float = 0.0  # per step, in which replicas add up gradients
    update_s: float = 0.0  # of the optimizer, each time
    early_s: float = 0.0  # of recompute_s, what runs before the cotangents are there

    @property
    def compute_s(self) -> float:
        """What the device itself works."""
        return self.forward_s + self.backward_s + self.recompute_s

    @property
    def waiting_s(self) -> float:
        """What its backwards compute again once they have their cotangents."""
        return self.recompute_s - self.early_s

    def load(self, send_s: float = 0.0) -> StageLoad:
        """Describes the stage to the simulator; each way takes half of a swap or a transfer.

        Args:
            send_s: of what it sends on, which the stage after it knows.
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
        """Counts what the device works for a task of a list, with what it computes again before."""
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
        """How far apart micro-batches are on this stage: of its work and its link, the slower."""
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
        """What the host holds of all replicas."""
        return self.replicas * int(self.held.host)


def stage_cost(
    problem: Problem,
    s: int,
    i: int,
    j: int,
    choices: Sequence[int],
) -> StageCost:
    """Counts the seconds per micro-batch and the bytes of stage `s` with layers [i, j).

    Args:
        problem: whose costs, schedule, micro-batches and links count.
        s: the stage, from 0.
        i: its first layer.
        j: the layer after its last.
        choices: those of all layers of the model.
    """
    layers = problem.layers_on(s)[i:j]
    held_bytes = stage_bytes(problem, s, i, j, choices)
    costs = problem.costs_of(s)
    peer = problem.link_into(s)
    group = problem.group(s)
    received, returned, sent = crossing_bytes(problem, i, j)
    input_s = weight_s = 0.0
    if problem.splits:
        halves = [halves_s(costs, at, layer) for at, layer in enumerate(layers, i)]
        input_s = sum((half for half, _ in halves), 0.0)
        weight_s = sum((half for _, half in halves), 0.0)
    swap_s = 2 * problem.host.seconds(held_bytes.swapped)
    traffic_s = 0.0
    if problem.peer_uses_host:
        traffic_s = peer.seconds(received + returned + sent)
    reduce_s = 0.0
    if group.replicas > 1:
        reduce_s = _reduce_s(group.reduces, layers, problem.overlaps)
    return StageCost(
        forward_s=sum(layer.forward_s for layer in layers),
        backward_s=sum(layer.backward_s for layer in layers),
        recompute_s=sum(x.extra_s for x in layers_bytes(layers, choices[i:j])),
        swap_s=swap_s,
        comm_s=peer.seconds(received) + peer.seconds(returned),
        link_s=swap_s + traffic_s,
        held=held_bytes,
        replicas=group.replicas,
        halves_s=(input_s, weight_s),
        reduce_s=reduce_s,
        update_s=_update_s(layers, group.replicas),
        early_s=early_s(layers, choices[i:j]),
    )


def crossing_bytes(
    problem: Problem,
    i: int,
    j: int,
) -> tuple[int, int, int]:
    """Counts what layers [i, j) read from earlier stages, return, and pass by for later ones.

    Args:
        problem: whose edges count.
        i: the first layer.
        j: the layer after the last.
    """
    received = returned = sent = 0
    for edge in problem.costs.edges_at(i, j):
        back = edge.bytes if edge.differentiable else 0
        if edge.producer < i:
            received = received + edge.bytes
            returned = returned + back
        elif max(edge.readers) >= j:
            sent += edge.bytes + back
    return received, returned, sent


def _reduce_s(
    link: Link,
    layers: Sequence[LayerCost],
    overlaps: bool,
) -> float:
    """Counts the seconds of an all-reduce of layers' gradients that no backward hides.

    Args:
        link: of the all-reduce.
        layers: of a stage.
        overlaps: the gradients of a layer are reduced as soon as its last backward has ended.
    """
    size = sum(layer.reduced_bytes for layer in layers)
    if not overlaps or not size:
        return link.seconds(size)
    # Backwards run from the last layer on; a reduction waits for its layer and for the one before
    # it.
    computed_s = reduced_s = 0.0
    for layer in reversed(layers):
        computed_s += layer.backward_s
        reduced_s = max(reduced_s, computed_s) + layer.reduced_bytes / link.bytes_per_s
    return link.latency_s + max(0.0, reduced_s - computed_s)


def _update_s(layers: Sequence[LayerCost], replicas: int) -> float:
    """Counts an update on a replica: each updates some of the layers for all, as its share."""
    layer_s = [layer.update_s for layer in layers]
    if replicas == 1:
        return sum(layer_s)
    return max(*layer_s, sum(layer_s) / replicas)


def once_s(problem: Problem, stage: StageCost) -> float:
    """Counts what a stage takes once per step: what replicas add up, and updates."""
    return stage.reduce_s + problem.updates * stage.update_s


def halves_s(
    costs: Costs,
    layer: int,
    cost: LayerCost,
) -> tuple[float, float]:
    """Counts the halves of a backward: unsplit ones are in I, those without cotangent in W.

    Args:
        costs: those of the model.
        layer: which of its layers.
        cost: what it takes on its device.
    """
    if not costs.gives_cotangent(layer):
        return 0.0, cost.backward_s
    if cost.split is None:
        return cost.backward_s, 0.0
    return cost.split.input_s, cost.split.weight_s


def stage_bytes(
    problem: Problem,
    s: int,
    i: int,
    j: int,
    choices: Sequence[int],
) -> StageBytes[int]:
    """Counts the bytes of stage `s` with layers [i, j); the arguments are those of `stage_cost`.

    Args:
        problem: whose costs, schedule and micro-batches count.
        s: the stage, from 0.
        i: its first layer.
        j: the layer after its last.
        choices: those of all layers of the model.
    """
    costs = problem.costs_of(s)
    replicas = problem.group(s).replicas
    layers = costs.layers[i:j]
    left = list(layers_bytes(layers, choices[i:j]))
    parameters = sum(layer.parameter_bytes for layer in layers)
    # A value that several layers read counts at the first of them: it lies until that one's
    # backward.
    shared = [0] * len(layers)
    for value in costs.shared_at(i, j):
        if value.per_version:
            parameters += value.bytes
        else:
            first = min(layer for layer in value.layers if layer >= i)
            shared[first - i] += value.bytes
    # A backward goes from the last layer to the first. While a layer works, what later ones left is
    # gone, and if backwards run in halves, what they handed over is there instead.
    beyond = between = later = handed = 0
    for at in reversed(range(len(left))):
        beyond = max(beyond, left[at].working - later)
        between = max(between, left[at].working + handed - later)
        later += left[at].left + shared[at]
        if problem.splits:
            handed += handed_bytes(costs, i + at, left[at])
    state = sum(layer.gradient_bytes + layer.optimizer_bytes for layer in layers)
    state -= spared_bytes(layers, replicas)
    versions = problem.schedule.versions(s, problem.devices)
    reducing = 0
    if replicas > 1:
        reducing = 2 * max(layer.reduced_bytes for layer in layers)
    return StageBytes(
        in_flight=problem.in_flight[s],
        static=versions * parameters + state + waiting_bytes(problem, s, i, j),
        kept=sum(x.kept for x in left) + sum(shared),
        swapped=sum(x.swapped for x in left),
        # The layers behind hold what W will read: the most is over the bytes before or after all of
        # I.
        beyond=max(beyond, between - max(0, handed - later)),
        handed=handed,
        reducing=reducing,
    )


def handed_bytes(costs: Costs, layer: int, left: LayerBytes) -> int:
    """Counts what a layer holds between I and W: all that it left, if it runs in W alone.

    Args:
        costs: of the model.
        layer: which one.
        left: what its forward leaves, as it is chosen.
    """
    if not costs.gives_cotangent(layer):
        return left.left + costs.made_bytes(layer)
    split = costs.layers[layer].split
    return split.held_bytes if split else 0


def waiting_bytes(
    problem: Problem,
    s: int,
    i: int,
    j: int,
) -> int:
    """Counts the most bytes of early values and waiting cotangents on a stage of layers [i, j).

    Args:
        problem: whose edges, schedule and micro-batches count.
        s: the stage, from 0.
        i: its first layer.
        j: the layer after its last.
    """
    k = problem.in_flight
    total = 0
    for edge in problem.costs_of(s).edges_at(i, j):
        if edge.producer < i:  # each layer before the stage may be on a stage of its own
            maker = max(0, s - (i - edge.producer))
            total += (k[maker] - k[s]) * edge.bytes
        if edge.differentiable and max(edge.readers) >= j:
            reader = min(reader for reader in edge.readers if reader >= j)
            stages_away = min(problem.stages - 1 - s, 1 + reader - j)
            total += stages_away * edge.bytes
    return total


def device_bytes(problem: Problem, stages: Sequence[StageCost]) -> tuple[int, ...]:
    """Counts the most that each device holds at once, over all its stages: see `joint_bytes`."""
    schedule = problem.schedule
    if schedule.chunks == 1 and not problem.splits:
        return tuple(stage.peak_bytes for stage in stages)
    mine: list[list[StageBytes[int]]] = [[] for _ in range(problem.devices)]
    for place, stage in zip(problem.places, stages, strict=True):
        mine[place].append(stage.held)
    every = schedule.held(problem.devices, problem.microbatches)
    return tuple(map(joint_bytes, mine, every))


def needed_bytes(problem: Problem, device_sizes: Sequence[int]) -> list[int]:
    """Lists the limits, each that of the roomiest device, for each device's bytes."""
    less = [group.less_bytes for group in problem.groups] or [0] * len(device_sizes)
    return [size + more for size, more in zip(device_sizes, less, strict=True)]


def joint_bytes(
    of_stages: Sequence[StageBytes[int]],
    vectors: Sequence[Holding],
) -> int:
    """Counts the most that a device's stages hold at once, as in the simulator's curves.

    A property test holds it to them (tests/planners/model/test_unfolded.py).

    Args:
        of_stages: what each of its stages holds.
        vectors: how many micro-batches the stages have in flight and handed over at once, moment by
            moment.
    """

    def held_bytes(moment: Holding) -> float:
        in_flight: float = 0
        for stage, (k, handed) in zip(of_stages, moment, strict=True):
            in_flight += on_device_bytes(k, stage.kept, stage.swapped) + handed * stage.handed
        return in_flight

    static = sum(stage.static for stage in of_stages)
    # One stage works at a time, so that only the largest of what they need beyond counts.
    beyond = max(stage.beyond for stage in of_stages)
    training = max(map(held_bytes, vectors)) + beyond
    reducing = max(stage.reducing for stage in of_stages)
    return int(static + max(training, reducing))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A decision's stages and its surrogate seconds per step.

    The surrogate of a synchronous schedule is fill and drain plus M - 1 times the slowest (1F1B),
    or that of each phase (GPipe); of an asynchronous one, M times the slowest stage. Links between
    stages count as stages do. What is computed again counts as if no cotangent were ever awaited:
    the simulator knows better, and is asked before plans are chosen.
    """

    stages: tuple[StageCost, ...]
    step_s: float
    bottleneck_s: float
    device_bytes: tuple[int, ...]
    limit_bytes: int  # the least limit that it keeps

    @property
    def peak_bytes(self) -> int:
        """The most bytes on any device."""
        return max(self.device_bytes)


def evaluate_decision(problem: Problem, decision: Decision) -> Evaluation:
    """Counts what a decision takes, by the stated surrogate.

    Args:
        problem: that is decided.
        decision: a complete one.

    Raises:
        ValueError: it is none of this problem.
    """
    check(problem, decision)
    spans = enumerate(pairwise(decision.bounds))
    stages = [stage_cost(problem, s, i, j, decision.choices) for s, (i, j) in spans]
    return evaluation_of(problem, stages)


def evaluation_of(problem: Problem, stages: Sequence[StageCost]) -> Evaluation:
    """Counts what a decision takes, from what its stages take."""
    device_sizes = device_bytes(problem, stages)
    limit_bytes = max(needed_bytes(problem, device_sizes))
    return Evaluation(
        tuple(stages),
        surrogate(problem, stages),
        slowest_s(problem, stages),
        device_sizes,
        limit_bytes,
    )


def slowest_s(problem: Problem, stages: Sequence[StageCost]) -> float:
    """Counts how far apart micro-batches are: on the slowest device, or on the slowest link.

    What happens once a step is divided among its micro-batches: M (t + A / M) is what a stage is
    busy.
    """
    # Stages on one device work in turns, so that their seconds add up.
    busy_s = [0.0] * problem.devices
    for place, c in zip(problem.places, stages, strict=True):
        busy_s[place] += c.seconds + once_s(problem, c) / problem.microbatches
    return max(*busy_s, *(c.comm_s for c in stages))


def surrogate(problem: Problem, stages: Sequence[StageCost]) -> float:
    """Counts the seconds of a step in closed form, held to the simulator by a property test.

    It is exact where stages are alike and send in no time
    (tests/planners/model/test_stage_cost.py). Elsewhere it is what cuts and fates are sought by,
    and the simulator decides.

    Args:
        problem: whose schedule, micro-batches and places count.
        stages: what they take.
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
        links = [c.comm_s / 2 for c in stages]
        longest_s = max(*forward, *links) + max(*backward, *links)
        return sum(forward) + sum(backward) + transfers + (m - 1) * longest_s
    return sum(each_s) / chunks + transfers + (m - 1 / chunks) * slowest


def check(problem: Problem, decision: Decision) -> None:
    """Raises ValueError unless a decision is complete, contiguous, and its choices exist."""
    layers = problem.costs.layers
    bounds = decision.bounds
    if bounds[0] != 0 or bounds[-1] != len(layers) or any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(f"bounds {bounds} must rise from 0 to the number of layers, {len(layers)}")
    if len(bounds) != problem.stages + 1:
        raise ValueError(f"{len(bounds) - 1} stages were planned, {problem.stages} were asked for")
    if len(decision.choices) != len(layers):
        raise ValueError(f"{len(decision.choices)} choices for {len(layers)} layers")
    stage_of = [s for s, (i, j) in enumerate(pairwise(bounds)) for _ in range(i, j)]
    for layer, choice in enumerate(decision.choices):
        options = problem.costs_of(stage_of[layer]).layers[layer].options
        if not RECOMPUTE_CHAIN <= choice < len(options):
            raise ValueError(
                f"layer {layer} has {len(options)} options, option {choice} was chosen"
            )
        if choice == RECOMPUTE_CHAIN and (layer in bounds or decision.choices[layer - 1] >= 0):
            raise ValueError(
                f"layer {layer} is run again without its input, "
                "but the layer before it is not run again"
            )
    for group in problem.together:
        if any(min(group) < bound <= max(group) for bound in bounds[1:-1]):
            raise ValueError(f"layers {group} must share a stage, the bounds are {bounds}")


def keeps_limits(problem: Problem, evaluation: Evaluation) -> bool:
    """Tells whether every device is within its limit, and what is swapped within the host's."""
    memory, host = problem.memory_limit_bytes, problem.host_limit_bytes
    within = memory is None or evaluation.limit_bytes <= memory
    return within and (host is None or sum(stage.host_bytes for stage in evaluation.stages) <= host)
