"""`python -m jvpipe.train`: the shell of `jvpipe.cli.train`."""

import sys

from jvpipe.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
