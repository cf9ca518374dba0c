"""`python -m jvpipe`: does what the command `jvpipe` does."""

import sys

from jvpipe.command import main

if __name__ == "__main__":
    sys.exit(main())
