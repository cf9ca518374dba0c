"""The bytes of a stage: the one formula that every planner counts by.

Legend: stage s holds layers [i, j); k micro-batches are in flight on it, v versions of its parameters are live.

    static     v parameters + gradients + optimizer state + values that arrive early and cotangents that wait
    on device  k kept + min(k, 2) swapped            for all micro-batches in flight, one of them at work
    beyond     max over layers l of (what l needs while it runs - what the layers after l keep and swap)
    reducing   a stage of several devices: the gradients of a layer, and the sum of them, while it reduces
    peak       static + max(on device + beyond, reducing)

On a device of several stages, or whose backwards run in two halves, micro-batches in flight count as the schedule's
vectors say (`Schedule.held`): of each stage k, and w that hold `handed` between the halves. Such a device's peak is
the sum of what is static, the most over vectors, and the most beyond (`device_bytes`).

One micro-batch is being built up by forwards, or taken down by backwards, which let go of what they read: while layer
l runs, nothing of the layers after it is there. Of swapped bytes two micro-batches are on the device at most: that of
the one at work, and that of the one that is on its way. An early value is of a micro-batch that the stage which makes
it has in flight already and this one has not; a cotangent waits for as many stages as lie between its reader and this
one. Which stages these are depends on other cuts: the most that is possible is counted.

Of a stage of several devices all this is said of each of them, which works on its share of a micro-batch, and keeps its
share of the optimizer's state (`shared_state.py`). While gradients are added up, after its backwards, nothing is in
flight on it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from jvpipe.cost.costs import Costs, LayerCost, Option
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN, Problem
from jvpipe.planners.model.shared_state import spared_bytes

Bytes = TypeVar("Bytes", int, float, np.ndarray)


def on_device_bytes(in_flight: int, kept: Bytes, swapped: Bytes | int = 0) -> Bytes:
    """Counts what all micro-batches in flight hold on the device.

    Args:
        in_flight: micro-batches, the one at work included.
        kept: bytes of one micro-batch that stay on the device; a number or an array.
        swapped: bytes of one micro-batch that go to the host.

    >>> [on_device_bytes(in_flight, 10, 4) for in_flight in (1, 2, 3)]
    [14, 28, 38]
    """
    return in_flight * kept + min(in_flight, 2) * swapped


def parameter_state_bytes(versions: int, parameters: Bytes, state: Bytes | int = 0) -> Bytes:
    """Counts parameters of all versions with their gradients and the optimizer's state, of which there is one.

    Args:
        versions: of the parameters that are live at once.
        parameters: bytes of one version.
        state: bytes of gradients and of the optimizer's state.
    """
    return versions * parameters + state


class LayerBytes(NamedTuple):
    """What a layer leaves of one micro-batch under a choice, and needs while it runs; seconds that its backward adds.

    >>> option_bytes(LayerCost("block", 1.0, 2.0, (Option(6),), input_bytes=2, temporary_bytes=3), Option(4, 1, 0.5, 7))
    LayerBytes(kept=6, swapped=1, working=10, extra_s=0.5)
    """

    kept: int
    swapped: int
    working: int
    extra_s: float

    @property
    def left(self) -> int:
        """What is there of one micro-batch while the layers after this one run."""
        return self.kept + self.swapped


def option_bytes(layer: LayerCost, option: Option) -> LayerBytes:
    """Counts a layer's bytes under one of its options: its input is kept beside what the option keeps, or swapped."""
    kept, swapped = (0, layer.input_bytes) if option.swaps_input else (layer.input_bytes, 0)
    working = option.extra_bytes + layer.temporary_bytes
    return LayerBytes(
        option.kept_bytes + kept, option.swapped_bytes + swapped, working, option.extra_s
    )


def recompute_peak_bytes(layer: LayerCost) -> int:
    """Counts the residuals that a backward has when it recomputes them itself, and what the last option leaves."""
    last = layer.options[-1]
    return last.kept_bytes + last.swapped_bytes + last.extra_bytes


def recompute_s(layer: LayerCost) -> float:
    """Counts how much longer a backward takes that recomputes all it needs: its forward, where no option says it."""
    last = layer.options[-1]
    return layer.forward_s if last.kept_bytes + last.swapped_bytes else last.extra_s


def recomputed_bytes(layer: LayerCost) -> LayerBytes:
    """Counts the bytes of a layer under `RECOMPUTE`, with no `RECOMPUTE_CHAIN` after it: its input alone is kept."""
    working = recompute_peak_bytes(layer) + layer.temporary_bytes
    return LayerBytes(layer.input_bytes, 0, working, recompute_s(layer))


def layers_bytes(layers: Sequence[LayerCost], choices: Sequence[int]) -> Iterator[LayerBytes]:
    """Yields each layer's bytes under its choice; in a run of layers recomputed, of all layers of the run so far.

    The forwards of a run hold the residuals of its layers and the inputs between them at once; those of the last layer
    its backward recomputes itself, which may take less than its forward.
    """
    run = 0
    for layer, choice, following in zip(layers, choices, (*choices[1:], 0), strict=True):
        if choice >= 0:
            yield option_bytes(layer, layer.options[choice])
            continue
        alone, residuals = recomputed_bytes(layer), layer.options[0].kept_bytes
        run = run + layer.input_bytes if choice == RECOMPUTE_CHAIN else 0
        kept, working, extra_s = (
            alone.kept if choice == RECOMPUTE else 0,
            alone.working,
            alone.extra_s,
        )
        if following == RECOMPUTE_CHAIN:
            working, extra_s = residuals + layer.temporary_bytes, layer.forward_s
        yield LayerBytes(kept, 0, run + working, extra_s)
        run += residuals


@dataclass(frozen=True, eq=False)
class StageBytes(Generic[Bytes]):
    """What a stage holds, in numbers or in arrays of many stages: see the legend above.

    >>> StageBytes(in_flight=3, static=100, kept=10, swapped=4, beyond=5).peak
    143
    """

    in_flight: int
    static: Bytes
    kept: Bytes  # per micro-batch in flight, as are swapped
    swapped: Bytes
    beyond: Bytes
    handed: Bytes | int = 0  # between the halves of a backward
    reducing: Bytes | int = 0  # while its replicas add up gradients

    @property
    def peak(self) -> Bytes:
        """The most that the device holds at once."""
        training = on_device_bytes(self.in_flight, self.kept, self.swapped) + self.beyond
        if isinstance(training, np.ndarray):
            return self.static + np.maximum(training, self.reducing)
        return self.static + max(training, self.reducing)

    @property
    def host(self) -> Bytes:
        """What the host holds."""
        return self.in_flight * self.swapped


def stage_bytes(
    problem: Problem, s: int, i: int, j: int, choices: Sequence[int]
) -> StageBytes[int]:
    """Counts the bytes of stage `s` with layers [i, j).

    Args:
        problem: whose costs, schedule and micro-batches count.
        s: the stage, from 0.
        i: its first layer.
        j: the layer after its last.
        choices: those of all layers of the model.
    """
    costs, replicas = problem.costs_of(s), problem.group(s).replicas
    layers = costs.layers[i:j]
    left = list(layers_bytes(layers, choices[i:j]))
    parameters, shared = sum(layer.parameter_bytes for layer in layers), [0] * (j - i)
    for held in costs.shared_at(i, j):
        here = [layer for layer in held.layers if i <= layer < j]
        if here and held.per_version:
            parameters += held.bytes
        elif here:  # until the backward of the first layer that holds it
            shared[min(here) - i] += held.bytes
    beyond = later = 0
    for layer, more in zip(reversed(left), reversed(shared), strict=True):
        beyond = max(beyond, layer.working - later)
        later += layer.left + more
    handed, more = _between_halves(costs, i, left, shared) if problem.splits else (0, 0)
    beyond = max(beyond, more)
    state = sum(layer.gradient_bytes + layer.optimizer_bytes for layer in layers)
    state -= spared_bytes(layers, replicas)
    most_gradients = max(layer.reduced_bytes for layer in layers)
    versions = problem.schedule.versions(s, problem.devices)
    return StageBytes(
        in_flight=problem.in_flight[s],
        static=parameter_state_bytes(versions, parameters, state) + waiting_bytes(problem, s, i, j),
        kept=sum(x.kept for x in left) + sum(shared),
        swapped=sum(x.swapped for x in left),
        beyond=beyond,
        handed=handed,
        reducing=2 * most_gradients if replicas > 1 else 0,
    )


def _between_halves(
    costs: Costs, i: int, left: Sequence[LayerBytes], shared: Sequence[int]
) -> tuple[int, int]:
    """Counts what layers from i on hold between I and W, and the most beyond while I goes through them.

    Meanwhile the layers behind hold what W will read: the most is over what there is before or after all of I.
    """
    most = later = handed = 0
    for at in reversed(range(len(left))):
        most = max(most, left[at].working + handed - later)
        later += left[at].left + shared[at]
        handed += handed_bytes(costs, i + at, left[at])
    return handed, most - max(0, handed - later)


def handed_bytes(costs: Costs, layer: int, left: LayerBytes) -> int:
    """Counts what a layer holds between I and W: all that it left, if it gives no cotangent and so runs in W alone.

    Args:
        costs: of the model.
        layer: which one.
        left: what its forward leaves, as it is chosen.
    """
    if not costs.gives_cotangent(layer):
        return left.left + costs.made_bytes(layer)
    split = costs.layers[layer].split
    return split.held_bytes if split else 0


def waiting_bytes(problem: Problem, s: int, i: int, j: int) -> int:
    """Counts the most bytes of values that reach stage `s` with layers [i, j) early, and of cotangents that wait there.

    Args:
        problem: whose edges, schedule and micro-batches count.
        s: the stage, from 0.
        i: its first layer.
        j: the layer after its last.
    """
    k, total = problem.in_flight, 0
    for edge in problem.costs_of(s).edges_at(i, j):
        here = [layer for layer in (edge.producer, *edge.readers) if i <= layer < j]
        if here and edge.producer < i:
            total += (k[max(0, s - (i - edge.producer))] - k[s]) * edge.bytes
        if here and edge.differentiable and max(edge.readers) >= j:
            reader = min(reader for reader in edge.readers if reader >= j)
            total += min(problem.stages - 1 - s, 1 + reader - j) * edge.bytes
    return total
