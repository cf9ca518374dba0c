"""Rows: lowered tasks, one program or copy each, on one place."""

from dataclasses import dataclass

from jvpipe.ir.examples import Examples
from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import Ref
from jvpipe.ir.values import ValueKind


@dataclass(frozen=True, slots=True)
class LayerRun:
    """A layer's program under the `layout`-th of the layouts in which a step's micro-batches run, for some examples."""

    layout: int
    examples: Examples | None = None


@dataclass(frozen=True, slots=True)
class ZeroRun:
    """Fresh accumulators for a layer's values of a kind."""

    kind: ValueKind


@dataclass(frozen=True, slots=True)
class PieceRun:
    """The `piece`-th piece of the optimizer's update.

    One that `keeps` does not overwrite its parameters.
    """

    piece: int
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class ShiftRun:
    """Weights moved by `updates` times what is remembered of one update; back if it is negative."""

    updates: int


@dataclass(frozen=True, slots=True)
class SettleRun:
    """The memory of what an update did; `tau`: the updates between a forward and its update."""

    tau: int


@dataclass(frozen=True, slots=True)
class SumRun:
    """The sum of so many scalars."""

    count: int


@dataclass(frozen=True, slots=True)
class SliceRun:
    """The part of a value along an axis, from `start` up to `stop`."""

    of: Ref
    axis: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ConcatRun:
    """Parts of a value one after another along an axis."""

    of: Ref
    axis: int


@dataclass(frozen=True, slots=True)
class JoinRun:
    """What several replicas have of an edge that has no axis of examples, for a stage of another width.

    It is the sum of what they have, each times its weight; without weights, each as it is.
    """

    of: Ref
    weights: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class AddRun:
    """Gradients of one more replica added to what those before it have come to, in place."""


@dataclass(frozen=True, slots=True)
class StateRun:
    """Model state made of what replicas have made of their examples, rather than a sum of gradients."""


@dataclass(frozen=True, slots=True)
class OfferRun:
    """The source's half of a copy between processes: the `number`-th row of all offers it to a `process`."""

    number: int
    process: int


@dataclass(frozen=True, slots=True)
class AskRun:
    """The target's half of a copy between processes: what the `number`-th row of all offers is asked of a `process`."""

    number: int
    process: int


@dataclass(frozen=True, slots=True)
class ArriveRun:
    """The mark of what copies have brought from another process, the first of them the `number`-th row of all."""

    number: int


@dataclass(frozen=True, slots=True)
class GroupRun:
    """Rows of consecutive layers, which one program runs one after another."""

    parts: tuple["Row", ...]


Wire = tuple[tuple[int, ...], tuple[int, ...]]
"""What a part of a group reads and what it writes, by numbers of the group's own."""


Run = (
    LayerRun
    | ZeroRun
    | PieceRun
    | ShiftRun
    | SettleRun
    | SumRun
    | SliceRun
    | ConcatRun
    | JoinRun
    | AddRun
    | StateRun
    | OfferRun
    | AskRun
    | ArriveRun
    | GroupRun
    | None
)
"""What tells rows of one kind and layer apart; None if the kind says it all."""


@dataclass(frozen=True, slots=True)
class Row:
    """A lowered task: what the controller dispatches, one program or one copy.

    `place` is where it runs. `reads`, `writes` and `frees` are ids in the buffer table; a buffer
    both read and written is updated in place. Where a row is of no stage, layer or micro-batch it
    says -1. A copy between places is one row: it runs at its source, and its target is where the
    buffer that it writes lies.

    >>> print(Row(Kind.F, 0, 1, 4, 2, reads=(0,), writes=(1,)))
    1F2[layer 4]
    """

    kind: Kind
    place: int
    stage: int
    layer: int
    microbatch: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...] = ()
    run: Run = None

    @property
    def parts(self) -> tuple["Row", ...]:
        """The rows that its program runs: those of a group, else itself."""
        return self.run.parts if isinstance(self.run, GroupRun) else (self,)

    @property
    def wires(self) -> tuple[Wire, ...]:
        """What each part takes and yields, and at last what the row does, by numbers that do not name buffers.

        What the row reads comes first, so rows that are wired alike can run one program.

        >>> parts = Row(Kind.F, 0, 0, 0, 5, (7,), (8,)), Row(Kind.F, 0, 0, 1, 5, (8, 3), (9,))
        >>> Row(Kind.F, 0, 0, 0, 5, (7, 3), (9,), run=GroupRun(parts)).wires
        (((0,), (2,)), ((2, 1), (3,)), ((0, 1), (3,)))
        """
        number = {b: i for i, b in enumerate(self.reads)}
        for b in (b for part in self.parts for b in part.writes):
            number.setdefault(b, len(number))
        touched = [(row.reads, row.writes) for row in (*self.parts, self)]
        return tuple(
            (tuple(number[b] for b in reads), tuple(number[b] for b in writes))
            for reads, writes in touched
        )

    def __str__(self) -> str:
        stage, microbatch = (
            n if n >= 0 else "" for n in (self.stage, self.microbatch)
        )  # of all, of none
        where = f"{stage}{self.kind}{microbatch}"
        layers = list(dict.fromkeys(part.layer for part in self.parts))
        if len(layers) > 1:
            return f"{where}[layers {layers[0]} to {layers[-1]}]"
        return f"{where}[layer {self.layer}]" if self.layer >= 0 else where
