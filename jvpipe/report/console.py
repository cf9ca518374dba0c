"""A live display of a training run in the terminal."""

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from jvpipe.report.metrics import StepMetrics


class TrainingDisplay:
    """Shows step, loss, examples/s, bubble and the peak bytes of each device while training runs.

    A context manager. Where `console` is not a terminal it prints nothing at all.
    """

    def __init__(self, total_steps: int, step: int = 0, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console)
        self._task = self._progress.add_task("step", total=total_steps, completed=step)
        self._live = Live(self._progress, console=self._console, refresh_per_second=4)

    def __enter__(self) -> "TrainingDisplay":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def update(self, metrics: StepMetrics) -> None:
        """Shows the numbers of a step that has ended."""
        if self._live.is_started:
            self._progress.update(self._task, completed=metrics.step)
            self._live.update(Group(self._progress, _numbers(metrics)))


def _numbers(metrics: StepMetrics) -> Table:
    """One column per number, one per device."""
    columns = {
        "loss": f"{metrics.loss:.4f}",
        "grad norm": f"{metrics.grad_norm:.3f}",
        "learning rate": f"{metrics.learning_rate:.2e}",
        "examples/s": f"{metrics.examples_per_s:.1f}",
        "bubble": f"{metrics.bubble_fraction:.0%}",
    }
    columns |= {f"{device} peak": f"{peak / 2**20:.1f} MiB" for device, peak in metrics.peak_bytes.items()}
    table = Table(*columns, box=None, pad_edge=False)
    table.add_row(*columns.values())
    return table
