"""`python -m jvpipe.plan`: the shell of `jvpipe.cli.plan_command`."""

import sys

from jvpipe.cli.shell import run_module

if __name__ == "__main__":
    sys.exit(run_module("plan_command"))
