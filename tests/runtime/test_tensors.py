"""The ledger counts bytes by device, and limits name who holds too many."""

import jax
import pytest

from jvpipe.ir.buffers import HOST, Peak
from jvpipe.ir.kinds import Kind
from jvpipe.ir.layers import Array
from jvpipe.ir.rows import Row
from jvpipe.runtime.engine.tensors import Ledger, Limits, MemoryLimitExceeded

DEVICES = tuple(jax.devices()[:2])
LOW, HIGH = (
    Peak(10, None, (("parameter", 10),)),
    Peak(1200, Row(Kind.B, 1, 1, 4, 2, (), ()), (("residual", 1100),)),
)
EMPTY = Peak(0, None, ())


def test_a_peak_is_what_was_held_at_once_and_counts_what_a_program_needs() -> None:
    ledger = Ledger(DEVICES)
    ledger.hold(0, 100)
    ledger.hold(0, 20, temporary=7)
    ledger.drop(0, 100)
    ledger.hold(0, 30)
    ledger.hold(HOST, 5)
    assert ledger.live_bytes == {DEVICES[0]: 50, DEVICES[1]: 0}
    assert ledger.peak_bytes == {DEVICES[0]: 127, DEVICES[1]: 0}
    assert (ledger.host_bytes, ledger.host_peak_bytes) == (5, 5)


def test_a_new_run_counts_anew() -> None:
    ledger = Ledger(DEVICES)
    live, versions = ledger.live, ledger.versions
    ledger.hold(1, 100)
    versions.drained()
    ledger.begin()
    assert ledger.peak_bytes == {DEVICES[0]: 0, DEVICES[1]: 0}
    assert ledger.live is live, "the controller writes into this very list"
    assert ledger.versions is not versions


def test_an_exceeded_limit_names_the_device_the_task_the_holders_and_one_that_would_do() -> None:
    with pytest.raises(MemoryLimitExceeded) as refused:
        Limits(1199).check((LOW, HIGH, EMPTY), DEVICES)
    told = str(refused.value)
    assert told.startswith(
        f"{DEVICES[1]} would hold 1,200 bytes at task 1B2[layer 4], the limit is 1,199"
    )
    assert "It holds residual 1,100" in told
    Limits(refused.value.smallest_limit_bytes).check((LOW, HIGH, EMPTY), DEVICES)


def test_what_is_parked_lies_beside_what_is_swapped() -> None:
    parked = {("parameter", Array("gone", (4,), "float32", 16)): None}
    peaks = (LOW, LOW, Peak(10, None, (("residual", 10),)))
    with pytest.raises(
        MemoryLimitExceeded, match=r"the host would hold 26 bytes while asleep.*parked 16"
    ) as refused:
        Limits(None, 25, parked).check(peaks, DEVICES, "while asleep")
    Limits(None, refused.value.smallest_limit_bytes, parked).check(peaks, DEVICES)
    Limits(None, 25).check(peaks, DEVICES)


def test_without_limits_anything_goes() -> None:
    Limits().check((HIGH, HIGH, HIGH), DEVICES)
