"""A step of three rows, drawn by hand: what binding and controller see of a model, without one.

b0 parameter 0, on device 0 (4 bytes), lasts       b1 batch, b2 what F makes, b3 its copy on device 1
FEED -> b1      F: b0, b1 -> b2, frees b1      SEND: b2 -> b3, frees b2
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax

from jvpipe.ir.buffers import Buffer, Lowered
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import Row
from jvpipe.ir.values import Value, ValueKind
from jvpipe.runtime.engine.binding import Bound, bind_rows

BUFFERS = (
    Buffer(Value(ValueKind.PARAMETER, 0, version=0), 0, 4),
    Buffer(Value(ValueKind.BATCH, 0, microbatch=0), 0, 8),
    Buffer(Value(ValueKind.TENSOR, 0, microbatch=0), 0, 8),
    Buffer(Value(ValueKind.LOSS, 0, microbatch=0), 1, 8),
)
FEED = Row(Kind.FEED, 0, 0, 0, 0, (), (1,))
F = Row(Kind.F, 0, 0, 0, 0, (0, 1), (2,), (1,))
SEND = Row(Kind.SEND, 0, 0, 0, 0, (2,), (3,), (2,))
STEP = Lowered((FEED, F, SEND), BUFFERS, 1, (0,), (3,))


class Executable:
    """Adds a parameter to a batch, or raises; it says that it needs 100 bytes meanwhile."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        if self.error:
            raise self.error
        return [arrays[0] + arrays[1]]

    def memory_analysis(self) -> Any:
        return SimpleNamespace(temp_size_in_bytes=100)


def bound(run: Callable[..., Any], *, watched: bool = False, lowered: Lowered = STEP) -> Bound:
    """The step bound to two devices; the program of F is `run`."""
    return bind_rows(
        lowered,
        jax.devices()[:2],
        lambda row: run,
        lambda row: watched and row.kind is Kind.F,
        lambda b: None,
    )
