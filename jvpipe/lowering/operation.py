"""Operations: what is computed from which values, before anything has a place."""

from dataclasses import dataclass
from typing import NamedTuple

from jvpipe.ir.buffers import Copy
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import Run
from jvpipe.ir.values import Value


class Write(NamedTuple):
    """A value that an operation yields, its size, and which copy of it that is."""

    value: Value
    bytes: int
    copy: Copy = Copy.OWN


class Delivery(NamedTuple):
    """A value that goes to where these layers run, as soon as it is there."""

    value: Value
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """What a layer (or none: what concerns all) computes for a micro-batch (or none: for a step).

    A value both read and written is updated in place. `delivers` are copies that leave at once for layers that may run
    elsewhere. What it `forgets` nobody reads afterwards.
    """

    kind: Kind
    layer: int
    microbatch: int
    reads: tuple[Value, ...]
    writes: tuple[Write, ...]
    run: Run = None
    delivers: tuple[Delivery, ...] = ()
    forgets: tuple[Value, ...] = ()
