"""Exit codes of the command: docs/hosts.md has them in a table."""

from enum import IntEnum


class ExitCode(IntEnum):
    """How the command has ended; who is stopped by a signal leaves with 128 and its number.

    >>> ExitCode.TRY_AGAIN, ExitCode.STOPPED + 2
    (<ExitCode.TRY_AGAIN: 75>, 130)
    """

    DONE = 0
    UNEXPECTED = 1
    MISTAKE = 2
    TRY_AGAIN = 75
    STOPPED = 128
