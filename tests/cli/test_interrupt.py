"""The first signal is noted, the second one ends the process, and the handlers are given back."""

import signal
import subprocess
import sys

import pytest

from jvpipe.cli.interrupt import StopRequest


def test_a_signal_is_noted_and_the_old_handlers_return(capsys: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(signum) for signum in StopRequest.signals]
    with StopRequest() as stop:
        assert stop.signum is None
        signal.raise_signal(signal.SIGINT)
        assert stop.signum == signal.SIGINT
    assert [signal.getsignal(signum) for signum in StopRequest.signals] == before
    assert "finishing the step" in capsys.readouterr().err


def test_the_second_signal_ends_the_process_at_once() -> None:
    script = (
        "import signal, time; from jvpipe.cli.interrupt import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    signal.raise_signal(signal.SIGINT); print('noted', flush=True); signal.raise_signal(signal.SIGINT)\n"
        "    print('still here')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "noted\n"
    assert done.returncode == -signal.SIGINT
