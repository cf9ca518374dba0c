"""The bytes of layers and stages: one formula for all planners, tested against enumeration.

Legend: stage s holds layers [i, j); k micro-batches are in flight on it, v versions of its
parameters are live.

    static     v parameters + gradients + optimizer state
               + values that arrive early and cotangents that wait
    on device  k kept + min(k, 2) swapped: of all micro-batches in flight, one of them at work
    beyond     max over layers l of (what l needs while it runs
               - what the layers after l keep and swap)
    reducing   a stage of several devices: the gradients of a layer, and the sum of them, while it
               reduces
    peak       static + max(on device + beyond, reducing)

On a device of several stages, or whose backwards run in two halves, micro-batches in flight count
as the schedule's vectors say (`Schedule.held`): of each stage k, and w that hold `handed` between
the halves. Such a device's peak is the sum of what is static, the most over vectors, and the most
beyond (`device_bytes`).

One micro-batch is being built up by forwards, or taken down by backwards, which let go of what they
read: while layer l runs, nothing of the layers after it is there. The swapped bytes of at most two
micro-batches are on the device: that of the one at work, and that of the one that is on its way. An
early value is of a micro-batch that the stage which makes it has in flight already and this one has
not; a cotangent waits for as many stages as lie between its reader and this one. Which stages these
are depends on other cuts: the most that is possible is counted.

For a stage of several devices all this holds for each of them, which works on its share of a
micro-batch, and keeps its share of the optimizer's state (`shared_state.py`). While gradients are
added up, after its backwards, nothing is in flight on it.
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
    """Counts what all micro-batches in flight hold on the device.

    Args:
        in_flight: micro-batches, the one at work included.
        kept: bytes of one micro-batch that stay on the device; a number or an array.
        swapped: bytes of one micro-batch that go to the host.

    >>> [on_device_bytes(in_flight, 10, 4) for in_flight in (1, 2, 3)]
    [14, 28, 38]
    """
    return in_flight * kept + min(in_flight, 2) * swapped


class LayerBytes(NamedTuple):
    """What a layer leaves of a micro-batch under a choice, needs while it runs, and adds to it.

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
        """What is there of one micro-batch while the layers after this one run."""
        return self.kept + self.swapped


def option_bytes(layer: LayerCost, option: Option) -> LayerBytes:
    """Counts a layer's bytes under an option: its input is kept too, or swapped."""
    kept = option.kept_bytes
    swapped = option.swapped_bytes
    if option.swaps_input:
        swapped += layer.input_bytes
    else:
        kept += layer.input_bytes
    working = option.extra_bytes + layer.temporary_bytes
    return LayerBytes(kept, swapped, working, option.extra_s)


def recompute_peak_bytes(layer: LayerCost) -> int:
    """Counts the residuals that a backward recomputes itself, and what the last option leaves."""
    last = layer.options[-1]
    return last.kept_bytes + last.swapped_bytes + last.extra_bytes


def recompute_s(layer: LayerCost) -> float:
    """Counts how much longer a backward takes that recomputes all.

    It is the layer's forward, if no option leaves nothing.
    """
    last = layer.options[-1]
    leaves = last.kept_bytes + last.swapped_bytes
    return layer.forward_s if leaves else last.extra_s


def recomputed_bytes(layer: LayerCost) -> LayerBytes:
    """Counts a layer's bytes under `RECOMPUTE` with no chain after it: its input alone is kept."""
    working = recompute_peak_bytes(layer) + layer.temporary_bytes
    return LayerBytes(layer.input_bytes, 0, working, recompute_s(layer))


def layers_bytes(
    layers: Sequence[LayerCost],
    choices: Sequence[int],
) -> Iterator[LayerBytes]:
    """Yields each layer's bytes under its choice; in a recomputed run, of the run so far.

    The forwards of a run hold the residuals of its layers and the inputs between them at once;
    those of the last layer its backward recomputes itself, which may take less than its forward.
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
    """Counts the forwards that run again before a stage's first backward reads its cotangents.

    These are the run of layers that the stage ends with, except for its last layer, which its
    backward recomputes itself.

    Args:
        layers: of the stage.
        choices: theirs.

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
