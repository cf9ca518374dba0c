"""Lower bounds of what a device's remaining layers hold and need, whatever their choices.

States of choices grow layer by layer (`dominance.py`). With these bounds a state that must end over
the limit is found early, before its last layers have choices.

A sum to come (a suffix sum) goes from a layer to the last layer of the device. For a device with
two stages, whose ends are drawn as bars:

    layer             0  1  2 |  3  4 |
    number            5  1  2    3  4
    its sum to come  15 10  9    7  4    0      the last entry is for no layers at all

While a layer runs a micro-batch, later layers of its stage hold nothing of it, but the layers of
later stages hold all that they keep of it. So some sums count one number for each layer of the
stage in which the sum begins, and another number for each layer of later stages (`until_end`).
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jvpipe.planners.joint.choice_arrays import Choices, Columns

Ends = Int[np.ndarray, "_"]
"""For each layer of a device, the number of layers up to its stage's end; then that of all."""
ByMoment = Float[np.ndarray, "moments _"]


class LookAhead(NamedTuple):
    """Lower bounds of what each layer of a device and all later ones hold and need.

    The arrays are by moment and layer; their last entries are for no layers at all.

    Attributes:
        least_bytes: what these layers hold for all micro-batches in flight.
        spare_bytes: the same while an earlier layer of the same stage runs.
        top_bytes: the most that these layers hold and work with while one of them runs.
        fall_bytes: up to the end of the stage, the bytes that the layers hand to the second halves
            of backwards, less the bytes that their forwards leave; an array by layer alone.
    """

    least_bytes: ByMoment
    spare_bytes: ByMoment
    top_bytes: ByMoment
    fall_bytes: Float[np.ndarray, "_"]


def look_ahead(
    table: Choices,
    at: Columns,
    held_bytes: np.ndarray,
    shared_bytes: np.ndarray,
    ends: Ends,
) -> LookAhead:
    """Computes the lower bounds for the layers of a device.

    Args:
        table: the choices of all layers of the model.
        at: for each layer of the device, its number in the model.
        held_bytes: the bytes that each choice holds, by moment, layer and choice.
        shared_bytes: for each layer, bytes that are held from that layer on for values that several
            layers read.
        ends: for each layer, the number of the device's layers up to the end of the layer's stage;
            then the number of all of them.
    """
    allowed = table.allowed[at]
    left = table.left_bytes[at]

    def least_of(sizes: np.ndarray) -> np.ndarray:
        return np.where(allowed, sizes, np.inf).min(-1)

    least = least_of(held_bytes)
    spare = least_of(held_bytes - left) - shared_bytes  # while an earlier layer of the stage runs
    top = least_of(held_bytes + table.working_bytes[at])  # while the layer itself runs
    least_to_come = to_come(least)
    behind = until_end(spare, least, ends, 1)
    # While a layer runs, the later layers of its stage hold nothing of the micro-batch at work.
    # `over` is what a layer and all later ones take while the layer runs, less the least that they
    # hold when none of them runs. The layer with the largest `over` sets `top_bytes`.
    least_from = least_to_come[:, :-1]
    over = top + behind[:, :-1] - least_from
    most_over = np.maximum.accumulate(over[:, ::-1], axis=1)[:, ::-1]
    largest = most_over + least_from
    behind_all = np.full((len(largest), 1), -np.inf)
    fall = least_of(table.handed_bytes[at] - left) - shared_bytes
    return LookAhead(
        least_bytes=least_to_come,
        spare_bytes=until_end(spare, least, ends),
        top_bytes=np.append(largest, behind_all, axis=1),
        fall_bytes=until_end(fall, np.zeros_like(fall), ends),
    )


def to_come(per_layer: np.ndarray) -> np.ndarray:
    """Makes suffix sums along the last axis, with a final 0: from each layer to the last."""
    backwards = per_layer[..., ::-1]
    total = np.zeros((*per_layer.shape[:-1], per_layer.shape[-1] + 1))
    total[..., :-1] = np.cumsum(backwards, axis=-1)[..., ::-1]
    return total


def until_end(
    inside: np.ndarray,
    after: np.ndarray,
    ends: Ends,
    skipped: int = 0,
) -> np.ndarray:
    """Sums from each layer to the last: `inside` up to the end of its stage, then `after`.

    Args:
        inside: for each layer, what counts in sums that begin in the layer's own stage.
        after: for each layer, what counts in sums that begin in an earlier stage.
        ends: for each layer, the number of the device's layers up to the end of the layer's stage;
            then the number of all of them.
        skipped: how many layers to leave out at the beginning of each sum, 0 or 1.
    """
    begin = np.minimum(np.arange(len(ends)) + skipped, len(ends) - 1)
    inner = to_come(inside)
    outer = to_come(after)
    own_stage = inner[..., begin] - inner[..., ends]
    return own_stage + outer[..., ends]
