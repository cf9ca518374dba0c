"""The shell around a command: its exit codes, its signals, and one line about a missing package."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from jvpipe.util.extras import MissingExtraError, extra


class ExitCode(IntEnum):
    """How the command has ended; one that a signal has stopped ends with 128 + the signal's number.

    >>> ExitCode.TRY_AGAIN, ExitCode.STOPPED + 2
    (<ExitCode.TRY_AGAIN: 75>, 130)
    """

    DONE = 0
    UNEXPECTED = 1
    MISTAKE = 2
    TRY_AGAIN = 75
    STOPPED = 128


# Ctrl-C and SIGTERM: the first signal asks the command to stop, which a training does between two
# steps. The second signal ends the process at once.

_AGAIN_S = 0.001
"""Seconds after which an interrupt is raised again if Python could not raise it."""
_ENDING = threading.Lock()


def end_at_once(signum: int, frame: FrameType | None = None) -> NoReturn:
    """Ends the process with one line, whatever it does."""
    if _ENDING.acquire(blocking=False):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\nstopped at once\n")
    else:  # the other of the two threads that see a second signal is printing the line
        time.sleep(_AGAIN_S)
    os._exit(ExitCode.STOPPED + signum)


def hear_interrupts() -> None:
    """Makes the first Ctrl-C raise KeyboardInterrupt, and a second signal end the process at once.

    Python runs its handlers in the main thread, which may be waiting for a device and then runs
    them only afterwards. So a second thread counts the signals.
    """
    # Python writes the number of each signal to this pipe at once, before it runs a handler.
    heard, rings = os.pipe()
    os.set_blocking(rings, False)
    signal.set_wakeup_fd(rings, warn_on_full_buffer=False)

    def count() -> None:
        wishes = 0
        while numbers := os.read(heard, 1):
            wishes += numbers[0] in StopRequest.signals
            if wishes > 1:
                end_at_once(numbers[0])

    threading.Thread(target=count, name="jvpipe-signals", daemon=True).start()
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGALRM, _interrupt)
    sys.unraisablehook = partial(_again, sys.unraisablehook)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, end_at_once)
    raise KeyboardInterrupt


def _again(handler: Callable[[Any], object], lost: Any) -> None:
    """Interrupts again if Python could not raise, for example during a garbage collection."""
    if lost.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        handler(lost)


def leave_stopped(code: int) -> NoReturn:
    """Ends a stopped process without Python's own ending, where a signal would print a traceback.

    Args:
        code: the exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class StopRequest:
    """A context manager that notes the first signal in `signum`; a second one ends the process.

    >>> with StopRequest() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.signum == signal.SIGTERM
    True
    """

    signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous = {}

    def __enter__(self) -> "StopRequest":
        self._previous = {signum: signal.signal(signum, self._note) for signum in self.signals}
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        for signal_number in self.signals:
            signal.signal(signal_number, end_at_once)
        print("\nfinishing the step and saving; once more stops at once", file=sys.stderr)


# A command is imported and run. If a package that it needs is missing, one line says so.


def run_module(module: str) -> int:
    """Runs a module's `main` and returns its exit code, which is 2 if a package is missing.

    Args:
        module: the name of a module of `jvpipe.cli`, such as `train`.
    """
    hear_interrupts()
    try:
        with extra("cli"):
            main = import_module(f"jvpipe.cli.{module}").main
        code = main()
    except MissingExtraError as missing:
        print(f"error: {missing}", file=sys.stderr)
        return ExitCode.MISTAKE
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = ExitCode.STOPPED + signal.SIGINT
    # An interrupt from here on could only hit Python's own ending, whose traceback helps nobody.
    signal.signal(signal.SIGINT, end_at_once)
    if code > ExitCode.STOPPED:
        leave_stopped(code)
    return code
