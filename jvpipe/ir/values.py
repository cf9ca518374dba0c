"""Values: the names of everything that a run computes, independent of the place that stores it.

A value may have copies at several places. Each copy is a buffer (buffers.py). If a layer moves, the
buffers of its values change, but the values keep their names. So a name means the same under every
plan. The table `VALUES` has one line per kind, with the properties that several parts of jvpipe
read.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from jvpipe.ir.examples import Examples

NONE = -1
"""Stands for a layer, stage or micro-batch that a value or row does not have."""
NEVER = -(10**9)
"""Stands for a micro-batch or version that a value does not have.

It is far below 0, because small negative numbers are in use: each step of a stream counts from its
own beginning, so micro-batches and versions of earlier steps have numbers below 0.
"""


class ValueKind(StrEnum):
    """The kinds of values.

    The comment above a kind says what the values are. The comment beside it lists the
    fields of `Value` that tell values of the kind apart.
    """

    # a leaf of the parameters; version: the number of updates before it, NEVER if it is frozen
    PARAMETER = "parameter"  # index: the leaf; version
    # a leaf of the optimizer's state; layer: NONE if it belongs to the optimizer's global program
    OPTIMIZER = "optimizer"  # index: the leaf; layer
    # a leaf of the model state; micro-batch: the one that reads it, NEVER if no layer writes it
    STATE = "state"  # index: the leaf; micro-batch
    # an array that the loss captured
    CONSTANT = "constant"  # index
    # a leaf of a micro-batch
    BATCH = "batch"  # index: the leaf; micro-batch
    # the seed of a micro-batch's random numbers
    SEED = "seed"  # micro-batch
    # an edge: a tensor between layers
    TENSOR = "tensor"  # index: the edge; micro-batch
    # the sum of an edge's cotangents so far, to which the edge's last reader adds first
    COTANGENT = "cotangent"  # index: the edge; micro-batch
    # a value that a layer's forward leaves for its backward
    RESIDUAL = "residual"  # index: its number in the layer; layer; micro-batch
    # a value that the first half of a backward leaves for the second
    HANDED = "handed"  # index: its number in the layer; layer; micro-batch
    # a sum of gradients; version: the number of the update that reads it; micro-batch: NEVER or,
    # if devices take turns, the first micro-batch whose gradients are in the device's sum
    GRADIENT = "gradient"  # index: the leaf; layer: the reader that adds; version; micro-batch
    # the loss of a micro-batch, or one of the two fields of a `Weighted` loss
    LOSS = "loss"  # index: 0 for the loss or its total, 1 for its weight; micro-batch
    # a leaf of the aux that the loss function returns besides the loss
    AUX = "aux"  # index: the leaf; micro-batch
    # a sum of the weights of losses; version: the number of the update that reads the sum. The sum
    # for the metrics of a stream's step has the step's first micro-batch instead of a version
    WEIGHT = "weight"  # layer: that of the loss; version; micro-batch
    # a result of a step: the loss, a group of aux, or the norm of the gradient
    METRIC = "metric"  # index; micro-batch: the first of its step
    # a small value that one piece of the optimizer hands to another
    EXCHANGE = "exchange"  # index; layer: the layer of the piece that makes it; micro-batch
    # a parameter moved ahead for a forward
    PREDICTED = "predicted"  # index: the leaf; micro-batch
    # a parameter moved back for a backward
    CORRECTED = "corrected"  # index: the leaf; micro-batch
    # the running mean of a parameter's updates
    DELTA = "delta"  # index: the leaf
    # a parameter's last update
    APPLIED = "applied"  # index: the leaf
    # the number of updates in a layer's running means
    UPDATES = "updates"  # layer
    # a small array that tells another process that a copy has arrived
    MARK = "mark"  # index: the number of the row that makes the (last) copy


class Owner(StrEnum):
    """The accounts under which reports and ledgers count the bytes of buffers."""

    PARAMETER = "parameter"
    # older, predicted and corrected versions of parameters, and records of their updates
    VERSION = "version"
    OPTIMIZER = "optimizer"
    STATE = "state"
    CONSTANT = "constant"
    GRADIENT = "gradient"
    RESIDUAL = "residual"
    EDGE = "edge"
    BATCH = "batch"
    METRIC = "metric"
    TEMPORARY = "temporary"  # memory of a program while it runs


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """The properties of one kind of value: a line of the table `VALUES`.

    Attributes:
        owner: the account under which the bytes of its buffers are counted.
        lasts: whether it is part of the state that a step leaves for the next step.
        alone: whether it has only one copy, at the place where its layer runs.
        fed: whether it is copied from the host when a program first reads it.
        follows: whether it moves with its layer. The old buffer is then freed only after the value
            has arrived at the new place.
        passed_on: whether each reader adds to it and sends it on. A reader's own copy is no longer
            valid after that.
        gathered: whether updates and reductions at other places read copies of it.
        remembered: whether it records past updates. A stream keeps it from one update to the next.
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
"""The properties of each kind of value."""


class Value(NamedTuple):
    """The name of a value: its kind, and the fields that tell it apart from others of its kind.

    The name does not say where the value lies. `ValueKind` says which fields each kind uses.
    `examples` is set for a replica's part of a value: it is the slice of the micro-batch that the
    replica works on. A sum over several micro-batches has the same slice of each. None stands for
    all examples.

    >>> print(Value(ValueKind.RESIDUAL, 2, layer=3, microbatch=1))
    residual 2 layer 3 micro-batch 1
    """

    kind: ValueKind
    index: int = 0  # pyright: ignore[reportIncompatibleMethodOverride] - tuples hash fast; `tuple.index` is unused
    layer: int = NONE
    microbatch: int = NEVER
    version: int = NEVER
    examples: Examples | None = None

    def shifted(self, microbatches: int, versions: int) -> "Value":
        """Names the corresponding value some micro-batches and versions later in a stream.

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
