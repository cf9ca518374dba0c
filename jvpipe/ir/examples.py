"""Slices: ranges of a micro-batch's examples, which are divided among the replicas of a stage.

Replicas are several places that run the same stage. Each makes values from its slice. `Over` says
how a value depends on the examples. This determines how the whole value is made from the replicas'
values.
"""

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple


class Examples(NamedTuple):
    """The examples of a micro-batch from `start` up to but not including `stop`.

    >>> print(Examples(2, 4))
    2:4
    """

    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of examples."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


def divided(examples: int, parts: int) -> tuple[Examples | None, ...]:
    """Divides a micro-batch into slices whose sizes differ by at most one; a single slice is None.

    >>> [str(part) for part in divided(8, 3)], divided(8, 1)
    (['0:2', '2:5', '5:8'], (None,))
    """
    if parts == 1:
        return (None,)
    bounds = [q * examples // parts for q in range(parts + 1)]
    return tuple(Examples(a, b) for a, b in pairwise(bounds))


class Over(StrEnum):
    """The ways in which a value depends on the examples of a micro-batch."""

    NONE = "none"  # it depends on no example: it is the same for every slice
    ALONG = "along"  # it has a part for each example, along one of its axes
    SUM = "sum"  # it is a sum over the examples
    MEAN = "mean"  # it is a mean over the examples
    MIXED = "mixed"  # it depends on the examples in some other way
    # A trace finds the ways above. The following ones are chosen by a user.
    MAX = "max"  # it is the largest of the slices' values
    LAST = "last"  # it is the last slice's value
    FIRST = "first"  # for model state: the first slice's value, which is the same for all slices
    ADDED = "added"  # for model state: the previous state, plus what each slice has added to it


@dataclass(frozen=True, slots=True)
class Spread:
    """How a value depends on the examples. If it is ALONG, `axis` is the axis of the examples."""

    over: Over
    axis: int = -1


@dataclass(frozen=True, slots=True)
class Batching:
    """How the values that replicas exchange depend on the examples of a micro-batch.

    The values are edges (tensors between layers), the loss and its aux, and the leaves of
    the model state that layers make. None in `state` means that each replica makes the
    whole leaf, so that nothing is joined.
    """

    tensors: tuple[Spread, ...]
    aux: tuple[Spread, ...] = ()
    loss: Spread = Spread(Over.MEAN)
    state: tuple[Spread | None, ...] = ()
