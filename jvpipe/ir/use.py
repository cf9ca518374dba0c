"""The uses of weights: which version each layer read or made, for which micro-batch."""

from dataclasses import dataclass

from jvpipe.ir.kinds import Kind


@dataclass(frozen=True, slots=True)
class Use:
    """One layer, one micro-batch: the version that its forward (F) or backward (B) read, or that its update (U) made.

    Numbers count from a first one that whoever keeps the use knows. `tied` are the versions of
    parameters (by index) that follow another stage. `shift` is, for a forward, how many updates
    ahead its weights were predicted; of a backward, by how many they were corrected.
    """

    kind: Kind
    layer: int
    microbatch: int
    version: int
    tied: tuple[tuple[int, int], ...] = ()
    shift: int = 0

    def moved(self, microbatches: int, versions: int) -> "Use":
        """Returns the same use, its micro-batch and version counted from other ones.

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
    """Lists the uses of a synchronous step: all of its micro-batches read one version, and one update makes the next.

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
    return (*reads, *(Use(Kind.U, layer, microbatches - 1, 1) for layer in range(layers)))
