"""`python -m jvpipe.train`: the shell of `jvpipe.cli.train_command`."""

import sys

from jvpipe.cli.shell import run_module

if __name__ == "__main__":
    sys.exit(run_module("train_command"))
