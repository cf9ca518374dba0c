"""A live display of a training run in the terminal."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Column, Table

from jvpipe.report.metrics import StepMetrics
from jvpipe.util.sizes import format_bytes

_BAR = 16  # characters


class DeviceRow(NamedTuple):
    """The row of a device: its layers as text, and its memory limit, if it has one."""

    layers: str
    limit_bytes: int | None = None


def in_runs(numbers: Sequence[int]) -> str:
    """Writes numbers as text, with consecutive ones as a range.

    >>> in_runs([0, 1, 2, 7, 9, 10])
    '0-2, 7, 9-10'
    """
    runs: list[list[int]] = []
    for number in numbers:
        # A run has its first number, and also its last number if the two differ.
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


class TrainingDisplay:
    """A context manager that shows a run's progress, its last step's numbers, and its devices.

    If `console` is not a terminal, nothing is shown. Text that is printed during the run appears
    above the display.

    Args:
        total_steps: the number of the last step.
        console: the terminal to show the display on.
        step: how many steps the run has already made.
    """

    def __init__(self, total_steps: int, console: Console, step: int = 0) -> None:
        self._console = console
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("step", total=total_steps, completed=step)
        shared = sys.stdout.isatty()  # text that goes to a file or pipe must not be redirected
        self._live = Live(
            self._progress, console=console, refresh_per_second=4, redirect_stdout=shared
        )

    def __enter__(self) -> "TrainingDisplay":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def update(self, metrics: StepMetrics, places: Mapping[str, DeviceRow]) -> None:
        """Shows the numbers of a step that has ended.

        Args:
            metrics: the metrics of the step.
            places: the devices of the run by name, in the order of their rows.
        """
        # Tables are made only if a terminal shows them.
        if self._live.is_started:
            self._progress.update(self._task, completed=metrics.step)
            numbers, rows = _numbers(metrics), device_rows(metrics, places)
            self._live.update(Group(self._progress, numbers, rows))


def _numbers(metrics: StepMetrics) -> Table:
    """Makes a table with a column for each number of a step."""
    columns = {
        "loss": f"{metrics.loss:.4f}",
        "grad norm": f"{metrics.grad_norm:.3f}",
        "learning rate": f"{metrics.learning_rate:.2e}",
        "examples/s": f"{metrics.examples_per_s:.1f}",
        "bubble": f"{metrics.bubble_fraction:.0%}",
    }
    table = Table(*columns, box=None, pad_edge=False)
    table.add_row(*columns.values())
    return table


def device_rows(metrics: StepMetrics, places: Mapping[str, DeviceRow]) -> Table:
    """Makes a table with a row for each device: layers, peak and limit of memory, busy share.

    Args:
        metrics: the metrics of a step.
        places: the devices by name, in the order of their rows.
    """
    number = partial(Column, no_wrap=True, justify="right")
    table = Table(
        Column("device", no_wrap=True, max_width=16),
        Column("layers", no_wrap=True, max_width=20),
        number("peak"),
        number("limit"),
        Column(width=_BAR),
        number("busy"),
        Column(width=_BAR),
        box=None,
        pad_edge=False,
    )
    for name, (layers, limit) in places.items():
        # A device to which layers have just moved may have no numbers yet.
        peak = metrics.peak_bytes.get(name, 0)
        busy = metrics.busy_fraction.get(name, 0.0)
        table.add_row(
            name,
            layers,
            format_bytes(peak),
            format_bytes(limit) if limit else "none",
            ProgressBar(limit, peak, _BAR) if limit else "",
            f"{busy:.0%}",
            ProgressBar(1.0, busy, _BAR),
        )
    return table
