"""The layers of one device, and what is in flight on the device at each moment that matters.

A device has the layers of one stage or of several. Its layers are numbered from 0 over all its
stages. For a device with stages 1 and 5 of a model, whose layers are [3, 6) and [14, 16):

    layer of the model     3  4  5 | 14 15
    layer of the device    0  1  2 |  3  4
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from jvpipe.planners.joint.choice_arrays import Flight

Cell = tuple[int, int, int]
"""A stage s and its layers [i, j), as (s, i, j)."""


def cells(bounds: Sequence[int]) -> list[Cell]:
    """Lists the stages between bounds, with their layers."""
    return [(s, i, j) for s, (i, j) in enumerate(pairwise(bounds))]


@dataclass(frozen=True)
class Lot:
    """The layers of one device, and what is in flight on it at each moment that matters.

    Attributes:
        cells: the device's stages, in forward order.
        moments: for each moment, what each stage has in flight.
        base_bytes: for each moment, bytes that are held whatever is chosen.
        halves: whether backwards run in two halves.
    """

    cells: tuple[Cell, ...]
    moments: tuple[tuple[Flight, ...], ...]
    base_bytes: tuple[float, ...] = (0.0,)
    halves: bool = False

    @staticmethod
    def of_stage(in_flight: int, cell: Cell) -> "Lot":
        """Makes the lot of a device with one stage, whose backwards are whole."""
        return Lot((cell,), (((in_flight, 0),),))
