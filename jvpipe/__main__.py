"""Runs the command `jvpipe` as `python -m jvpipe`."""

import sys

from jvpipe.command import main

if __name__ == "__main__":
    sys.exit(main())
