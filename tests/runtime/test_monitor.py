"""What the monitor says of steps, whoever asks and whenever."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

import jvpipe
from jvpipe.ir.buffers import Buffer, Lowered
from jvpipe.ir.kinds import Kind
from jvpipe.ir.rows import AskRun, OfferRun, Row
from jvpipe.ir.span import Span
from jvpipe.ir.values import NONE, Value, ValueKind
from jvpipe.runtime.engine.monitor import Measured, Monitor
from tests.end_to_end.test_exactness import batch_of
from tests.runtime.test_migrate import MICRO, started
from tests.zoo import CASES

PLAN = jvpipe.Plan.from_cuts([2, 3])


def ends_s(spans: Sequence[Span]) -> dict[str, float]:
    return {span.device: max(s.end_s for s in spans if s.device == span.device) for span in spans}


def test_a_task_does_not_begin_before_the_step_before_has_ended_on_its_device() -> None:
    m = CASES["mlp"]()
    pipe, state = started(m, PLAN)
    pipe.session.monitor(kept=3)
    for _ in range(5):  # nothing waits: steps are dispatched while earlier ones run
        state, _ = pipe.step(state, batch_of(m, MICRO))
    earlier, later = pipe.session.measured(before=True), pipe.session.measured()
    monitor = pipe.session.controller.monitor
    assert monitor is not None
    assert monitor.read(monitor.last(2)[0]) == earlier, "however many steps are kept"
    for device, end_s in ends_s(earlier.spans).items():
        assert min(span.start_s for span in later.spans if span.device == device) >= end_s


def test_any_thread_can_read_a_record_and_moves_between_steps_are_none() -> None:
    m = CASES["mlp"]()
    pipe, state = started(m, PLAN)
    pipe.session.monitor()
    state, _ = pipe.step(state, batch_of(m, MICRO))
    monitor = pipe.session.controller.monitor
    assert monitor is not None
    record = monitor.close()
    assert record is not None
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: monitor.read(record), range(32), timeout=60))
    assert all(one == found[0] for one in found)
    layer_s = found[0].layer_s(5)
    assert min(layer_s) > 0
    state = jax.block_until_ready(pipe.migrate(state, jvpipe.Plan.from_cuts([3, 2])))
    assert pipe.session.history[0].how == "between"
    assert pipe.session.measured() == found[0]


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_the_drain_of_a_stream_is_no_step(schedule: str) -> None:
    m = CASES["mlp"]()
    pipe, state = started(m, PLAN, schedule)
    pipe.session.monitor()
    for _ in range(2):
        state = pipe.drain(pipe.step(state, batch_of(m, MICRO))[0])
    earlier, later = pipe.session.measured(before=True), pipe.session.measured()
    for found in (earlier, later):
        forwards = [span for span in found.spans if span.name.startswith("0F")]
        assert {span.name for span in forwards} == {f"0F{n}" for n in range(MICRO)}
    assert min(span.start_s for span in later.spans) > min(span.start_s for span in earlier.spans)


def copied_bytes(pipe: jvpipe.Pipeline, links: Sequence[tuple[int, int]]) -> list[int]:
    """What the measured timeline says that went over each link between devices."""
    names = [str(device) for device in pipe.session.settings.devices]
    spans = [span for span in pipe.session.measured().spans if span.kind == "MOVE"]
    assert all(span.start_s <= span.end_s for span in spans)
    return [
        sum(s.args["bytes"] for s in spans if s.device == f"{names[a]} to {names[b]}")
        for a, b in links
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_the_copies_of_a_migration_are_seen_with_their_bytes(schedule: str) -> None:
    m = CASES["mlp"]()
    pipe, state = started(m, PLAN, schedule)
    pipe.session.monitor()
    stream = pipe.run(state, (batch_of(m, MICRO) for _ in range(3)))
    state, _ = next(stream)
    assert copied_bytes(pipe, [(0, 1), (1, 0)]) == [0, 0]
    state = pipe.migrate(state, jvpipe.Plan.from_cuts([4, 1]), at=(1, 2))
    state, _ = next(stream)
    assert pipe.session.history[0].how == "inside"
    assert copied_bytes(pipe, [(0, 1), (1, 0)]) == [0, pipe.session.history[0].moved_bytes]
    state, _ = next(stream)
    assert copied_bytes(pipe, [(0, 1), (1, 0)]) == [0, 0]


def test_the_copies_between_two_steps_are_told_with_the_second() -> None:
    m = CASES["mlp"]()
    pipe, state = started(m, PLAN)
    pipe.session.monitor()
    state, _ = pipe.step(state, batch_of(m, MICRO))
    state = pipe.migrate(state, jvpipe.Plan.from_cuts([4, 1]))
    assert copied_bytes(pipe, [(1, 0)]) == [0]
    state, _ = pipe.step(state, batch_of(m, MICRO))
    assert pipe.session.history[0].how == "between"
    assert copied_bytes(pipe, [(1, 0)]) == [pipe.session.history[0].moved_bytes]
    state, _ = pipe.step(state, batch_of(m, MICRO))
    assert copied_bytes(pipe, [(1, 0)]) == [0]


def test_what_comes_from_another_process_is_told_with_its_link() -> None:
    row = Row(Kind.MOVE, 0, NONE, NONE, NONE, (), (0,), (), AskRun(0, process=2))
    moved = Buffer(Value(ValueKind.PARAMETER, 0, version=0), 0, 8)
    monitor = Monitor(jax.devices()[:1])
    monitor.begin(Lowered((row,), (moved,), 0, (0,), ()))
    monitor.dispatched(0, row, None)
    monitor.arrived(0)
    record = monitor.close()
    assert record
    (span,) = monitor.read(record).spans
    assert (span.device, span.args["bytes"]) == (f"process 2 to {jax.devices()[0]}", 8)


def test_a_layer_takes_its_forward_its_backward_and_what_runs_again() -> None:
    seconds = {Kind.F: (1.0, 1.0, 9.0), Kind.B: (2.0, 8.0, 2.5), Kind.R: (0.5, 0.25, 0.75)}
    spans = [
        Span("a", f"0{kind}{m}", 0.0, s, kind, {"layer": 0})
        for kind, row in seconds.items()
        for m, s in enumerate(row)
    ]
    found = Measured((*spans, Span("a", "0F0", 0.0, 1.0, Kind.F, {"layer": 1})), 0, 0.0, 0.0, 0.0)
    assert found.layer_s(2) == pytest.approx([1.0 + 2.5 + 0.5, 0.0])


@pytest.mark.parametrize(("keep_last", "counted"), [(False, MICRO), (True, MICRO - 1)])
def test_what_backwards_compute_again_inside_counts_whoever_made_the_plan(
    keep_last: bool, counted: int
) -> None:
    """A plan that is given, as to a run that is resumed, comes without a planner's numbers."""
    m = CASES["mlp"]()
    plan = dataclasses.replace(PLAN, keep_last=keep_last)
    pipe, state = started(m, plan, fates={"*/*": "recompute"})
    assert pipe.session.compiled_plans.planned is None
    pipe.session.monitor()
    pipe.step(state, batch_of(m, MICRO))
    found, shares = pipe.session.measured(), pipe.session.compiled.recomputed_shares
    assert not [span for span in found.spans if span.kind is Kind.R]
    backwards = [span for span in found.spans if span.kind is Kind.B]
    again = [span for span in backwards if span.args["microbatch"] < counted]
    assert found.recomputed_s == pytest.approx(
        sum((span.end_s - span.start_s) * shares[span.args["layer"]] for span in again)
    )
    assert 0 < max(shares) < 1


def test_what_goes_to_another_process_has_a_place_among_the_links() -> None:
    row = Row(Kind.MOVE, 0, NONE, NONE, NONE, (0,), (), (), OfferRun(0, process=2))
    moved = Buffer(Value(ValueKind.PARAMETER, 0, version=0), 0, 8)
    monitor = Monitor(jax.devices()[:1])
    monitor.begin(Lowered((row,), (moved,), 1, (0,), ()))
    monitor.dispatched(0, row, None)
    monitor.arrived(0)
    record = monitor.close()
    assert record
    for span in monitor.read(record).spans:
        assert span.device == f"{jax.devices()[0]} to process 2"
