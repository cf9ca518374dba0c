"""A command is heard where somebody can hear it: in a pipe by lines, on a terminal by its log and a
display.
"""

import io
import logging
import sys

import pytest

from jvpipe.cli.outputs import Speech
from jvpipe.report.console import DeviceRow
from jvpipe.runtime.engine.phases import phase
from tests.report.test_metrics import ONE

PLACES = {"cpu:0": DeviceRow("0-5"), "cpu:1": DeviceRow("6-9", 40)}
LOG = logging.getLogger("jvpipe")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def work() -> None:
    with Speech() as speech:
        with phase("planning"):
            LOG.warning("few micro-batches")
        with speech.training(total=1, first=0):
            speech.step(ONE, PLACES)
    LOG.info("not heard")


def test_in_a_pipe_lines_go_out_and_warnings_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    before = LOG.level, LOG.handlers[:], LOG.propagate
    work()
    told = capsys.readouterr()
    planning, step = told.out.splitlines()
    assert planning.startswith("planning took 0.")
    assert step.startswith("step 1 of 1: loss 7.5000")
    assert told.err == "few micro-batches\n"
    assert (LOG.level, LOG.handlers, LOG.propagate) == before


@pytest.mark.parametrize("piped", [False, True])
def test_on_a_terminal_the_log_is_above_the_display(
    monkeypatch: pytest.MonkeyPatch, piped: bool
) -> None:
    out, screen = io.StringIO() if piped else Screen(), Screen()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    work()
    shown = screen.getvalue()
    assert (
        0
        < shown.index("few micro-batches")
        < shown.index("planning took 0.")
        < shown.index("cpu:1")
    )
    assert [line.split(" ")[0] for line in out.getvalue().splitlines()] == (
        ["planning", "step"] if piped else []
    )
