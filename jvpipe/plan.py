"""Runs `jvpipe.cli.plan_command` as `python -m jvpipe.plan`."""

import sys

from jvpipe.cli.shell import run_module

if __name__ == "__main__":
    sys.exit(run_module("plan_command"))
