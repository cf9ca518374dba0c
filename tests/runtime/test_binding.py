"""Each row gets the program or the copy that runs it, and the bytes that it makes and ends."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jvpipe.ir.buffers import HOST, Buffer, Copy, Lowered
from jvpipe.ir.kinds import KINDS, Kind
from jvpipe.ir.rows import Row
from jvpipe.ir.values import Value, ValueKind
from jvpipe.runtime.engine.binding import bind_rows
from tests.runtime.hand_made import STEP, Executable, bound


def test_bytes_are_counted_where_they_are_born_and_where_they_die() -> None:
    feed, forward, send = bound(Executable()).instructions
    assert [
        (it.target, it.born_bytes, it.source, it.freed_bytes) for it in (feed, forward, send)
    ] == [
        (0, 8, 0, 0),
        (0, 8, 0, 8),
        (1, 8, 0, 8),
    ]
    assert bound(Executable()).temporary_bytes == [0, 100, 0]
    assert (feed.feed, forward.feed) == (("batch", 0), None)


def test_a_row_takes_its_inputs_in_the_order_in_which_it_reads_them() -> None:
    table: list[Any] = ["parameter", "batch", "made", None]
    step = bound(
        Executable(),
        lowered=replace(STEP, rows=(STEP.rows[0], replace(STEP.rows[1], reads=(1, 0)))),
    )
    assert [tuple(it.gather(table)) for it in step.instructions] == [(), ("batch", "parameter")]
    assert tuple(bound(Executable()).instructions[2].gather(table)) == ("made",)


def test_a_copy_puts_an_array_on_the_device_of_what_it_writes() -> None:
    here, there, *_ = jax.devices()
    (copy,) = bound(Executable()).instructions[2].run(jax.device_put(np.ones(2, np.float32), here))
    assert copy.devices() == {there}


def test_what_leaves_the_host_is_known_and_a_swap_goes_there_and_back() -> None:
    value = Value(ValueKind.RESIDUAL, 0, 0, 0)
    buffers = tuple(Buffer(value, 0, 8, copy) for copy in (Copy.OWN, Copy.HOST, Copy.FETCHED))
    rows = (
        Row(Kind.OUT, 0, 0, 0, 0, (0,), (1,)),
        Row(Kind.FREE, 0, 0, 0, 0, (0, 1), (), (0,)),
        Row(Kind.IN, 0, 0, 0, 0, (1,), (2,), (1,)),
    )
    step = bind_rows(
        Lowered(rows, buffers, 1, (), (2,)),
        jax.devices()[:1],
        lambda row: Executable(),
        lambda row: False,
        lambda b: None,
    )
    assert step.targets == [HOST, 0, 0]
    assert step.leaves_host == {2}
    assert step.waits
    assert not bound(Executable()).waits
    out, free, back = step.instructions
    here = jax.device_put(np.ones(2, np.float32), jax.devices()[0])
    (away,) = out.run(here)
    assert (away.sharding.memory_kind, free.run(here, away)) == ("pinned_host", ())
    assert back.run(away)[0].sharding.memory_kind == "device"


@pytest.mark.parametrize("kind", Kind)
def test_exactly_the_kinds_that_compute_ask_for_a_program(kind: Kind) -> None:
    asked = []

    def executable_of(row: Row) -> Executable:
        asked.append(row.kind)
        return Executable()

    step = Lowered((Row(kind, 0, 0, 0, 0, (0,), (0,)),), STEP.buffers, 4, (0,), ())
    bind_rows(step, jax.devices()[:2], executable_of, lambda row: False, lambda b: None)
    assert bool(asked) == KINDS[kind].computes
