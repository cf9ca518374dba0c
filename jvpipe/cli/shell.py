"""Runs a command line, or says in one line which extra it lacks."""

import sys
from importlib import import_module

from jvpipe.ir.extras import MissingExtraError, extra


def run(module: str) -> int:
    """The exit code of a module's `main`; 2 where a package is not installed.

    Args:
        module: of `jvpipe.cli`, such as `train`.
    """
    try:
        with extra("cli"):
            main = import_module(f"jvpipe.cli.{module}").main
        return main()
    except MissingExtraError as missing:
        print(f"error: {missing}", file=sys.stderr)
        return 2
