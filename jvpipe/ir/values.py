"""Values: the names of everything that a run computes, without the place where it lies.

The tables here say what all parts of jvpipe must know of each kind of value, so a new kind of value
is a new line of `VALUES`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from jvpipe.ir.examples import Examples

NONE = -1
"""The number of a stage, layer or micro-batch for an operation, a row or a value that has none."""
NEVER = -(10**9)
"""The number of a micro-batch or version for a value that has none.

It is far below 0, because steps of a stream count from their own beginning, so that micro-batches
and versions of earlier steps have numbers below 0.
"""


class ValueKind(StrEnum):
    """The kinds of values.

    The comment beside a kind lists the fields of `Value` that distinguish values of the kind. The
    comment above it says what the values are.
    """

    # a leaf of the parameters; version: the number of updates before it, NEVER if it is frozen
    PARAMETER = "parameter"  # index: the leaf; version
    # a leaf of the optimizer's state; layer: NONE for the global program's
    OPTIMIZER = "optimizer"  # index: the leaf; layer
    # a leaf of the model state; micro-batch: the one that reads it, NEVER if no layer writes it
    STATE = "state"  # index: the leaf; micro-batch
    # an array that the loss captured
    CONSTANT = "constant"  # index
    BATCH = "batch"  # index: the leaf; micro-batch
    SEED = "seed"  # micro-batch
    # an edge: a tensor between layers
    TENSOR = "tensor"  # index: the edge; micro-batch
    # the sum of an edge's cotangents so far, which begins with the last reader
    COTANGENT = "cotangent"  # index: the edge; micro-batch
    # a value that a layer's forward leaves for its backward
    RESIDUAL = "residual"  # index: its number in the layer; layer; micro-batch
    # a value that the first half of a backward leaves for the second
    HANDED = "handed"  # index: its number in the layer; layer; micro-batch
    # a sum of gradients; version: the number of the update that takes it
    GRADIENT = "gradient"  # index: the leaf; layer: the reader whose sum it is; version
    LOSS = "loss"  # index: 0 for the total, 1 for the weight; micro-batch
    AUX = "aux"  # index: the leaf; micro-batch
    # the sum of the losses' weights; version: the number of the update that takes it
    WEIGHT = "weight"  # layer: that of the loss; version
    METRIC = "metric"  # index; micro-batch: the first of its step
    # a small value between the optimizer's pieces
    EXCHANGE = "exchange"  # index; layer: its maker; micro-batch
    # a parameter moved ahead for a forward
    PREDICTED = "predicted"  # index: the leaf; micro-batch
    # a parameter moved back for a backward
    CORRECTED = "corrected"  # index: the leaf; micro-batch
    # the running mean of a parameter's updates
    DELTA = "delta"  # index: the leaf
    # a parameter's last update
    APPLIED = "applied"  # index: the leaf
    # the number of updates that a layer's deltas have seen
    UPDATES = "updates"  # layer
    # a small array that says that a copy to another process has arrived
    MARK = "mark"  # index: the row of the copy


class Owner(StrEnum):
    """The accounts to which the bytes of buffers are counted in reports and ledgers."""

    PARAMETER = "parameter"
    # stashed, predicted and corrected parameters, and what is remembered of their updates
    VERSION = "version"
    OPTIMIZER = "optimizer"
    STATE = "state"
    CONSTANT = "constant"
    HANDED = "handed"  # values that the first half of a backward leaves for the second
    GRADIENT = "gradient"
    RESIDUAL = "residual"
    EDGE = "edge"
    BATCH = "batch"
    METRIC = "metric"
    TEMPORARY = "temporary"  # memory of a program while it runs


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """The properties of a kind of value, which is a line of the table `VALUES`.

    Attributes:
        owner: the account to which the bytes of its buffers are counted.
        lasts: it lies on the devices between steps.
        alone: there is one copy of it, at the place where its layer runs.
        fed: it comes from the host when a program reads it.
        follows: it belongs to a layer. If the layer moves, its old buffer ends only after the value
            has arrived at the new place.
        passed_on: each reader adds to it and passes it on, so it is no longer valid at the place
            that it was sent from.
        gathered: updates of other layers read it, by copies.
        remembered: it records what updates did, and is kept in a stream from one update to the
            next.
    """

    owner: Owner
    lasts: bool = False
    alone: bool = False
    fed: bool = False
    follows: bool = False
    passed_on: bool = False
    gathered: bool = False
    remembered: bool = False


VALUES: dict[ValueKind, ValueInfo] = {
    ValueKind.PARAMETER: ValueInfo(Owner.PARAMETER, lasts=True, follows=True),
    ValueKind.OPTIMIZER: ValueInfo(Owner.OPTIMIZER, lasts=True, alone=True, follows=True),
    ValueKind.STATE: ValueInfo(Owner.STATE, lasts=True, follows=True),
    ValueKind.CONSTANT: ValueInfo(Owner.CONSTANT, lasts=True, follows=True),
    ValueKind.BATCH: ValueInfo(Owner.BATCH, fed=True),
    ValueKind.SEED: ValueInfo(Owner.BATCH, fed=True),
    ValueKind.TENSOR: ValueInfo(Owner.EDGE),
    ValueKind.COTANGENT: ValueInfo(Owner.EDGE, passed_on=True),
    ValueKind.RESIDUAL: ValueInfo(Owner.RESIDUAL),
    ValueKind.HANDED: ValueInfo(Owner.RESIDUAL),
    ValueKind.GRADIENT: ValueInfo(Owner.GRADIENT, alone=True, gathered=True),
    ValueKind.LOSS: ValueInfo(Owner.METRIC),
    ValueKind.AUX: ValueInfo(Owner.METRIC),
    ValueKind.WEIGHT: ValueInfo(Owner.METRIC, gathered=True),
    ValueKind.METRIC: ValueInfo(Owner.METRIC),
    ValueKind.EXCHANGE: ValueInfo(Owner.METRIC, gathered=True),
    ValueKind.PREDICTED: ValueInfo(Owner.VERSION, follows=True),
    ValueKind.CORRECTED: ValueInfo(Owner.VERSION, follows=True),
    ValueKind.DELTA: ValueInfo(Owner.VERSION, alone=True, follows=True, remembered=True),
    ValueKind.APPLIED: ValueInfo(Owner.VERSION, alone=True, follows=True, remembered=True),
    ValueKind.UPDATES: ValueInfo(Owner.VERSION, alone=True, follows=True, remembered=True),
    ValueKind.MARK: ValueInfo(Owner.METRIC),
}
"""The one table of kinds of values."""


class Value(NamedTuple):
    """The name of a thing that is computed: its kind, and what distinguishes it within the kind.

    The name does not say where the value lies. `examples` are the examples of its micro-batch that
    the value is made of (of each micro-batch, if it is a sum over several); None stands for all.

    >>> print(Value(ValueKind.RESIDUAL, 2, layer=3, microbatch=1))
    residual 2 layer 3 micro-batch 1
    """

    kind: ValueKind
    index: int = 0  # pyright: ignore[reportIncompatibleMethodOverride] - a tuple hashes fast; nobody searches it
    layer: int = NONE
    microbatch: int = NEVER
    version: int = NEVER
    examples: Examples | None = None

    def shifted(self, microbatches: int, versions: int) -> "Value":
        """Names the same value some micro-batches and versions later in a stream.

        >>> str(Value(ValueKind.PARAMETER, 4, version=1).shifted(8, -2))
        'parameter 4 version -1'
        """
        kind, index, layer, m, v, e = self
        return Value(
            kind,
            index,
            layer,
            m if m == NEVER else m + microbatches,
            v if v == NEVER else v + versions,
            e,
        )

    def __str__(self) -> str:
        words = [self.kind, str(self.index)]
        if self.layer != NONE:
            words.append(f"layer {self.layer}")
        for name, number in (("micro-batch", self.microbatch), ("version", self.version)):
            if number != NEVER:
                words.append(f"{name} {number}")
        if self.examples is not None:
            words.append(f"examples {self.examples}")
        return " ".join(words)
