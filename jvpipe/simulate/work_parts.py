"""The parts of a stage's work: the kinds of its tasks, and which of them a simulation has."""

from collections.abc import Sequence
from dataclasses import dataclass

from jvpipe.ir.kinds import Kind

PARTS = (
    Kind.F,
    Kind.B,
    Kind.R,
    Kind.OUT,
    Kind.IN,
    Kind.SEND,
    Kind.RETURN,
    Kind.I,
    Kind.W,
    Kind.REDUCE,
    Kind.U,
)
"""The kinds of a stage's tasks, in the order of the fields of `StageLoad`."""


@dataclass(frozen=True)
class Features:
    """The parts that are simulated besides F and B; a part that takes no time can be left out.

    Attributes:
        recompute: whether forwards are recomputed (R).
        swaps: whether values are swapped (OUT, IN).
        sends: whether values are sent between stages (SEND, RETURN).
        shared: whether sends take the links to the host.
        reduces: whether replicas add up their gradients (REDUCE).
        updates: whether stages are updated (U).
        machines: for each place, the machine of each device there; empty if no networks are shared.
    """

    recompute: bool = True
    swaps: bool = True
    sends: bool = True
    shared: bool = False
    reduces: bool = False
    updates: bool = False
    machines: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def of(
        parts_s: Sequence[Sequence[float]],
        *,
        shared: bool,
        swaps: bool = False,
        machines: tuple[tuple[int, ...], ...] = (),
    ) -> "Features":
        """Finds the parts that stages need.

        Args:
            parts_s: for each stage, seconds in the order of `PARTS`.
            shared: whether sends take the links to the host.
            swaps: whether something is swapped, even if the copies take no time. Swaps also have
                waits, which limit the memory that they take.
            machines: as in `Features`.
        """
        by_part = zip(*parts_s, strict=True)
        columns = zip(PARTS, by_part, strict=True)
        takes = {part: any(column) for part, column in columns}
        sends = takes[Kind.SEND] or takes[Kind.RETURN]
        reduces = takes[Kind.REDUCE]
        return Features(
            recompute=takes[Kind.R],
            swaps=swaps or takes[Kind.OUT] or takes[Kind.IN],
            sends=sends,
            shared=shared and sends,
            reduces=reduces,
            updates=takes[Kind.U],
            machines=machines if sends or reduces else (),
        )
