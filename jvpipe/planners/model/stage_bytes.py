"""The bytes of layers and stages: one formula for all planners, tested against enumeration.

Legend: a stage holds layers [i, j), that is, layers i to j - 1. k is the number of micro-batches in
flight on the stage: their forward has run, and their backward has not ended. v is the number of
versions of the stage's parameters that exist at once.

    static     v * parameters + gradients + optimizer state
               + early values + waiting cotangents
    on device  k * kept + min(k, 2) * swapped: what the micro-batches in flight hold on the device
    beyond     max over layers l of (what l needs while it runs
               - what the layers after l keep and swap)
    reducing   on a stage of several devices, while it adds up gradients: the gradients of a layer,
               and their sum
    peak       static + max(on device + beyond, reducing)

Why `beyond` subtracts: `on device` counts every micro-batch in full. But only a part of the
micro-batch at work is held. Forwards build it up from the first layer to the last, and backwards
free it from the last layer to the first. So while layer l runs, the layers after l hold nothing of
this micro-batch.

Why min(k, 2): the swapped bytes of at most two micro-batches are on the device at once. One
micro-batch is at work, and one is being copied from or to the host.

Early values have arrived for micro-batches that are in flight on the stage that makes the values,
but not yet on this stage. Waiting cotangents have arrived for backwards that this stage runs later.
If their sender is d stages away, at most d of them wait. How far away other stages are depends on
the other cuts, so the largest possible distance counts.

A device may have several stages, or backwards in two halves. Then `Schedule.held` says what is in
flight at once, as vectors. A vector has a pair (k, w) for each stage of the device: k micro-batches
are in flight, and w are between the halves of their backward, where each holds `handed` bytes. The
device's peak is the static bytes of all its stages, plus the most that any vector holds, plus the
largest `beyond` of its stages (`joint_bytes` in `stage_cost.py`).

On a stage of several devices the legend holds for each device. A device works on its share of a
micro-batch, and keeps its share of the optimizer's state (`shared_state.py`). Adding up
gradients is counted as if it came after the stage's backwards, when nothing is in flight. So `peak`
takes a maximum, not a sum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from jvpipe.cost.costs import LayerCost, Option
from jvpipe.planners.model.problem import RECOMPUTE, RECOMPUTE_CHAIN

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

    The forward leaves `kept` bytes of a micro-batch on the device, and `swapped` bytes on the host.
    The layer needs `working` bytes more while it runs. `extra_s` are the seconds that the choice
    adds to the layer's forward and backward.

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
    kept = option.kept_bytes
    swapped = option.swapped_bytes
    if option.swaps_input:
        swapped += layer.input_bytes
    else:
        kept += layer.input_bytes
    working = option.extra_bytes + layer.temporary_bytes
    return LayerBytes(kept, swapped, working, option.extra_s)


def recompute_peak_bytes(layer: LayerCost) -> int:
    """Counts a layer's residuals in a backward that recomputes all of them.

    The last option recomputes the most. What it leaves is recomputed here as well, and counts too.
    """
    last = layer.options[-1]
    return last.kept_bytes + last.swapped_bytes + last.extra_bytes


def recompute_s(layer: LayerCost) -> float:
    """Counts the extra seconds of a backward that recomputes all residuals of its layer.

    If the last option leaves nothing, it already recomputes everything, and its `extra_s` has these
    seconds. If even the last option leaves something, the whole forward runs again.
    """
    last = layer.options[-1]
    leaves = last.kept_bytes + last.swapped_bytes
    return layer.forward_s if leaves else last.extra_s


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

    A run is a layer with `RECOMPUTE` and the layers after it with `RECOMPUTE_CHAIN`. Their forwards
    run again one after the other, before their backwards. So the residuals of the run's layers, and
    the inputs between them, are held at once: `working` of a layer includes those of the run's
    earlier layers. The last layer of a run is an exception, because no forward follows it. Its
    backward recomputes the residuals itself, which may take less time than its forward.
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

    The forwards of a run (see `layers_bytes`) run again directly before the run's backwards. So
    only the run at the end of the stage, whose backwards come first, can start before cotangents
    arrive. Its last layer does not count, because its backward recomputes the residuals itself.

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
class StageBytes(Generic[Bytes]):
    """The bytes of a stage as numbers, or of many stages as arrays; the module's legend has them.

    >>> StageBytes(in_flight=3, static=100, kept=10, swapped=4, beyond=5).peak
    143
    """

    in_flight: int
    static: Bytes
    kept: Bytes  # per micro-batch in flight
    swapped: Bytes  # per micro-batch in flight
    beyond: Bytes
    handed: Bytes | int = 0  # per micro-batch between the halves of its backward
    reducing: Bytes | int = 0  # while the stage's replicas add up gradients

    @property
    def peak(self) -> Bytes:
        """The most bytes that the device holds at once."""
        training = on_device_bytes(self.in_flight, self.kept, self.swapped) + self.beyond
        if isinstance(training, np.ndarray):
            return self.static + np.maximum(training, self.reducing)
        return self.static + max(training, self.reducing)

    @property
    def host(self) -> Bytes:
        """The bytes that the host holds for the device."""
        return self.in_flight * self.swapped
