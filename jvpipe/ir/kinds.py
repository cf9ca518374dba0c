"""The kinds of tasks and rows, with one table of their properties.

A task is one action of a stage on a micro-batch. Tasks are lowered to rows. A row runs one program,
starts one copy, waits for a copy, or frees buffers. The table `KINDS` has one line per kind, with
the properties that several parts of jvpipe read. To add a kind, add a line; docs/adding_a_kind.md
lists the other code to change.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum


class Kind(StrEnum):
    """The kinds of tasks and rows.

    Task lists, timelines and traces show each kind by its value.
    """

    F = "F"  # forward
    B = "B"  # backward
    I = "I"  # noqa: E741 - as in papers: first half of a backward, which gives cotangents of inputs
    W = "W"  # second half of a backward, which adds the gradients of weights
    R = "R"  # recompute: run a forward again for a backward
    U = "U"  # update: one piece of the optimizer
    E = "E"  # evaluate: a forward that leaves nothing for a backward
    SEND = "SEND"  # copy to another place
    RETURN = "RETURN"  # a SEND of a cotangent, in simulations of whole stages
    MOVE = "MOVE"  # copy a value of a layer that changes places
    FEED = "FEED"  # bring a leaf of the batch, or a seed, from the host
    OUT = "OUT"  # copy to the host
    IN = "IN"  # copy back from the host
    FREE = "FREE"  # wait until a copy has arrived, then free the buffer that was copied
    DROP = "DROP"  # free buffers that no later row reads
    ARRIVE = "ARRIVE"  # make a mark: a small array that tells another process that copies arrived
    RECEIPT = "RECEIPT"  # wait until a buffer that was offered to another process has arrived there
    ZERO = "ZERO"  # make arrays of zeros, such as accumulators of gradients
    LOSS = "LOSS"  # reduce the losses and aux of a step's micro-batches
    WEIGHT = "WEIGHT"  # for a weighted loss: sum its weights over the micro-batches of an update
    SHIFT = "SHIFT"  # move parameters ahead for a forward (XPipe) or back for a backward (PipeMare)
    SETTLE = "SETTLE"  # record what an update changed, for later SHIFTs
    SLICE = "SLICE"  # take the part of a value that a replica works on
    CONCAT = "CONCAT"  # join the parts that replicas of another stage have made
    REDUCE = "REDUCE"  # add up or join what the replicas of a stage have made, such as gradients


class Runs(Enum):
    """The work that a row gives to the controller."""

    LAYER = "a layer's program"
    PROGRAM = "another program"
    COPY = "a copy"
    WAIT = "nothing: it waits for a copy"
    NOTHING = "nothing: it ends buffers"


class CopyLink(Enum):
    """The links over which copies go."""

    PEER = "from place to place"
    TO_HOST = "from a place to its host"
    FROM_HOST = "back from the host"
    BATCH = "from the host, where the batch is"


class Grouped(Enum):
    """The role of a row in grouping, by which consecutive layers of a task run as one program.

    A row whose kind has `grouped=None` ends the group.
    """

    PART = "a part of a group of its kind"
    WITH_NEXT = "it joins the group of the next part"
    BEFORE = "it goes before the group"
    AFTER = "it goes after the group"


@dataclass(frozen=True, slots=True)
class KindInfo:
    """The properties of one kind: a line of the table `KINDS`.

    Attributes:
        runs: the work that it gives to the controller.
        look: its name and its color in pictures.
        weight: its assumed time, relative to a forward of the same layer. It is used to order tasks
            without measurements.
        in_flight: how much it changes the number of micro-batches in flight on its stage. A
            micro-batch is in flight if its forward has run and its backward has not.
        between: how much it changes the number of micro-batches that are between the two halves of
            their backward.
        back: which version of the weights it reads: the one that the schedule gives to a
            backward (True) or to a forward (False). None if it reads no weights.
        accumulates: whether it adds to sums of gradients.
        busy: whether it counts as work of a device. Bubbles are the time without such work.
        link: the link that it takes, if it is a copy.
        gathers: whether it reads values of other layers, such as sums of gradients. Copies
            of these values are sent to its place first.
        watched: whether it is a copy whose duration the monitor measures. Timelines show it with
            its bytes.
        grouped: its role in grouping; None if it ends the group.
    """

    runs: Runs
    look: tuple[str, str]
    weight: float = 0.0
    in_flight: int = 0
    between: int = 0
    back: bool | None = None
    accumulates: bool = False
    busy: bool = False
    link: CopyLink | None = None
    gathers: bool = False
    watched: bool = False
    grouped: Grouped | None = None

    @property
    def computes(self) -> bool:
        """Whether rows of this kind run a program, and so occupy their device.

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
    Kind.SEND: KindInfo(Runs.COPY, _SEND, link=CopyLink.PEER, grouped=Grouped.AFTER),
    Kind.RETURN: KindInfo(Runs.COPY, _SEND, link=CopyLink.PEER),
    Kind.MOVE: KindInfo(Runs.COPY, ("move", "#7a8a99"), link=CopyLink.PEER, watched=True),
    Kind.FEED: KindInfo(
        Runs.COPY, ("feed", "#d9dee3"), link=CopyLink.BATCH, grouped=Grouped.BEFORE
    ),
    Kind.OUT: KindInfo(Runs.COPY, ("swap out", "#d96c75"), link=CopyLink.TO_HOST, watched=True),
    Kind.IN: KindInfo(Runs.COPY, ("swap in", "#f0a8ad"), link=CopyLink.FROM_HOST, watched=True),
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
"""The properties of each kind of task and row."""
