"""Errors for processes that disagree, and the encoding in which they report failures."""

from itertools import zip_longest

from jvpipe.runtime.engine.tensors import MemoryLimitExceeded

SHOWN = 80
"""The most characters of a line that a message shows."""


class Disagreement(ValueError):  # noqa: N818 - it says what differs
    """Processes differ in how they were started or in their values, or another process failed."""


def told_failure(failure: Exception | None) -> bytes:
    """Returns the bytes that report a failure to other processes; empty if there is no failure.

    The bytes encode a number, a tab and the message. If a memory limit was exceeded, the number
    is a limit that would be enough; else it is 0.
    """
    if failure is None:
        return b""
    # Messages about a user's mistakes are clear without the error's type; others need the type.
    is_users = isinstance(failure, (ValueError, MemoryLimitExceeded))
    line = str(failure) if is_users else f"{type(failure).__name__}: {failure}"
    return f"{limit_bytes(failure)}\t{line}".encode()


def heard_failure(process: str, word: bytes) -> Exception:
    """Returns the error to raise in this process for the failure of another process.

    Args:
        process: the name of the other process, for the message.
        word: the bytes that `told_failure` returned in the other process.
    """
    limit, line = word.decode().split("\t", 1)
    message = f"{process} says: {line}"
    limit_bytes = int(limit)
    if limit_bytes:
        return MemoryLimitExceeded(message, limit_bytes)
    return Disagreement(message)


def limit_bytes(failure: Exception) -> int:
    """Returns a limit that would be enough if a memory limit was exceeded; else 0."""
    if isinstance(failure, MemoryLimitExceeded):
        return failure.smallest_limit_bytes
    return 0


def unlike(text: str, other: str) -> tuple[str, str]:
    r"""Returns, from each of two texts, the first line in which they differ.

    A long line is shortened to the part around the first character that differs.

    >>> unlike("a 1\nb 2", "a 1\nb 3")
    ('b 2', 'b 3')
    >>> unlike("x" * 90, "x" * 90 + "y")[1][-3:]
    'xxy'
    """
    lines = text.split("\n")
    their_lines = other.split("\n")
    pairs = zip_longest(lines, their_lines, fillvalue="nothing")
    line, their_line = next((a, b) for a, b in pairs if a != b)
    if max(len(line), len(their_line)) <= SHOWN:
        return line, their_line
    letters = zip_longest(line, their_line)
    at = next(i for i, (a, b) in enumerate(letters) if a != b)
    half = SHOWN // 2
    shown = slice(max(0, at - half), at + half)
    return line[shown], their_line[shown]
