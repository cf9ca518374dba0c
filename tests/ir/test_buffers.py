"""The buffer table, against a step written down by hand."""

from jvpipe.ir.buffers import Buffer, Lowered, peaks
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import Row
from jvpipe.ir.values import Value, ValueKind

# Device 0 makes an edge of 30 bytes from a parameter of 100, keeps a residual of 20 for its
# backward, and sends the edge to device 1, which answers with a cotangent of 30.
BUFFERS = (
    Buffer(Value(ValueKind.PARAMETER, version=0), 0, 100),
    Buffer(Value(ValueKind.TENSOR, microbatch=0), 0, 30),
    Buffer(Value(ValueKind.RESIDUAL, layer=0, microbatch=0), 0, 20),
    Buffer(Value(ValueKind.TENSOR, microbatch=0), 1, 30),
    Buffer(Value(ValueKind.COTANGENT, microbatch=0), 1, 30),
    Buffer(Value(ValueKind.COTANGENT, microbatch=0), 0, 30),
)
ROWS = (
    Row(Kind.F, 0, 0, 0, 0, (0,), (1, 2)),
    Row(Kind.SEND, 0, 0, 0, 0, (1,), (3,), (1,)),
    Row(Kind.B, 1, 1, 1, 0, (3,), (4,), (3,)),
    Row(Kind.SEND, 1, 1, 1, 0, (4,), (5,), (4,)),
    Row(Kind.B, 0, 0, 0, 0, (0, 2, 5), (0,), (2, 5)),
)
STEP = Lowered(ROWS, BUFFERS, 1, (0,), ())


def test_buffers_are_born_once_and_die() -> None:
    assert STEP.changes() == [((1, 2), ()), ((3,), (1,)), ((4,), (3,)), ((5,), (4,)), ((), (2, 5))]


def test_peaks_say_when_and_who() -> None:
    first, second, host = peaks(STEP, 2)
    assert (first.bytes, first.row) == (150, ROWS[0])
    assert first.holders == (("parameter", 100), ("edge", 30), ("residual", 20))
    assert (second.bytes, second.row) == (60, ROWS[2])
    assert second.holders == (("edge", 60),)
    assert host.bytes == 0


def test_temporaries_count_on_the_device_that_runs() -> None:
    first, second, host = peaks(STEP, 2, [0, 0, 7, 0, 500])
    assert (first.bytes, first.row) == (650, ROWS[4])
    assert (second.bytes, second.row) == (67, ROWS[2])
    assert host.bytes == 0


def test_an_idle_device_holds_nothing() -> None:
    assert peaks(STEP, 3)[2].bytes == 0
    assert peaks(STEP, 3)[2].row is None
