"""Rows in the simulator: by hand, and of real models, whose peaks must be the ledger's."""

from dataclasses import replace

import optax
import pytest

from jvpipe.ir.buffers import Buffer, Copy, Lowered, peaks
from jvpipe.ir.kinds import Kind
from jvpipe.ir.plan import Plan
from jvpipe.ir.rows import Row
from jvpipe.ir.values import Value, ValueKind
from jvpipe.lowering.layout import MicrobatchLayout
from jvpipe.lowering.step import lower_step
from jvpipe.programs.model_programs import layer_programs
from jvpipe.programs.optimizer_pieces import cut_optimizer
from jvpipe.programs.store import shared_store
from jvpipe.report.chrome_trace import busy
from jvpipe.schedules.gpipe import gpipe
from jvpipe.simulate.simulator import simulate
from jvpipe.trace.graph import build_graph
from jvpipe.trace.leaves import abstract
from jvpipe.trace.loss import trace_loss
from tests.ir.test_buffers import STEP
from tests.lowering.test_step import lowered
from tests.session.tiny import begun
from tests.zoo import CASES


def seconds(row: Row) -> float:
    return {"F": 2.0, "B": 4.0, "SEND": 1.0, "FEED": 3.0}.get(row.kind, 0.5)


def test_a_step_written_by_hand() -> None:
    found = simulate(STEP, seconds)
    assert found.starts_s.tolist() == [0.0, 2.0, 3.0, 7.0, 8.0]
    assert found.step_s == 12.0
    assert found.busy_s == {
        "device 0": 6.0,
        "device 1": 4.0,
        "device 0 to 1": 1.0,
        "device 1 to 0": 1.0,
    }
    assert found.bubble_fraction == 1 - 10 / 24
    assert [(s.device, s.name, s.kind, s.start_s) for s in found.spans()] == [
        ("device 0", "0F0[layer 0]", "F", 0.0),
        ("device 0 to 1", "0SEND0[layer 0]", "SEND", 2.0),
        ("device 1", "1B0[layer 1]", "B", 3.0),
        ("device 1 to 0", "1SEND0[layer 1]", "SEND", 7.0),
        ("device 0", "0B0[layer 0]", "B", 8.0),
    ]


def test_its_bytes_over_time() -> None:
    first, second, host = simulate(STEP, seconds).curves
    assert host.most_bytes == 0
    assert dict(zip(first.t_s.tolist(), first.bytes.tolist(), strict=True)) == {
        0: 150,
        3: 120,
        7: 150,
        12: 100,
    }
    assert dict(zip(second.t_s.tolist(), second.bytes.tolist(), strict=True)) == {
        0: 0,
        2: 30,
        3: 60,
        7: 30,
        8: 0,
    }
    temporary = simulate(STEP, seconds, temporary_bytes=[0, 0, 7, 0, 500])
    assert temporary.curves[0].most_bytes == temporary.peak_bytes[0] == 650
    assert temporary.peak_bytes[1] == 67


def test_copies_on_one_link_take_turns() -> None:
    buffers = tuple(Buffer(Value(ValueKind.TENSOR, i), i % 2, 1) for i in range(4))
    rows = (
        Row(Kind.F, 0, 0, 0, 0, (), (0, 2)),
        Row(Kind.SEND, 0, 0, 0, 0, (0,), (1,)),
        Row(Kind.SEND, 0, 0, 0, 0, (2,), (3,)),
    )
    step = Lowered(rows, buffers, 0, (), (0, 1, 2, 3))
    assert simulate(step, seconds).starts_s.tolist() == [0.0, 2.0, 3.0]
    alone = simulate(step, seconds, lambda row: (f"wire {row.reads[0]}",))
    assert alone.starts_s.tolist() == [0.0, 2.0, 2.0]
    free = simulate(step, seconds, lambda row: ())
    assert free.step_s == 2.0


def test_a_copy_waits_for_what_is_enqueued_where_it_arrives_if_buffers_do() -> None:
    """1F0 runs from 4 to 10; the copy to it is ready at 4, and enqueued before or after it."""
    buffers = tuple(Buffer(Value(ValueKind.TENSOR, i), i % 2, 1) for i in range(4))
    first = Row(Kind.F, 0, 0, 0, 0, (), (0,)), Row(Kind.SEND, 0, 0, 0, 0, (0,), (1,))
    busy = Row(Kind.F, 1, 1, 1, 0, (1,), ())
    second = Row(Kind.F, 0, 0, 0, 1, (), (2,)), Row(Kind.SEND, 0, 0, 0, 1, (2,), (3,))

    def arrives_s(rows: tuple[Row, ...], *, buffers_wait: bool) -> float:
        step = Lowered(rows, buffers, 0, (), (0, 1, 2, 3))
        found = simulate(step, lambda row: 6.0 if row is busy else 2.0, buffers_wait=buffers_wait)
        return float(found.starts_s[rows.index(second[1])])

    late, early = (*first, busy, *second), (*first, *second, busy)
    assert [arrives_s(rows, buffers_wait=False) for rows in (late, early)] == [4.0, 4.0]
    assert [arrives_s(rows, buffers_wait=True) for rows in (late, early)] == [10.0, 4.0]


def test_swapped_values_leave_and_come_back() -> None:
    """F0 o0 F1 i0 B0, as lowered: FREE holds F1's follower back, IN waits for the row before it."""
    buffers = (
        Buffer(Value(ValueKind.RESIDUAL, 0), 0, 20),
        Buffer(Value(ValueKind.RESIDUAL, 0), 0, 20, Copy.HOST),
        Buffer(Value(ValueKind.RESIDUAL, 0), 0, 20, Copy.FETCHED),
        Buffer(Value(ValueKind.RESIDUAL, 1), 0, 7),
        Buffer(Value(ValueKind.RESIDUAL, 1), 0, 5, Copy.RECOMPUTED),
    )
    rows = (
        Row(Kind.F, 0, 0, 0, 0, (), (0,)),
        Row(Kind.OUT, 0, 0, 0, 0, (0,), (1,)),
        Row(Kind.F, 0, 0, 0, 1, (), (3,)),
        Row(Kind.FREE, 0, 0, 0, 0, (0, 1), (), (0,)),
        Row(Kind.IN, 0, 0, 0, 0, (1,), (2,), (1,)),
        Row(Kind.R, 0, 0, 0, 1, (3,), (4,), (3, 4)),
        Row(Kind.B, 0, 0, 0, 0, (2,), (), (2,)),
    )
    step = Lowered(rows, buffers, 0, (), ())
    found = simulate(step, lambda row: 3.0 if row.kind == "OUT" else seconds(row))
    assert found.starts_s.tolist() == [0.0, 2.0, 2.0, 5.0, 5.0, 5.0, 5.5]
    assert found.busy_s == {"device 0": 8.5, "device 0 host": 3.5}
    device, host = found.curves
    assert list(zip(device.t_s.tolist(), device.bytes.tolist(), strict=True)) == [
        (0, 20),
        (2, 27),
        (5, 32),
        (5.5, 20),
        (9.5, 0),
    ]
    assert list(zip(host.t_s.tolist(), host.bytes.tolist(), strict=True)) == [
        (0, 0),
        (2, 20),
        (5.5, 0),
    ]
    assert found.peak_bytes == tuple(peak.bytes for peak in peaks(step, 1)) == (32, 20)


def test_a_feed_is_free_unless_told_and_then_one_row_early() -> None:
    buffers = tuple(Buffer(Value(ValueKind.BATCH, i), 0, 1) for i in range(3))
    feeds = [Row(Kind.FEED, 0, 0, 0, m, (), (m,)) for m in range(3)]
    forwards = [Row(Kind.F, 0, 0, 0, m, (m,), (), (m,)) for m in range(3)]
    rows = tuple(row for pair in zip(feeds, forwards, strict=True) for row in pair)
    step = Lowered(rows, buffers, 0, (), ())
    free = simulate(step, seconds)
    assert (free.step_s, free.curves[0].most_bytes, free.peak_bytes) == (6.0, 1, (1, 0))
    told = simulate(step, seconds, lambda row: ("host link",))
    assert told.starts_s.tolist() == [0.0, 3.0, 3.0, 6.0, 6.0, 9.0]


@pytest.mark.parametrize(
    ("name", "stages", "schedule"), [("pre-norm", 3, "1f1b"), ("resnet", 2, "gpipe")]
)
def test_peaks_are_the_ledgers(name: str, stages: int, schedule: str) -> None:
    _, _, step = lowered(name, stages, schedule)
    temporary = [7 * i % 1000 for i in range(len(step.rows))]
    found = simulate(step, seconds, temporary_bytes=temporary)
    assert found.peak_bytes == tuple(peak.bytes for peak in peaks(step, stages, temporary))
    assert found.bubble_fraction == pytest.approx(
        busy(found.spans()).bubble_fraction, abs=0.05
    )  # that of F, B and U alone
    final = [0] * (stages + 1)
    for b in {*step.final, *step.metrics}:
        final[step.buffers[b].memory] += step.buffers[b].bytes
    assert [int(curve.bytes[-1]) for curve in found.curves] == final


def test_on_one_device_time_and_dispatch_are_one_order() -> None:
    _, _, step = lowered("mlp", 1, "1f1b")
    temporary = [11 * i % 1000 for i in range(len(step.rows))]
    found = simulate(step, seconds, temporary_bytes=temporary)
    assert found.step_s == sum(seconds(row) for row in step.rows if row.kind != "FEED")
    assert found.bubble_fraction == pytest.approx(0.0)
    assert (found.curves[0].most_bytes, 0) == found.peak_bytes


def test_swaps_of_a_model_stay_within_the_ledgers_peak() -> None:
    m = CASES["mlp"]()
    traced = build_graph(trace_loss(m.loss_fn, m.params, m.batch, m.rng))
    graph = traced.graph
    owners, readers = (
        [p.owner for p in graph.parameters],
        [len(p.readers) for p in graph.parameters],
    )
    optimizer = cut_optimizer(optax.sgd(0.1), abstract(m.params), owners, readers, microbatches=4)
    signatures = [p.signature for p in layer_programs(shared_store(), traced)]
    plan = Plan.from_cuts([len(graph.layers)])
    fates = {
        f"{graph.label(layer)}/{c.name}": "swap" for layer in graph.layers for c in layer.candidates
    }
    swapping = replace(plan, stages=(replace(plan.stages[0], fates=fates),))
    kept, step = (
        lower_step(graph, [MicrobatchLayout.of(graph, p, signatures)] * 4, gpipe(1, 4), optimizer)
        for p in (plan, swapping)
    )
    assert {"OUT", "FREE", "IN"} <= {row.kind for row in step.rows}
    found = simulate(step, seconds)
    assert found.peak_bytes[0] < simulate(kept, seconds).peak_bytes[0]
    assert all(c.most_bytes <= most for c, most in zip(found.curves, found.peak_bytes, strict=True))


def test_a_row_waits_for_those_that_still_read_what_it_overwrites() -> None:
    buffers = (
        Buffer(Value(ValueKind.PARAMETER, 0), 0, 1),
        Buffer(Value(ValueKind.PARAMETER, 0), 1, 1),
    )
    rows = (Row(Kind.SEND, 0, 0, 0, 0, (0,), (1,)), Row(Kind.U, 0, 0, 0, -1, (0,), (0,)))
    assert simulate(Lowered(rows, buffers, 1, (0,), (1,)), seconds).starts_s.tolist() == [0.0, 1.0]


def test_the_host_s_curve_begins_with_the_optimizer_s_state_that_lies_there() -> None:
    options = {"optimizer": optax.adam(0.1), "state_fates": {"*": "swap"}}
    step = begun(**options)[0].session.compiled.lowered
    host = simulate(step, lambda row: 1.0).curves[-1]
    # Two moments of four numbers, for each of three layers.
    assert host.bytes[0] == 3 * 2 * 16
    assert host.bytes.min() >= 0
