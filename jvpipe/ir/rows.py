"""Rows: what the tasks of a schedule are lowered to; each is one program or one copy on one place.

A place is the number of a device, or of a mesh of devices.
"""

from dataclasses import dataclass

from jvpipe.ir.examples import Examples
from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import Ref
from jvpipe.ir.values import ValueKind


@dataclass(frozen=True, slots=True)
class LayerRun:
    """A layer's program for some examples; `layout` is the number of a layout of the step.

    A layout is the plan, the fates and the programs that a micro-batch runs with.
    """

    layout: int
    examples: Examples | None = None


@dataclass(frozen=True, slots=True)
class ZeroRun:
    """Fresh accumulators for a layer's values of a kind."""

    kind: ValueKind


@dataclass(frozen=True, slots=True)
class PieceRun:
    """A piece of the optimizer's update; with `keeps` it does not overwrite its parameters."""

    piece: int
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class ShiftRun:
    """Weights moved ahead by `updates` times the remembered update, or back if it is negative."""

    updates: int


@dataclass(frozen=True, slots=True)
class SettleRun:
    """The memory of an update; `tau` is the number of updates between a forward and its update."""

    tau: int


@dataclass(frozen=True, slots=True)
class SumRun:
    """The sum of `count` scalars."""

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
    """Parts of a value, joined one after another along an axis."""

    of: Ref
    axis: int


@dataclass(frozen=True, slots=True)
class JoinRun:
    """An edge without an axis of examples, for a stage with another number of replicas.

    It is the sum of the values that the replicas of its stage have, each times its weight. Without
    weights it is their plain sum.
    """

    of: Ref
    weights: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class AddRun:
    """Gradients of one more replica, added in place to the sum of the replicas before it."""


@dataclass(frozen=True, slots=True)
class StateRun:
    """Model state that is made of the replicas' parts, rather than a sum of gradients."""


@dataclass(frozen=True, slots=True)
class OfferRun:
    """The source's half of a copy between processes: it offers a buffer to another `process`.

    `number` is the number of the copy's row in the whole step; both halves have it.
    """

    number: int
    process: int


@dataclass(frozen=True, slots=True)
class AskRun:
    """The target's half of a copy between processes: it asks another `process` for a buffer.

    `number` is the number of the copy's row in the whole step; both halves have it.
    """

    number: int
    process: int


@dataclass(frozen=True, slots=True)
class ArriveRun:
    """The mark that copies from another process have arrived.

    `number` is the number of the first copy's row in the whole step.
    """

    number: int


@dataclass(frozen=True, slots=True)
class GroupRun:
    """Rows of consecutive layers that one program runs, one after another."""

    parts: tuple["Row", ...]


Wire = tuple[tuple[int, ...], tuple[int, ...]]
"""The arrays that a part of a group reads and those that it writes, by the group's own numbers."""


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
"""What distinguishes rows of one kind and layer; None if nothing needs to."""


@dataclass(frozen=True, slots=True)
class Row:
    """One program or one copy, which the controller dispatches.

    `place` is where it runs. `reads`, `writes` and `frees` are numbers of buffers in the buffer
    table; a buffer both read and written is updated in place. The buffers that it `frees` end with
    it. A row of no stage, layer or micro-batch has -1 there. A copy between places is one row: it
    runs at its source, and its target is the place of the buffer that it writes.

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
        """The rows that its program runs: the parts of a group, or else the row itself."""
        return self.run.parts if isinstance(self.run, GroupRun) else (self,)

    @property
    def wires(self) -> tuple[Wire, ...]:
        """The arrays that each part takes and yields, and last those of the row itself.

        Arrays have the row's own numbers rather than those of buffers: first those that the row
        reads, then those that its parts write. So rows with equal wires can run the same program.

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
        )  # a row of no stage or micro-batch leaves that number out
        where = f"{stage}{self.kind}{microbatch}"
        layers = list(dict.fromkeys(part.layer for part in self.parts))
        if len(layers) > 1:
            return f"{where}[layers {layers[0]} to {layers[-1]}]"
        return f"{where}[layer {self.layer}]" if self.layer >= 0 else where
