"""The kinds of tasks and rows: one enum, and one table of what every part of the house must know of each."""

from dataclasses import dataclass
from enum import Enum, StrEnum


class Kind(StrEnum):
    """The kinds of tasks and rows.

    Their values are their letters in lists, timelines and traces.
    """

    F = "F"  # forward
    B = "B"  # backward
    I = "I"  # noqa: E741 - the papers' letter: the half of a backward that gives the cotangents of inputs
    W = "W"  # the other half: it adds the gradients of weights
    R = "R"  # recompute a forward for a backward
    U = "U"  # update: one piece of the optimizer
    E = "E"  # evaluate: a forward that leaves nothing for a backward
    SEND = "SEND"  # copy to another place
    RETURN = "RETURN"  # a SEND of a cotangent, where whole stages are simulated
    MOVE = "MOVE"  # copy what belongs to a layer that changes places
    FEED = "FEED"  # bring a leaf of the batch from the host
    OUT = "OUT"  # copy to the host
    IN = "IN"  # copy back from the host
    FREE = "FREE"  # wait until a copy is there, then end its source
    DROP = "DROP"  # end what nobody will read
    ARRIVE = "ARRIVE"  # make a mark of what has come from another process
    RECEIPT = "RECEIPT"  # wait until what another process was offered has arrived there
    ZERO = "ZERO"  # make accumulators
    LOSS = "LOSS"  # sum the losses of a step's micro-batches
    WEIGHT = "WEIGHT"  # sum the weights of an update's micro-batches
    SHIFT = "SHIFT"  # predict or correct weights
    SETTLE = "SETTLE"  # note what an update did
    SLICE = "SLICE"  # take the part of a value that a replica works on
    CONCAT = "CONCAT"  # join the parts that replicas of another stage have made
    REDUCE = "REDUCE"  # add up the sums of gradients that the replicas of a stage have made


class Runs(Enum):
    """The things that a row is bound to."""

    LAYER = "a layer's program"
    PROGRAM = "another program"
    COPY = "a copy"
    WAIT = "nothing: it waits for a copy"
    NOTHING = "nothing: it ends buffers"


class Link(Enum):
    """The links that a copy goes over."""

    PEER = "from place to place"
    TO_HOST = "from a place to its host"
    FROM_HOST = "back from the host"
    BATCH = "from the host, where the batch is"


class Grouped(Enum):
    """What a row is where consecutive layers of a task run as one program; any other ends a group."""

    PART = "a part of a group of its kind"
    WITH_NEXT = "a part of the group of what follows"
    BEFORE = "it goes before the group"
    AFTER = "it goes after the group"


@dataclass(frozen=True, slots=True)
class KindInfo:
    """The line of a kind in the table.

    `look`: its name and its colour in pictures. `weight`: seconds relative to a forward of the same
    layer, where an order is made without measuring. `in_flight`: how many micro-batches more are in
    flight on its stage afterwards; `between`: how many more are between the halves of their
    backward. `back`: of those that read weights, if they read them as a backward does.
    `accumulates`: adds to sums of gradients. `busy`: work that a device is there for, which bubbles
    are measured by. `link`: of copies. `gathers`: reads what others tell it, by copies.
    `watched`: a copy whose end is worth knowing.
    `grouped`: where layers run in groups.
    """

    runs: Runs
    look: tuple[str, str]
    weight: float = 0.0
    in_flight: int = 0
    between: int = 0
    back: bool | None = None
    accumulates: bool = False
    busy: bool = False
    link: Link | None = None
    gathers: bool = False
    watched: bool = False
    grouped: Grouped | None = None

    @property
    def computes(self) -> bool:
        """Tells whether it runs a program, so that it occupies its device.

        >>> [KINDS[kind].computes for kind in (Kind.B, Kind.SEND)]
        [True, False]
        """
        return self.runs in (Runs.LAYER, Runs.PROGRAM)


_FORWARD, _SEND, _OTHER = ("forward", "#7fb2e5"), ("send", "#b5bcc4"), ("other", "#e8e4d8")

KINDS: dict[Kind, KindInfo] = {
    Kind.F: KindInfo(
        Runs.LAYER,
        _FORWARD,
        weight=1.0,
        in_flight=1,
        back=False,
        busy=True,
        grouped=Grouped.PART,
    ),
    Kind.B: KindInfo(
        Runs.LAYER,
        ("backward", "#f2a65a"),
        weight=2.0,
        in_flight=-1,
        back=True,
        accumulates=True,
        busy=True,
        grouped=Grouped.PART,
    ),
    Kind.I: KindInfo(
        Runs.LAYER,
        ("backward, inputs", "#f2a65a"),
        weight=1.0,
        in_flight=-1,
        between=1,
        back=True,
        busy=True,
        grouped=Grouped.PART,
    ),
    Kind.W: KindInfo(
        Runs.LAYER,
        ("backward, weights", "#f7cf9c"),
        weight=1.0,
        between=-1,
        back=True,
        accumulates=True,
        busy=True,
        grouped=Grouped.PART,
    ),
    Kind.R: KindInfo(
        Runs.LAYER,
        ("recompute", "#c3aed6"),
        weight=1.0,
        back=True,
        busy=True,
        grouped=Grouped.WITH_NEXT,
    ),
    Kind.U: KindInfo(
        Runs.PROGRAM,
        ("update", "#8cc084"),
        busy=True,
        gathers=True,
        grouped=Grouped.PART,
    ),
    Kind.E: KindInfo(Runs.LAYER, _FORWARD, weight=1.0, back=False, grouped=Grouped.PART),
    Kind.SEND: KindInfo(Runs.COPY, _SEND, link=Link.PEER, grouped=Grouped.AFTER),
    Kind.RETURN: KindInfo(Runs.COPY, _SEND, link=Link.PEER),
    Kind.MOVE: KindInfo(Runs.COPY, ("move", "#7a8a99"), link=Link.PEER, watched=True),
    Kind.FEED: KindInfo(Runs.COPY, ("feed", "#d9dee3"), link=Link.BATCH, grouped=Grouped.BEFORE),
    Kind.OUT: KindInfo(Runs.COPY, ("swap out", "#d96c75"), link=Link.TO_HOST, watched=True),
    Kind.IN: KindInfo(Runs.COPY, ("swap in", "#f0a8ad"), link=Link.FROM_HOST, watched=True),
    Kind.FREE: KindInfo(Runs.WAIT, _OTHER),
    Kind.DROP: KindInfo(Runs.NOTHING, _OTHER),
    Kind.ARRIVE: KindInfo(Runs.PROGRAM, _OTHER),
    Kind.RECEIPT: KindInfo(Runs.WAIT, _OTHER),
    Kind.ZERO: KindInfo(Runs.PROGRAM, _OTHER, grouped=Grouped.BEFORE),
    Kind.LOSS: KindInfo(Runs.PROGRAM, _OTHER),
    Kind.WEIGHT: KindInfo(Runs.PROGRAM, _OTHER),
    Kind.SHIFT: KindInfo(Runs.PROGRAM, _OTHER),
    Kind.SETTLE: KindInfo(Runs.PROGRAM, _OTHER),
    Kind.SLICE: KindInfo(Runs.PROGRAM, _OTHER),
    Kind.CONCAT: KindInfo(Runs.PROGRAM, _OTHER),
    Kind.REDUCE: KindInfo(Runs.PROGRAM, ("reduce", "#b7d7a8"), gathers=True),
}
"""The one table of kinds of tasks and rows."""
