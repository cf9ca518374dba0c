"""Rows: the units of dispatch to which tasks are lowered, such as one program or one copy.

A place is the number of a device, or of a mesh of devices. The classes `...Run` have the details of
a row beyond its kind and layer, such as the bounds of a slice.
"""

from dataclasses import dataclass

from jvpipe.ir.examples import Examples
from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import Ref
from jvpipe.ir.values import ValueKind


@dataclass(frozen=True, slots=True)
class LayerRun:
    """A layer's program for a micro-batch, or for one slice of its examples.

    A layout is the plan, the fates and the programs that a micro-batch runs with. `layout` is the
    number of the layout in the step. `examples` is the slice; None stands for all examples.
    """

    layout: int
    examples: Examples | None = None


@dataclass(frozen=True, slots=True)
class ZeroRun:
    """Arrays of zeros for a layer's values of one kind, to which later programs add."""

    kind: ValueKind


@dataclass(frozen=True, slots=True)
class PieceRun:
    """A piece of the optimizer's update; with `keeps` true it leaves the old parameters intact."""

    piece: int
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class ShiftRun:
    """Weights plus `updates` times the remembered change per update; `updates` may be negative."""

    updates: int


@dataclass(frozen=True, slots=True)
class SettleRun:
    """A record of what an update changed; `tau` is the staleness of the layer's weights."""

    tau: int


@dataclass(frozen=True, slots=True)
class SumRun:
    """The sum of `count` scalars."""

    count: int


@dataclass(frozen=True, slots=True)
class SliceRun:
    """The part of a value along an axis, from `start` up to but not including `stop`."""

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
    """An edge, or its cotangent, that goes to a stage whose replicas have other slices.

    The value has no axis of examples, so it cannot be joined from parts. It is the sum of the
    sending replicas' values, each times its weight in `weights`. Without weights it is the plain
    sum or, in a ZERO row, zeros.
    """

    of: Ref
    weights: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class AddRun:
    """The gradients of one more replica, added in place to the sum over earlier replicas."""


@dataclass(frozen=True, slots=True)
class StateRun:
    """Model state, joined from the parts that the replicas have made."""


@dataclass(frozen=True, slots=True)
class OfferRun:
    """The source's half of a copy between processes: it offers a buffer to another `process`.

    The copy is one row of the whole step. `number` is the number of that row, in both halves.
    """

    number: int
    process: int


@dataclass(frozen=True, slots=True)
class AskRun:
    """The target's half of a copy between processes: it asks another `process` for a buffer.

    The copy is one row of the whole step. `number` is the number of that row, in both halves.
    """

    number: int
    process: int


@dataclass(frozen=True, slots=True)
class ArriveRun:
    """A mark: the copies from another process have arrived.

    `number` is the number of the first copy's row in the whole step.
    """

    number: int


@dataclass(frozen=True, slots=True)
class GroupRun:
    """Rows of consecutive layers that one program runs, one after another."""

    parts: tuple["Row", ...]


Wire = tuple[tuple[int, ...], tuple[int, ...]]
"""The arrays that a part of a group reads, and those that it writes, numbered as in `Row.wires`."""


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
"""The details that distinguish rows of the same kind and layer; None if no details are needed."""


@dataclass(frozen=True, slots=True)
class Row:
    """A unit of dispatch: one program, one copy, one wait, or the freeing of buffers.

    `reads`, `writes` and `frees` are numbers of buffers in the buffer table. A buffer that is both
    read and written is updated in place. The buffers in `frees` are freed after the row. If a row
    belongs to no stage, layer or micro-batch, that field is -1; in a stream, where micro-batches of
    earlier steps are below 0, a row of no micro-batch has `NEVER`. `place` is where the row runs. A
    copy between places is one row: it runs at its source and writes a buffer at its target.

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
        """The arrays that each part reads and writes; the last element is for the row itself.

        Arrays are numbered within the row: first those that the row reads, then those that its
        parts write. These numbers do not depend on the buffers. So rows that do the same with other
        buffers have equal wires and can run the same program.

        >>> parts = Row(Kind.F, 0, 0, 0, 5, (7,), (8,)), Row(Kind.F, 0, 0, 1, 5, (8, 3), (9,))
        >>> Row(Kind.F, 0, 0, 0, 5, (7, 3), (9,), run=GroupRun(parts)).wires
        (((0,), (2,)), ((2, 1), (3,)), ((0, 1), (3,)))
        """
        number = {b: i for i, b in enumerate(self.reads)}
        for b in (b for part in self.parts for b in part.writes):
            number.setdefault(b, len(number))

        def wire(row: Row) -> Wire:
            reads = tuple(number[b] for b in row.reads)
            return reads, tuple(number[b] for b in row.writes)

        return tuple(map(wire, (*self.parts, self)))

    def __str__(self) -> str:
        # The number of a missing stage or micro-batch is left out.
        stage = self.stage if self.stage >= 0 else ""
        microbatch = self.microbatch if self.microbatch >= 0 else ""
        where = f"{stage}{self.kind}{microbatch}"
        layers = list(dict.fromkeys(part.layer for part in self.parts))
        if len(layers) > 1:
            return f"{where}[layers {layers[0]} to {layers[-1]}]"
        return f"{where}[layer {self.layer}]" if self.layer >= 0 else where
