"""Counts the bytes of layers, stages and devices, by formulas that all planners share.

A test compares the formulas with a list of all that a device holds at every moment
(tests/planners/model/test_stage_bytes.py).

Legend: a stage holds layers [i, j), that is, layers i to j - 1. k is the number of
micro-batches in flight on the stage: their forward has run, and their backward has not
ended. v is the number of versions of the stage's parameters that exist at once.

    static     v * parameters + gradients + optimizer state
               + early values + waiting cotangents
    on device  k * kept + min(k, 2) * swapped: what the micro-batches in flight hold on the device
    beyond     max over layers l of (what l needs while it runs
               - what the layers after l keep and swap)
    reducing   on a stage of several devices, while it adds up gradients: copies of the gradients
               of a layer (`reducing_copies`)
    peak       static + max(on device + beyond, reducing)

Why `beyond` subtracts: `on device` counts every micro-batch in full. But only a part of the
micro-batch at work is held. Forwards build it up from the first layer to the last, and backwards
free it from the last layer to the first. So while layer l runs, the layers after l hold nothing of
this micro-batch.

Why min(k, 2): the swapped bytes of at most two micro-batches are on the device at once. One
micro-batch is at work, and one is being copied from or to the host.

Early values have arrived for micro-batches that are in flight on the stage that makes the
values, but not yet on this stage. Waiting cotangents have arrived for backwards that this
stage runs later. If their sender is d stages away, at most d of them wait. How far away
other stages are depends on the other cuts, so the largest possible distance counts.

A device may have several stages, or backwards in two halves. Then `Schedule.held` says what
is in flight at once, as vectors. A vector has a pair (k, w) for each stage of the device: k
micro-batches are in flight, and w are between the halves of their backward, where each
holds `handed` bytes. The device's peak is the static bytes of all its stages, plus the most
that any vector holds, plus the largest `beyond` of its stages (`joint_bytes`).

On a stage of several devices the legend holds for each device. A device works on its share
of a micro-batch, and keeps its share of the optimizer's state (`shared_state.py`). Adding
up gradients is counted as if it came after the stage's backwards, when nothing is in
flight. So `peak` takes a maximum, not a sum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, TypeVar

import numpy as np

from jvpipe.cost.costs import Costs, LayerCost, Option
from jvpipe.lowering.operation import reducing_copies
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Problem
from jvpipe.planners.model.shared_state import spared_bytes
from jvpipe.schedules.schedule import Holding

Bytes = TypeVar("Bytes", int, float, np.ndarray)


def on_device_bytes(
    in_flight: int,
    kept: Bytes,
    swapped: Bytes | int = 0,
) -> Bytes:
    """Counts the bytes that all micro-batches in flight hold on the device.

    Args:
        in_flight: micro-batches, the one at work included.
        kept: bytes of one micro-batch that stay on the device; a number or an array.
        swapped: bytes of one micro-batch that go to the host.

    >>> [on_device_bytes(in_flight, 10, 4) for in_flight in (1, 2, 3)]
    [14, 28, 38]
    """
    return in_flight * kept + min(in_flight, 2) * swapped


class LayerBytes(NamedTuple):
    """The bytes of a layer under a choice of fates, and the seconds that the choice adds.

    The forward leaves `kept` bytes of a micro-batch on the device, and `swapped` bytes on
    the host. The layer needs `working` bytes more while it runs. `extra_s` are the seconds
    that the choice adds to the layer's forward and backward.

    >>> layer = LayerCost("block", 1.0, 2.0, (Option(6),), input_bytes=2, temporary_bytes=3)
    >>> option_bytes(layer, Option(4, 1, 0.5, 7))
    LayerBytes(kept=6, swapped=1, working=10, extra_s=0.5)
    """

    kept: int
    swapped: int
    working: int
    extra_s: float

    @property
    def left(self) -> int:
        """The bytes that the layer's forward leaves of one micro-batch."""
        return self.kept + self.swapped


def option_bytes(layer: LayerCost, option: Option) -> LayerBytes:
    """Counts a layer's bytes under an option, including its input, which is kept or swapped."""
    kept, swapped = option.kept_bytes, option.swapped_bytes
    if option.swaps_input:
        swapped += layer.input_bytes
    else:
        kept += layer.input_bytes
    working = option.extra_bytes + layer.temporary_bytes
    return LayerBytes(kept, swapped, working, option.extra_s)


def recompute_peak_bytes(layer: LayerCost) -> int:
    """Counts the bytes of a layer's residuals in a backward that recomputes all of them.

    The last option recomputes the most residuals. The residuals that it still keeps or swaps are
    recomputed here as well, so their bytes are added.
    """
    last = layer.options[-1]
    return last.kept_bytes + last.swapped_bytes + last.extra_bytes


def recompute_s(layer: LayerCost) -> float:
    """Counts the extra seconds of a backward that recomputes all residuals of its layer.

    If the last option leaves nothing, it already recomputes everything, and its `extra_s` has these
    seconds. If even the last option leaves something, the whole forward runs again.
    """
    last = layer.options[-1]
    return layer.forward_s if last.kept_bytes + last.swapped_bytes else last.extra_s


def recomputed_bytes(layer: LayerCost) -> LayerBytes:
    """Counts a layer's bytes under `RECOMPUTE`, if the next layer is not a `RECOMPUTE_CHAIN`.

    The layer keeps only its input. Its backward recomputes the residuals itself.
    """
    working = recompute_peak_bytes(layer) + layer.temporary_bytes
    return LayerBytes(layer.input_bytes, 0, working, recompute_s(layer))


def layers_bytes(
    layers: Sequence[LayerCost],
    choices: Sequence[int],
) -> Iterator[LayerBytes]:
    """Yields each layer's bytes under its choice.

    A run is a layer with `RECOMPUTE` and the layers after it with `RECOMPUTE_CHAIN`. Their
    forwards run again one after the other, before their backwards. So the residuals of the
    run's layers, and the inputs between them, are held at once: `working` of a layer
    includes those of the run's earlier layers. The last layer of a run is an exception: its
    backward follows at once and recomputes the residuals itself, which may take less time than
    its forward.
    """
    run = 0
    for layer, choice, following in zip(layers, choices, (*choices[1:], 0), strict=True):
        if choice >= 0:
            yield option_bytes(layer, layer.options[choice])
            continue
        kept, _, working, extra_s = recomputed_bytes(layer)
        if choice == RECOMPUTE:
            run = 0
        else:
            run += layer.input_bytes
            kept = 0
        residuals = layer.options[0].kept_bytes
        if following == RECOMPUTE_CHAIN:
            working = residuals + layer.temporary_bytes
            extra_s = layer.forward_s
        yield LayerBytes(kept, 0, run + working, extra_s)
        run += residuals


def early_s(layers: Sequence[LayerCost], choices: Sequence[int]) -> float:
    """Counts the seconds of forwards that run again before the stage's cotangents arrive.

    The forwards of a run (see `layers_bytes`) run again directly before the run's
    backwards. So only the run at the end of the stage, whose backwards come first, can
    start before cotangents arrive. Its last layer does not count, because its backward
    recomputes the residuals itself.

    Args:
        layers: the layers of the stage.
        choices: the choice of each of these layers.

    >>> block = LayerCost("block", 1.0, 2.0, (Option(6),))
    >>> early_s((block,) * 3, (RECOMPUTE, RECOMPUTE_CHAIN, RECOMPUTE_CHAIN))
    2.0
    >>> early_s((block,) * 3, (RECOMPUTE, RECOMPUTE_CHAIN, 0))
    0.0
    """
    before = [layer.forward_s for layer in layers]
    runs_on = takewhile(RECOMPUTE_CHAIN.__eq__, reversed(choices))
    return sum((before[-2 - at] for at, _ in enumerate(runs_on)), 0.0)


@dataclass(frozen=True, eq=False)
class StageBytes:
    """The bytes of a stage; see the legend of the module.

    >>> StageBytes(in_flight=3, static=100, kept=10, swapped=4, beyond=5).peak
    143
    """

    in_flight: int
    static: int
    kept: int  # per micro-batch in flight
    swapped: int  # per micro-batch in flight
    beyond: int
    handed: int = 0  # per micro-batch between the halves of its backward
    reducing: int = 0  # while the stage's replicas add up gradients

    @property
    def peak(self) -> int:
        """The most bytes that the device holds at once."""
        training = on_device_bytes(self.in_flight, self.kept, self.swapped) + self.beyond
        return self.static + max(training, self.reducing)

    @property
    def host(self) -> int:
        """The bytes that the host holds for the device."""
        return self.in_flight * self.swapped


def stage_bytes(
    problem: Problem,
    s: int,
    i: int,
    j: int,
    choices: Sequence[int],
) -> StageBytes:
    """Counts the bytes of stage `s` with layers [i, j).

    Args:
        problem: gives the costs, the schedule and what is in flight on each stage.
        s: the stage's number, from 0.
        i: the stage's first layer.
        j: the layer after the stage's last.
        choices: the choices of all layers of the model, as in `Decision.choices`.
    """
    costs = problem.costs_of(s)
    replicas = problem.group(s).replicas
    layers = costs.layers[i:j]
    left = list(layers_bytes(layers, choices[i:j]))
    parameters = sum(layer.parameter_bytes for layer in layers)
    # A value that several layers read counts at the first of them, whose backward runs last.
    shared = [0] * len(layers)
    for value in costs.shared_at(i, j):
        if value.per_version:
            parameters += value.bytes
        else:
            first = min(layer for layer in value.layers if layer >= i)
            shared[first - i] += value.bytes
    # Backwards run from the last layer to the first. While a layer works, the bytes that
    # later layers left are free again (`later`). If backwards run in halves, the bytes that
    # later layers hold from I to W take their place (`handed`).
    beyond = between = later = handed = 0
    splits = problem.splits
    for at, x in reversed(list(enumerate(left))):
        beyond = max(beyond, x.working - later)
        between = max(between, x.working + handed - later)
        later += x.left + shared[at]
        if splits:
            handed += handed_bytes(costs, i + at, x)
    state = sum(layer.gradient_bytes + layer.optimizer_bytes for layer in layers)
    spared = spared_bytes(layers, replicas)
    versions = problem.schedule.versions(s, problem.devices)
    reducing = 0
    if replicas > 1:
        reducing = reducing_copies(replicas) * max(layer.reduced_bytes for layer in layers)
    return StageBytes(
        in_flight=problem.in_flight[s],
        static=versions * parameters + state - spared + waiting_bytes(problem, s, i, j),
        kept=sum(x.kept for x in left) + sum(shared),
        swapped=sum(x.swapped for x in left),
        # `between` is the most that a stage's I needs beyond the bytes held before I. After I the
        # stage holds `handed - later` bytes more than before. The schedule's vectors count the
        # moments before and after I, so only what I needs beyond the fuller of them is added.
        beyond=max(beyond, between - max(0, handed - later)),
        handed=handed,
        reducing=reducing,
    )


def handed_bytes(costs: Costs, layer: int, left: LayerBytes) -> int:
    """Counts the bytes that a layer holds between the halves I and W of its backward.

    If no earlier layer waits for a cotangent, the whole backward runs in W. Until then the layer
    holds what its forward left, and the cotangents that later layers have returned to it.

    Args:
        costs: the costs of the model.
        layer: the layer's number.
        left: the bytes that the layer's forward leaves under its choice.
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

    The module's legend says what these are.

    Args:
        problem: gives the costs and what is in flight on each stage.
        s: the stage's number, from 0.
        i: the stage's first layer.
        j: the layer after the stage's last.
    """
    k = problem.in_flight
    total = 0
    for edge in problem.costs_of(s).edges_at(i, j):
        # The cuts of other stages are not known here. The most is held if each layer
        # between this stage and the layer at the edge's other end is a stage of its own.
        if edge.producer < i:
            maker = max(0, s - (i - edge.producer))
            total += (k[maker] - k[s]) * edge.bytes
        if edge.differentiable and max(edge.readers) >= j:
            reader = min(reader for reader in edge.readers if reader >= j)
            stages_away = min(problem.stages - 1 - s, 1 + reader - j)
            total += stages_away * edge.bytes
    return total


def joint_bytes(
    of_stages: Sequence[StageBytes],
    vectors: Sequence[Holding],
) -> int:
    """Counts the most bytes that a device's stages hold at once.

    A property test compares this number with the simulator's memory curves
    (tests/planners/model/test_unfolded.py).

    Args:
        of_stages: the bytes of each stage of the device.
        vectors: the entry of `Schedule.held` for the device. For each moment that may be
            the peak, it counts the micro-batches in flight, and those between halves, of
            each stage.
    """

    def held_bytes(moment: Holding) -> float:
        pairs = zip(of_stages, moment, strict=True)
        return sum(on_device_bytes(k, x.kept, x.swapped) + w * x.handed for x, (k, w) in pairs)

    static = sum(stage.static for stage in of_stages)
    # Only one stage of a device works at a time, so only the largest `beyond` of them counts.
    beyond = max(stage.beyond for stage in of_stages)
    training = max(map(held_bytes, vectors)) + beyond
    reducing = max(stage.reducing for stage in of_stages)
    return int(static + max(training, reducing))
