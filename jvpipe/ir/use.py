"""What a layer did with a micro-batch, in versions of its weights."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Use:
    """One layer, one micro-batch: the version that its forward (F) or backward (B) read, or that its update (U) made.

    Numbers count from a first one that whoever keeps the use knows. `tied` are the versions of parameters (by index)
    that follow another stage. Of a forward, `shift` is how many updates ahead its weights were predicted; of a
    backward, by how many they were corrected.
    """

    kind: str
    layer: int
    microbatch: int
    version: int
    tied: tuple[tuple[int, int], ...] = ()
    shift: int = 0

    def moved(self, microbatches: int, versions: int) -> "Use":
        """The same, counted from other numbers.

        >>> Use("F", 2, 1, 0).moved(8, 8)
        Use(kind='F', layer=2, microbatch=9, version=8, tied=(), shift=0)
        """
        tied = tuple((p, v + versions) for p, v in self.tied)
        return Use(self.kind, self.layer, self.microbatch + microbatches, self.version + versions, tied, self.shift)
