"""The command `jvpipe`: it answers `--version`, and `cli/overview.py` does everything else."""

import sys
from importlib.metadata import version


def main() -> int:
    """Runs the command and returns its exit status.

    `--version` comes first, so that it works although optional packages are missing.
    """
    if sys.argv[1:] == ["--version"]:
        print(f"jvpipe {version('jvpipe')}")
        return 0
    from jvpipe.cli.shell import run_module

    return run_module("overview")
