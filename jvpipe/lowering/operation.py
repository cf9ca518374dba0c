"""Operations: what is computed from which values, before anything has a place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from jvpipe.ir.buffers import Copy
from jvpipe.ir.examples import Examples
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import AddRun, Run
from jvpipe.ir.values import Value


class Write(NamedTuple):
    """A value that an operation yields, its size, and which copy of it that is."""

    value: Value
    bytes: int
    copy: Copy = Copy.OWN


class Delivery(NamedTuple):
    """A value that goes to where these layers run, as soon as it exists.

    `examples` are the slices of those of their replicas that get it; None: the first replica gets
    it, or the only one.
    """

    value: Value
    layers: tuple[int, ...]
    examples: tuple[Examples | None, ...] = (None,)


@dataclass(frozen=True, slots=True)
class Operation:
    """One computation, of a layer or of none (for all), for a micro-batch or for none (a whole
    step).

    A value both read and written is updated in place. `delivers` are copies that leave at once for
    layers that may run elsewhere. What it `forgets` nobody reads afterwards. Its `examples` tell
    which replica of its layer's stage runs it (None: the first one).

    >>> from jvpipe.ir.values import ValueKind
    >>> edge = Value(ValueKind.TENSOR, 7, microbatch=0)
    >>> forward = Operation(Kind.F, 3, 0, (), (Write(edge, 4),), delivers=(Delivery(edge, (4, 9)),))
    >>> f"{forward.kind}{forward.microbatch} of layer {forward.layer} makes {forward.writes[0].value}"
    'F0 of layer 3 makes tensor 7 micro-batch 0'
    """

    kind: Kind
    layer: int
    microbatch: int
    reads: tuple[Value, ...]
    writes: tuple[Write, ...]
    run: Run = None
    delivers: tuple[Delivery, ...] = ()
    forgets: tuple[Value, ...] = ()
    examples: Examples | None = None


def summed(
    layer: int,
    m: int,
    parts: Sequence[Sequence[Value]],
    sums: Sequence[Value],
    writes: Sequence[Write],
) -> Iterator[Operation]:
    """Yields what adds up the gradients of several replicas in their order.

        REDUCE   sums  = first + second       one replica after another sends its own,
        REDUCE   sums += third                so that only one replica's lie beside the sums

    Args:
        layer: whose gradients.
        m: the micro-batch, or NONE.
        parts: those of each replica.
        sums: what they come to.
        writes: the same, with their bytes.
    """
    if not sums:
        return
    first, *others = parts
    before, run = first, None
    for part in others:
        reads = tuple(chain(*zip(before, part, strict=True)))
        yield Operation(
            Kind.REDUCE,
            layer,
            m,
            reads,
            tuple(writes),
            run,
        )
        before, run = sums, AddRun()  # from now on in place
