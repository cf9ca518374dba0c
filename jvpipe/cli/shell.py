"""The start and end of all commands: exit codes, signals, and messages for missing packages."""

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
    """The exit codes of a command; after a signal, the code is STOPPED + the signal's number.

    >>> ExitCode.TRY_AGAIN, ExitCode.STOPPED + 2
    (<ExitCode.TRY_AGAIN: 75>, 130)
    """

    DONE = 0
    UNEXPECTED = 1
    MISTAKE = 2
    TRY_AGAIN = 75
    STOPPED = 128


# The first Ctrl-C or SIGTERM asks a command to stop; training stops between two steps. A second
# signal ends the process at once.

_ENDING = threading.Lock()


def end_at_once(signum: int, frame: FrameType | None = None) -> NoReturn:
    """Prints one line and ends the process, no matter what it is doing."""
    if _ENDING.acquire(blocking=False):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\nstopped at once\n")
    else:  # another thread also saw the second signal, and prints the line
        time.sleep(0.001)
    os._exit(ExitCode.STOPPED + signum)


def hear_interrupts() -> None:
    """Makes the first Ctrl-C raise KeyboardInterrupt, and a second signal end the process at once.

    Python runs signal handlers only in the main thread, so none runs while that thread waits for a
    device. Therefore another thread counts the signals.
    """
    # Python writes the number of each signal to this pipe at once, before any handler runs.
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
    """Raises an interrupt again if Python has dropped it, for example during garbage collection."""
    if lost.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0.001)  # after this handler has returned
    else:
        handler(lost)


def leave_stopped(code: int) -> NoReturn:
    """Ends a stopped process at once.

    During Python's usual exit, another signal would print a traceback.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class StopRequest:
    """A context manager that stores the first signal in `signum`; a second one ends the process.

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
        print("\nfinishing the step and saving; a second signal stops at once", file=sys.stderr)


# Commands are imported in `run_module`, so that it can report a missing package in one line.


def run_module(module: str) -> int:
    """Runs the `main` of a module, and returns its exit code, or 2 if a package is missing.

    Args:
        module: the name of a module of `jvpipe.cli`, such as `train`.
    """
    hear_interrupts()
    try:
        with extra("cli"):
            main = import_module(f"jvpipe.cli.{module}").main
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` needs no more; rich ends like this, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.UNEXPECTED
    except MissingExtraError as missing:
        print(f"error: {missing}", file=sys.stderr)
        return ExitCode.MISTAKE
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = ExitCode.STOPPED + signal.SIGINT
    # The command is done. Without this handler, an interrupt during Python's exit would print a
    # traceback.
    signal.signal(signal.SIGINT, end_at_once)
    if code > ExitCode.STOPPED:
        leave_stopped(code)
    return code
