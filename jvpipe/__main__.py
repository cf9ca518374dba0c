"""`python -m jvpipe`: says what there is to run."""

import sys

from jvpipe.cli.shell import run

if __name__ == "__main__":
    sys.exit(run("overview"))
