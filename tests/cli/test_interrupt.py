"""The first signal is noted or raised, the second one ends the process, and the handlers are given
back.
"""

import signal
import subprocess
import sys

import pytest

from jvpipe.cli.shell import StopRequest
from tests.grid import grid


def test_a_signal_is_noted_and_the_old_handlers_return(capsys: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(signum) for signum in StopRequest.signals]
    with StopRequest() as stop:
        assert stop.signum is None
        signal.raise_signal(signal.SIGINT)
        assert stop.signum == signal.SIGINT
    assert [signal.getsignal(signum) for signum in StopRequest.signals] == before
    assert "finishing the step" in capsys.readouterr().err


NOTED = """
with StopRequest():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    print("still here")
"""
RAISED = """
hear_interrupts()
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    signal.raise_signal(signal.SIGINT)
    print("still here")
"""
BUSY = """
hear_interrupts()
threading.Timer(0.1, send).start()
threading.Timer(0.3, send).start()
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # as while it waits for a device, no handler runs
print("still here")
"""
COLLECTING = """
hear_interrupts()
gc.callbacks.append(lambda *_: gc.callbacks.clear() or signal.raise_signal(signal.SIGINT))
try:
    gc.collect()
    time.sleep(60)
except KeyboardInterrupt:
    print("stopped", file=sys.stderr)
    leave_stopped(130)
"""


@pytest.mark.parametrize(
    ("script", "told"),
    grid(
        [
            noted := (
                NOTED,
                "finishing the step and saving; a second signal stops at once\n\nstopped at once",
            ),
            (RAISED, "stopped at once"),
            (BUSY, "stopped at once"),
            collecting := (COLLECTING, "stopped"),
        ],
        noted,
        collecting,
    ),
    ids=["noted", "raised", "busy in C", "lost by the garbage collector, and raised anew"],
)
def test_who_is_stopped_ends_with_a_line_and_without_a_traceback(script: str, told: str) -> None:
    begin = (
        "import gc, hashlib, os, signal, sys, threading, time\n"
        "from jvpipe.cli.shell import StopRequest, hear_interrupts, leave_stopped\n"
        "def send(): os.kill(os.getpid(), signal.SIGINT)\n"
    )
    command = [sys.executable, "-c", begin + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == told
    assert (done.returncode, done.stdout) == (128 + signal.SIGINT, "")
