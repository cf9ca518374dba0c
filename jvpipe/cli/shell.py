"""A command line runs: its exit codes, what stops it, and in one line which extra it lacks."""

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
    """How the command has ended; who is stopped by a signal leaves with 128 and its number.

    >>> ExitCode.TRY_AGAIN, ExitCode.STOPPED + 2
    (<ExitCode.TRY_AGAIN: 75>, 130)
    """

    DONE = 0
    UNEXPECTED = 1
    MISTAKE = 2
    TRY_AGAIN = 75
    STOPPED = 128


# Ctrl-C and SIGTERM: the first one is a wish, heard between two steps where there are some; a
# second one is an end.

_AGAIN_S = 0.001
"""After how long an interrupt that Python could not raise is raised again."""
_ENDING = threading.Lock()


def end_at_once(signum: int, frame: FrameType | None = None) -> NoReturn:
    """Ends the process with one line, whatever it is doing."""
    if _ENDING.acquire(blocking=False):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\nstopped at once\n")
    else:  # the main thread and the one that counts both hear a second signal: one of them says so
        time.sleep(_AGAIN_S)
    os._exit(ExitCode.STOPPED + signum)


def hear_interrupts() -> None:
    """Has the first Ctrl-C raise KeyboardInterrupt from here on, and a second signal end the process at once.

    The main thread hears a signal when it is back from where it waits for a device, so another one
    counts them.
    """
    # Python's own handler runs in the main thread alone, which may wait for a device.
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
    """Interrupts again where Python cannot raise, such as in what it calls while it collects garbage."""
    if lost.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        handler(lost)


def leave_stopped(code: int) -> NoReturn:
    """Ends who was stopped and has said so, without what Python does at its end: a signal there has a traceback.

    Args:
        code: the exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class StopRequest:
    """A context manager: inside it the first signal is noted in `signum`, a second one ends the process at once.

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


# Runs a command line, or says in one line which extra it lacks.


def run_module(module: str) -> int:
    """Returns the exit code of a module's `main`; 2 where a package is not installed.

    Args:
        module: of `jvpipe.cli`, such as `train`.
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
    # What is left to do is Python's own ending, whose traceback would help nobody.
    signal.signal(signal.SIGINT, end_at_once)
    if code > ExitCode.STOPPED:
        leave_stopped(code)
    return code
