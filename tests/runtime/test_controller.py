"""The controller runs rows in their order, counts their bytes, and names the row that failed
first.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jvpipe.runtime.engine.binding import Bound
from jvpipe.runtime.engine.controller import Controller, Moment, describe
from jvpipe.runtime.engine.failures import StageError
from jvpipe.runtime.engine.tensors import Ledger
from tests.lowering.stream.test_lower import M, stream
from tests.runtime.hand_made import Executable, F, bound

FEEDS = {("batch", 0): [np.array([1.0, 2.0], np.float32)]}


def controller() -> Controller:
    """One whose two devices hold the parameter's four bytes."""
    ledger = Ledger(tuple(jax.devices()[:2]))
    ledger.hold(0, 4)
    return Controller(ledger, microbatches=1)


def run(it: Controller, step: Bound) -> tuple[Sequence[Any], Sequence[Any]]:
    return it.run(step, [jax.numpy.float32(10.0)], FEEDS, Moment(3))


def test_a_step_gives_what_lasts_and_its_metrics_and_leaves_no_other_byte() -> None:
    it = controller()
    (parameter,), (metric,) = run(it, bound(Executable()))
    assert float(parameter) == 10.0
    np.testing.assert_array_equal(metric, [11.0, 12.0])
    assert metric.devices() == {jax.devices()[1]}
    assert it.ledger.live == [4, 0, 0]
    assert it.ledger.peak == [4 + 8 + 8 + 100, 8, 0], (
        "the parameter, the batch, what F makes, what it needs meanwhile"
    )


def test_a_program_that_raises_is_named_and_its_bytes_are_forgotten() -> None:
    it = controller()
    with pytest.raises(
        StageError, match=r"^step 3, micro-batch 0: stage 0, task 0F0\[layer 0\], device 0 failed"
    ) as error:
        run(it, bound(Executable(ValueError("no room"))))
    assert "ValueError: no room" in str(error.value)
    assert it.ledger.live == [4, 0, 0]
    assert len(error.value.table) == 4, "whoever mends the state needs the arrays that there were"


def test_messages_count_steps_as_their_reader_does() -> None:
    it = controller()
    it.first_step = 1
    with pytest.raises(StageError, match=r"^step 4, micro-batch 0: "):
        run(it, bound(Executable(ValueError())))


def test_rows_of_a_drain_are_of_the_step_before_and_of_their_micro_batch_if_they_have_one() -> None:
    rows = [row for row in stream("pipedream").drain(2).lowered.rows if row.layer == 0]
    assert [describe(row, Moment(2, flows=True), M) for row in rows] == [
        "step 1, micro-batch 1: stage 0, task 0B1[layer 0], device 0",
        "step 1, micro-batch 1: stage 0, task 0U1[layer 0], device 0",
        "step 2: stage 0, task 0SEND[layer 0], device 0",  # the newest version of a tied parameter
    ]


def test_an_interrupt_goes_through_as_it_is() -> None:
    it = controller()
    with pytest.raises(KeyboardInterrupt):
        run(it, bound(Executable(KeyboardInterrupt())))
    assert it.ledger.live == [4, 0, 0]


def test_a_row_that_can_fail_is_looked_at_until_it_has_run() -> None:
    it = controller()
    run(it, bound(Executable(), watched=True))
    run(it, bound(Executable(), watched=True))
    assert [(mark.row, mark.at) for mark in it.marks] == [(F, Moment(3))] * 2
    it.settle(1)
    assert len(it.marks) == 1
    it.settle()
    assert not it.marks


def test_what_a_failed_step_dispatched_concerns_nobody_any_more() -> None:
    it = controller()
    run(it, bound(Executable(), watched=True))
    step = bound(Executable(), watched=True)
    broken = [
        *step.instructions[:2],
        step.instructions[2]._replace(run=Executable(OSError("no link"))),
    ]
    with pytest.raises(StageError, match="no link"):
        run(it, replace(step, instructions=tuple(broken)))
    assert len(it.marks) == 1, "that of the step before"


def test_an_error_without_a_row_says_so() -> None:
    assert (
        str(controller().failure(OSError("gone")))
        == "something outside of all steps failed: OSError: gone"
    )
