"""`python -m jvpipe.plan`: the shell of `jvpipe.cli.plan`."""

import sys

from jvpipe.cli.plan import main

if __name__ == "__main__":
    sys.exit(main())
