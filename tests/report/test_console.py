"""The display shows a run on a terminal and is silent elsewhere."""

import io
from collections.abc import Mapping
from dataclasses import replace

import pytest
from rich.console import Console

from jvpipe.report.console import DeviceRow, TrainingDisplay, device_rows
from jvpipe.report.metrics import StepMetrics
from tests.report.test_metrics import ONE

TWO = {"cpu:0": DeviceRow("0-5"), "cpu:1": DeviceRow("6-9", limit_bytes=40)}


def shown(
    terminal: bool,
    metrics: StepMetrics = ONE,
    places: Mapping[str, DeviceRow] = TWO,
    width: int = 100,
) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, height=60)
    with TrainingDisplay(total_steps=40, console=console) as display:
        display.update(metrics, places)
    return out.getvalue()


def test_shows_the_numbers_on_a_terminal() -> None:
    text = shown(terminal=True)
    for part in ("1/40", "7.5000", "128.0", "20%", "cpu:0", "cpu:1", "0-5", "40 B"):
        assert part in text


def test_prints_nothing_where_there_is_no_terminal() -> None:
    assert shown(terminal=False) == ""


@pytest.mark.parametrize("name", ["cuda:{}", "TPU_{}(process=0,(0,0,0,0))"])
def test_sixteen_devices_fit_into_a_hundred_columns(name: str) -> None:
    names = [name.format(i) for i in range(16)]
    metrics = replace(
        ONE,
        peak_bytes=dict.fromkeys(names, 38 << 30),
        busy_fraction={n: i / 16 for i, n in enumerate(names)},
    )
    places = {
        n: DeviceRow(f"{3 * i}-{3 * i + 2}, {3 * i + 48}-{3 * i + 50}", 40 << 30)
        for i, n in enumerate(names)
    }
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(device_rows(metrics, places))
    _, *rows = console.export_text().rstrip().splitlines()
    assert len(rows) == 16
    assert max(map(len, rows)) <= 100
    for i, row in enumerate(rows):
        told = (
            names[i][:10],
            f"{3 * i}-{3 * i + 2}, {3 * i + 48}",
            "38.00 GiB",
            "40.00 GiB",
            f"{i / 16:.0%}",
        )
        assert all(part in row for part in told), row
