"""`python -m jvpipe`: runs the same as the command `jvpipe`."""

import sys

from jvpipe.command import main

if __name__ == "__main__":
    sys.exit(main())
