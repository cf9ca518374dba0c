"""The bytes of layers and stages: one formula for all planners, tested against enumeration.

Legend: stage s holds layers [i, j), that is, layers i to j - 1. On the stage k micro-batches are in
flight: their forward ran and their backward did not end. v versions of its parameters are live.

    static     v * parameters + gradients + optimizer state
               + values that arrive early and cotangents that wait
    on device  k * kept + min(k, 2) * swapped: what the micro-batches in flight hold on the device
    beyond     max over layers l of (what l needs while it runs
               - what the layers after l keep and swap)
    reducing   on a stage of several devices, while it adds up gradients: the gradients of a layer,
               and their sum
    peak       static + max(on device + beyond, reducing)

Why `beyond` subtracts: of the micro-batches in flight, the one at work is either being built up by
forwards, or taken down by backwards, which free what they read. While layer l runs, the layers
after l hold nothing of that micro-batch, although `on device` counts it in full.

Why min(k, 2): the swapped bytes of at most two micro-batches are on the device at once. One
micro-batch is at work, and one is being copied from or to the host.

An early value belongs to a micro-batch that is in flight on the stage which makes the value, but
not yet on this stage. A cotangent waits for as many stages as lie between its reader and this
stage. Which stages these are depends on the other cuts, so that the most that is possible counts.

On a device that has several stages, or whose backwards run in two halves, the schedule's vectors
(`Schedule.held`) say what is in flight at once. A vector has for each stage k micro-batches in
flight, and w micro-batches that are between the halves and hold `handed` bytes each. The peak of
such a device is the sum of all that is static, of the most that any vector holds, and of the
largest `beyond` of a stage (`device_bytes`).

On a stage of several devices the legend holds for each device. A device works on its share of a
micro-batch and keeps its share of the optimizer's state (`shared_state.py`). Gradients are added up
after the stage's backwards, when nothing is in flight on the stage.
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
    """The bytes that a layer leaves of a micro-batch, those it needs while it runs, extra seconds.

    What a layer leaves under a choice of its fates is either kept on the device or swapped to the
    host. `extra_s` are the seconds that the choice adds to the layer's forward and backward.

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
        """The bytes of one micro-batch that are held while the layers after this one run."""
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
    """Counts what the last option leaves, and the residuals that its backward recomputes itself."""
    last = layer.options[-1]
    return last.kept_bytes + last.swapped_bytes + last.extra_bytes


def recompute_s(layer: LayerCost) -> float:
    """Counts the extra seconds of a backward that recomputes all residuals of its layer.

    If the last option leaves nothing, its extra seconds are those; if even the last option leaves
    something, the whole forward runs again.
    """
    last = layer.options[-1]
    leaves = last.kept_bytes + last.swapped_bytes
    return layer.forward_s if leaves else last.extra_s


def recomputed_bytes(layer: LayerCost) -> LayerBytes:
    """Counts a layer's bytes under `RECOMPUTE` if no `RECOMPUTE_CHAIN` follows: it keeps its input.

    The layer's backward recomputes the residuals itself.
    """
    working = recompute_peak_bytes(layer) + layer.temporary_bytes
    return LayerBytes(layer.input_bytes, 0, working, recompute_s(layer))


def layers_bytes(
    layers: Sequence[LayerCost],
    choices: Sequence[int],
) -> Iterator[LayerBytes]:
    """Yields each layer's bytes under its choice; in a recomputed run, those of the run so far.

    A run is a `RECOMPUTE` and the `RECOMPUTE_CHAIN`s after it: its forwards run again one after the
    other, so that the residuals of its layers and the inputs between them are held at once. The
    residuals of the run's last layer are recomputed by that layer's backward itself, which may take
    less time than the layer's forward.
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

    If the stage ends with a recomputed run, these are the forwards of that run, except for its last
    layer, whose backward recomputes the residuals itself.

    Args:
        layers: of the stage.
        choices: of these layers.

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
    """The bytes of a stage, as numbers, or of many stages, as arrays; the legend above says which.

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
        """The bytes that the host holds."""
        return self.in_flight * self.swapped
