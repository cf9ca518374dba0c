"""`python -m jvpipe.plan`: the shell of `jvpipe.cli.plan`."""

import sys

from jvpipe.cli.shell import run_module

if __name__ == "__main__":
    sys.exit(run_module("plan"))
