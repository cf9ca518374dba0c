"""The display shows a run on a terminal and is silent elsewhere."""

import io

from rich.console import Console

from jvpipe.report.console import TrainingDisplay
from tests.report.test_metrics import ONE


def shown(terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    with TrainingDisplay(total_steps=40, console=console) as display:
        display.update(ONE)
    return out.getvalue()


def test_shows_the_numbers_on_a_terminal() -> None:
    text = shown(terminal=True)
    for part in ("1/40", "7.5000", "128.0", "20%", "cpu:0 peak", "cpu:1 peak"):
        assert part in text


def test_prints_nothing_where_there_is_no_terminal() -> None:
    assert shown(terminal=False) == ""
