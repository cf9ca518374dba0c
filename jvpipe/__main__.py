"""`python -m jvpipe`: says what there is to run."""

import sys

from jvpipe.cli.overview import main

if __name__ == "__main__":
    sys.exit(main())
