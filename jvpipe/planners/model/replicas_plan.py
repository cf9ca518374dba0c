"""A plan of replicated stages: which layers on which devices, and the examples of a micro-batch."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class ReplicaPlan:
    """Stage s holds layers `bounds[s]` to `bounds[s + 1]` and runs on `places[s]`, micro-batches of `size` examples.

    >>> ReplicaPlan((0, 3, 4), ((0, 1, 2), (3,)), 6)
    3:1 of 3:1 layers, micro-batches of 6
    """

    bounds: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    size: int

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.places)

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many devices each stage has."""
        return tuple(map(len, self.places))

    @property
    def layers(self) -> tuple[int, ...]:
        """How many layers each stage has."""
        return tuple(b - a for a, b in pairwise(self.bounds))

    @property
    def shape(self) -> str:
        """What kind of plan it is."""
        if self.stages == 1:
            return "data parallel"
        if max(self.replicas) == 1:
            return "straight"
        return "two stages" if self.stages == 2 else "hybrid"

    def __repr__(self) -> str:
        layers = ":".join(map(str, self.layers))
        return (
            f"{':'.join(map(str, self.replicas))} of {layers} layers, micro-batches of {self.size}"
        )


def placed(
    order: tuple[int, ...], starts: list[int], replicas: list[int]
) -> tuple[tuple[int, ...], ...]:
    """The devices of stages that begin somewhere in an order of devices.

    Args:
        order: of the devices.
        starts: where each stage begins.
        replicas: how many each has.
    """
    return tuple(tuple(sorted(order[a : a + r])) for a, r in zip(starts, replicas, strict=True))
