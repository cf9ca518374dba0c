"""The kinds of tasks and rows: one enum, and one table of what every part of the house must know of each."""

from dataclasses import dataclass
from enum import Enum, StrEnum


class Kind(StrEnum):
    """What a task or a row does; its value is its letter in lists, timelines and traces."""

    F = "F"  # forward
    B = "B"  # backward
    U = "U"  # update: one piece of the optimizer
    R = "R"  # recompute: a forward that runs again for a backward
    E = "E"  # evaluate: a forward that leaves nothing for a backward
    ZERO = "ZERO"  # make accumulators
    LOSS = "LOSS"  # sum the losses of a step's micro-batches
    WEIGHT = "WEIGHT"  # sum the weights of an update's micro-batches
    SHIFT = "SHIFT"  # predict or correct weights
    SETTLE = "SETTLE"  # note what an update did
    FEED = "FEED"  # bring a leaf of the batch from the host
    SEND = "SEND"  # copy to another place
    RETURN = "RETURN"  # a SEND of a cotangent, where whole stages are simulated
    MOVE = "MOVE"  # copy what belongs to a layer that changes places
    OUT = "OUT"  # copy to the host
    FREE = "FREE"  # wait until a copy is there, then end its source
    IN = "IN"  # copy back from the host
    DROP = "DROP"  # end what nobody will read


class Runs(Enum):
    """What a row of a kind is bound to."""

    LAYER = "a layer's program"
    PROGRAM = "another program"
    COPY = "a copy"
    NOTHING = "nothing: it waits, or ends buffers"


@dataclass(frozen=True, slots=True)
class KindInfo:
    """What holds for all tasks or rows of a kind.

    `weight`: seconds relative to a forward of the same layer, where an order is made without measuring. `in_flight`:
    how many micro-batches more are in flight on its stage afterwards. `scheduled`: stands in a schedule's lists.
    `watched`: a copy whose end is worth knowing.
    """

    runs: Runs
    weight: float = 0.0
    in_flight: int = 0
    scheduled: bool = False
    watched: bool = False


KINDS: dict[Kind, KindInfo] = {
    Kind.F: KindInfo(Runs.LAYER, weight=1.0, in_flight=1, scheduled=True),
    Kind.B: KindInfo(Runs.LAYER, weight=2.0, in_flight=-1, scheduled=True),
    Kind.U: KindInfo(Runs.PROGRAM, scheduled=True),
    Kind.R: KindInfo(Runs.LAYER, weight=1.0),
    Kind.E: KindInfo(Runs.LAYER, weight=1.0),
    Kind.ZERO: KindInfo(Runs.PROGRAM),
    Kind.LOSS: KindInfo(Runs.PROGRAM),
    Kind.WEIGHT: KindInfo(Runs.PROGRAM),
    Kind.SHIFT: KindInfo(Runs.PROGRAM),
    Kind.SETTLE: KindInfo(Runs.PROGRAM),
    Kind.FEED: KindInfo(Runs.COPY),
    Kind.SEND: KindInfo(Runs.COPY),
    Kind.RETURN: KindInfo(Runs.COPY),
    Kind.MOVE: KindInfo(Runs.COPY, watched=True),
    Kind.OUT: KindInfo(Runs.COPY, watched=True),
    Kind.FREE: KindInfo(Runs.NOTHING),
    Kind.IN: KindInfo(Runs.COPY, watched=True),
    Kind.DROP: KindInfo(Runs.NOTHING),
}
"""The one table of kinds of tasks and rows."""
