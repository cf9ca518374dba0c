"""`python -m jvpipe`: the command, as `jvpipe` is."""

import sys

from jvpipe.command import main

if __name__ == "__main__":
    sys.exit(main())
