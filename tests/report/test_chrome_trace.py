"""Spans become a trace that Perfetto opens, and an idle share."""

import json
from pathlib import Path

import pytest

from jvpipe.ir.kinds import Kind
from jvpipe.ir.span import Hop, Level, Picture, Span
from jvpipe.report import chrome_trace

# Two stages, two micro-batches, backward twice as long as forward:
#   cpu:0   0F0 0F1 ... ...  ... 0B0 0B0 0B1 0B1
#   cpu:1       1F0 1B0 1B0  1F1 1B1 1B1
SPANS = [
    Span("cpu:0", "0F0", 10.0, 11.0, Kind.F),
    Span("cpu:0", "0F1", 11.0, 12.0, Kind.F),
    Span("cpu:1", "1F0", 11.0, 12.0, Kind.F),
    Span("cpu:1", "1B0", 12.0, 14.0, Kind.B, {"bytes": 7}),
    Span("cpu:1", "1F1", 14.0, 15.0, Kind.F),
    Span("cpu:1", "1B1", 15.0, 17.0, Kind.B),
    Span("cpu:0", "0B0", 15.0, 17.0, Kind.B),
    Span("cpu:0", "0B1", 17.0, 19.0, Kind.B),
]


def test_one_named_row_per_device(tmp_path: Path) -> None:
    chrome_trace.write_trace(tmp_path / "timeline.json", Picture(tuple(SPANS)))
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {0: "cpu:0", 1: "cpu:1"}
    drawn = [(rows[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    expected = [
        (s.device, s.name, (s.start_s - 10.0) * 1e6, (s.end_s - s.start_s) * 1e6) for s in SPANS
    ]
    assert sorted(drawn) == sorted(expected)
    (backward,) = (e for e in events if e["name"] == "1B0")
    assert backward["cat"] == "B"
    assert backward["args"] == {"bytes": 7}


def test_devices_are_in_the_order_of_their_numbers() -> None:
    spans = tuple(Span(f"cpu:{i}", "F", 0.0, 1.0, Kind.F) for i in (10, 2, 0))
    events = chrome_trace.chrome_trace(Picture(spans))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == [
        "cpu:0",
        "cpu:2",
        "cpu:10",
    ]


def test_bubble_fraction_of_the_drawing() -> None:
    assert chrome_trace.busy(SPANS).bubble_fraction == pytest.approx(1 - 12 / 18)


def test_the_busy_shares_of_the_drawing() -> None:
    assert chrome_trace.busy_fractions(SPANS) == pytest.approx({"cpu:0": 6 / 9, "cpu:1": 6 / 9})
    assert chrome_trace.busy_fractions([]) == {}


def test_bubble_fraction_ignores_copies_and_counts_overlap_once() -> None:
    spans = [
        Span("a", "0F0", 0.0, 2.0, Kind.F),
        Span("a", "0F1", 1.0, 2.0, Kind.F),
        Span("a", "0U", 3.0, 4.0, Kind.U),
        Span("a", "SEND", 0.0, 9.0, Kind.SEND),
    ]
    assert chrome_trace.busy(spans).bubble_fraction == pytest.approx(0.25)


def test_nothing_measured_is_no_bubble() -> None:
    assert chrome_trace.busy([]).bubble_fraction == 0.0
    assert chrome_trace.chrome_trace(Picture(()))["traceEvents"][0]["ph"] == "M"


def test_bytes_are_counters_and_copies_are_arrows() -> None:
    levels = (Level("cpu:0", 0.0, 5), Level("cpu:0", 11.5, 9), Level("host", 12.0, 7))
    hops = (
        Hop("a", "cpu:1", 11.0, arrives=True),
        Hop("a", "cpu:0", 10.5, arrives=False),
        Hop("late", "cpu:0", 12.5, arrives=False),
        Hop("late", "cpu:1", 12.0, arrives=True),
        Hop("to nobody", "cpu:0", 11.5, arrives=False),
    )
    events = chrome_trace.chrome_trace(Picture(tuple(SPANS), levels, hops))["traceEvents"]
    counted = [(e["name"], e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"]
    assert counted == [("cpu:0 bytes", 0.0, 5), ("cpu:0 bytes", 1.5e6, 9), ("host bytes", 2e6, 7)]
    arrows = [(e["ph"], e["id"], e["tid"], e["ts"]) for e in events if e["ph"] in "sf"]
    assert arrows == [("s", 0, 0, 0.5e6), ("f", 0, 1, 1e6), ("s", 1, 0, 2e6), ("f", 1, 1, 2e6)]


def test_copies_of_steps_that_are_shown_together_stay_apart() -> None:
    ends = tuple(Hop("a", f"cpu:{i}", 10.0 + i, arrives=bool(i)) for i in range(2))
    one = Picture(tuple(SPANS), (Level("cpu:0", 10.0, 3),), ends)
    two = chrome_trace.joined([one, one])
    assert (two.spans, two.levels) == (one.spans * 2, one.levels * 2)
    assert sum(e["ph"] == "s" for e in chrome_trace.chrome_trace(two)["traceEvents"]) == 2
