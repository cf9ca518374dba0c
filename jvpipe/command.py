"""The command `jvpipe`: it answers `--version`, and `cli/overview.py` does everything else."""

import sys
from importlib.metadata import version


def main() -> int:
    """Runs the command; `--version` works without optional packages."""
    if sys.argv[1:] == ["--version"]:
        print(f"jvpipe {version('jvpipe')}")
        return 0
    from jvpipe.cli.shell import run_module

    return run_module("overview")
