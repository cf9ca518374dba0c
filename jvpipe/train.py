"""Runs `jvpipe.cli.train_command` as `python -m jvpipe.train`."""

import sys

from jvpipe.cli.shell import run_module

if __name__ == "__main__":
    sys.exit(run_module("train_command"))
