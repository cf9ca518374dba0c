"""Runs a command line, or says in one line which extra it lacks."""

import signal
import sys
from importlib import import_module

from jvpipe.cli.exit_codes import ExitCode
from jvpipe.cli.interrupt import end_at_once, hear_interrupts, leave_stopped
from jvpipe.ir.extras import MissingExtraError, extra


def run(module: str) -> int:
    """The exit code of a module's `main`; 2 where a package is not installed.

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
    signal.signal(signal.SIGINT, end_at_once)
    if code > ExitCode.STOPPED:
        leave_stopped(code)
    return code
