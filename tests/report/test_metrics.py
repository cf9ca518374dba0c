"""The log of a run survives what may happen to it."""

import json
from dataclasses import replace
from pathlib import Path

from jvpipe.report.metrics import MetricsLog, StepMetrics, read_steps

ONE = StepMetrics(
    step=1,
    loss=7.5,
    learning_rate=1e-3,
    grad_norm=0.5,
    seconds=0.25,
    examples_per_s=128.0,
    bubble_fraction=0.2,
    peak_bytes={"cpu:0": 10, "cpu:1": 20},
    staleness=(0, 0, 0),
)


def write(path: Path, first: int, last: int, resumed_step: int = 0) -> None:
    with MetricsLog(path, resumed_step) as log:
        for step in range(first, last + 1):
            log.append(replace(ONE, step=step))


def test_one_object_per_step(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", 1, 3)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["peak_bytes"] == {"cpu:0": 10, "cpu:1": 20}
    assert lines[0]["staleness"] == [0, 0, 0]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.append(replace(ONE, loss=float("nan"), grad_norm=float("inf")))
    (line,) = read_steps(tmp_path / "metrics.jsonl")
    assert line["loss"] is None
    assert line["grad_norm"] is None
    assert line["seconds"] == 0.25


def test_what_there_is_not_is_left_out() -> None:
    assert {"tokens_per_s", "mfu", "held_out_loss", "aux", "architecture"}.isdisjoint(ONE.told())
    line = json.loads(replace(ONE, mfu=0.5, aux={"a": float("nan"), "b": 1.0}).to_json())
    assert (line["mfu"], line["aux"]) == (0.5, {"a": None, "b": 1.0})


def test_the_time_of_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        assert log.elapsed_s == 0
        for step in (1, 2, 3):
            log.append(replace(ONE, step=step, elapsed_s=10.0 * step))
    with MetricsLog(path, 2) as log:
        assert log.elapsed_s == 20.0


def test_resuming_appends_after_the_resumed_step(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", 1, 5)
    write(tmp_path / "metrics.jsonl", 4, 6, resumed_step=3)
    assert [line["step"] for line in read_steps(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_line_torn_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    write(path, 3, 3, resumed_step=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_lines_that_tell_of_no_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    with path.open("ab") as file:
        file.write(b'{"loss": 1.0}\n[3]\n{"step": "3"}\n{"st\xffep": 3}\n')
    write(path, 3, 3, resumed_step=2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_lines_are_on_disk_before_the_log_is_closed(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(ONE)
    assert [line["step"] for line in read_steps(tmp_path / "metrics.jsonl")] == [1]
    log.__exit__()
