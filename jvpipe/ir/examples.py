"""Slices of a micro-batch: what the replicas of a stage work on, and how the whole is made of them."""

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple


class Examples(NamedTuple):
    """The examples of a micro-batch from `start` up to `stop`, which is not among them.

    >>> print(Examples(2, 4))
    2:4
    """

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many there are."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


def divided(examples: int, parts: int) -> tuple[Examples | None, ...]:
    """Divides a micro-batch into slices whose sizes differ by at most one; None: one part has all of it.

    >>> [str(part) for part in divided(8, 3)], divided(8, 1)
    (['0:2', '2:5', '5:8'], (None,))
    """
    if parts == 1:
        return (None,)
    bounds = [q * examples // parts for q in range(parts + 1)]
    return tuple(Examples(a, b) for a, b in pairwise(bounds))


class Over(StrEnum):
    """The ways in which a value depends on the examples of a micro-batch."""

    NONE = "none"  # on none of them: it is the same for every slice
    ALONG = "along"  # it has a part for each, along one of its axes
    SUM = "sum"  # a sum over them
    MEAN = "mean"  # a mean over them
    MIXED = "mixed"  # in any other way
    MAX = "max"  # the largest over slices of them, as the user says
    LAST = "last"  # what the last slice gives, as the user says
    FIRST = "first"  # of the model state, as the user says: what any slice gives, such as the first
    ADDED = (
        "added"  # of the model state, as the user says: what it was, and what each slice adds to it
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """How a value lies over the examples; `axis` is where those of ALONG are."""

    over: Over
    axis: int = -1


@dataclass(frozen=True, slots=True)
class Batching:
    """How the edges between layers, the aux of a loss and the loss lie over the examples of a micro-batch.

    So do the leaves of the model state that a loss makes; None: each replica makes all of it.
    """

    tensors: tuple[Spread, ...]
    aux: tuple[Spread, ...] = ()
    loss: Spread = Spread(Over.MEAN)
    state: tuple[Spread | None, ...] = ()
