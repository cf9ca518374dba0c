"""Values: what a run computes, named without saying where it lies."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from jvpipe.ir.examples import Examples

NONE = -1
"""Stands where an operation or a row is of no stage, layer or micro-batch, or a value of no layer."""
NEVER = -(10**9)
"""Stands where a value is of no micro-batch or version; counted from a later step, others may be below 0."""


class ValueKind(StrEnum):
    """The kinds of values. The comment says what tells values of a kind apart."""

    PARAMETER = "parameter"  # index: leaf; version: the updates before it, NEVER if it is frozen
    OPTIMIZER = "optimizer"  # index: leaf of the optimizer's state; layer: whose, NONE for what belongs to all
    STATE = "state"  # index: leaf of the model state; micro-batch: the one that finds it, NEVER if nobody writes it
    CONSTANT = "constant"  # index: of the arrays that the loss captured
    BATCH = "batch"  # index: leaf; micro-batch
    SEED = "seed"  # micro-batch
    TENSOR = "tensor"  # index: edge between layers; micro-batch
    COTANGENT = "cotangent"  # index: edge; micro-batch: the sum so far, last reader first
    RESIDUAL = "residual"  # index: of those that the layer's forward leaves; layer; micro-batch
    HANDED = (
        "handed"  # index: of those that one half of a backward leaves the other; layer; micro-batch
    )
    GRADIENT = "gradient"  # index: leaf; layer: the reader whose sum it is; version: the update that takes it
    LOSS = "loss"  # index: 0 the total, 1 the weight; micro-batch
    AUX = "aux"  # index: leaf; micro-batch
    WEIGHT = "weight"  # layer: that of the loss; version: the update whose micro-batches are summed
    METRIC = "metric"  # index: which; micro-batch: the first of its step
    EXCHANGE = "exchange"  # index: a small value between the optimizer's pieces; layer: its maker; micro-batch
    PREDICTED = "predicted"  # index: leaf; micro-batch: a parameter moved ahead for a forward
    CORRECTED = "corrected"  # index: leaf; micro-batch: a parameter moved back for a backward
    DELTA = "delta"  # index: leaf: the running mean of a parameter's updates
    APPLIED = "applied"  # index: leaf: a parameter's last update
    UPDATES = "updates"  # layer: how many updates its deltas have seen
    MARK = "mark"  # index: the row of the copy that has arrived


class Owner(StrEnum):
    """On whose account a buffer's bytes are."""

    PARAMETER = "parameter"
    VERSION = "version"  # of parameters: stashed, predicted, corrected, and what is remembered of their updates
    OPTIMIZER = "optimizer"
    STATE = "state"
    CONSTANT = "constant"
    HANDED = (
        "handed"  # index: of those that one half of a backward leaves the other; layer; micro-batch
    )
    GRADIENT = "gradient"
    RESIDUAL = "residual"
    EDGE = "edge"
    BATCH = "batch"
    METRIC = "metric"
    TEMPORARY = "temporary"  # of a program while it runs


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """The line of a kind in the table.

    `lasts`: lies on the devices between steps. `alone`: there is one copy of it, where its layer
    runs. `fed`: comes from the host when it is read. `follows`: belongs to a layer, so that it has
    arrived elsewhere before it ends where the layer was. `passed_on`: grows from reader to reader,
    so that it is no longer where it was sent from. `gathered`: updates of other layers gather it,
    by copies. `remembered`: what updates did, kept in a stream from one to the next.
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
    """A thing that is computed: its kind, and what tells it from others of its kind.

    It does not know where it lies. `examples` are those of its micro-batch that it is made of (of
    each, if it is a sum over several); None: of all.

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
        """Names the same value in another round of a stream, a number of micro-batches and versions later.

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
