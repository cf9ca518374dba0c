"""The uses of weights: the version that each layer read or made for each micro-batch."""

from dataclasses import dataclass

from jvpipe.ir.kinds import Kind


@dataclass(frozen=True, slots=True)
class Use:
    """The version of weights that a layer's task read or made for a micro-batch.

    A forward (F) or backward (B) reads a version; an update (U) makes one. In a lowered step,
    micro-batches and versions count from the beginning of the step; in the record of a run they
    count from the beginning of the run. `tied` has a pair (parameter, version) for each parameter
    that several stages read. The version is that of the first reader's stage. `shift` is the number
    of updates by which a forward's weights were predicted, or a backward's weights were corrected.
    """

    kind: Kind
    layer: int
    microbatch: int
    version: int
    tied: tuple[tuple[int, int], ...] = ()
    shift: int = 0

    def moved(self, microbatches: int, versions: int) -> "Use":
        """Returns the corresponding use some micro-batches and versions later.

        >>> use = Use(Kind.F, 2, 1, 0).moved(8, 8)
        >>> use.microbatch, use.version
        (9, 8)
        """
        tied = tuple((p, v + versions) for p, v in self.tied)
        return Use(
            self.kind,
            self.layer,
            self.microbatch + microbatches,
            self.version + versions,
            tied,
            self.shift,
        )


def synchronous_uses(layers: int, microbatches: int) -> tuple[Use, ...]:
    """Lists the uses of a synchronous step.

    All micro-batches read version 0, and each layer's update makes version 1.

    Args:
        layers: the number of layers.
        microbatches: the number of micro-batches of the step.

    >>> [f"{use.kind}{use.microbatch} {use.version}" for use in synchronous_uses(1, 2)]
    ['F0 0', 'B0 0', 'F1 0', 'B1 0', 'U1 1']
    """
    passes = (Kind.F, Kind.B)
    reads = [
        Use(kind, layer, m, 0)
        for m in range(microbatches)
        for layer in range(layers)
        for kind in passes
    ]
    updates = [Use(Kind.U, layer, microbatches - 1, 1) for layer in range(layers)]
    return (*reads, *updates)
