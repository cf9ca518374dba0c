"""Differences and failures, as processes tell them to one another."""

from itertools import zip_longest

from jvpipe.runtime.engine.tensors import MemoryLimitExceeded

SHOWN = 80
"""The most letters of what differs that a message has."""


class Disagreement(ValueError):  # noqa: N818 - it says what differs
    """Processes were started or given something different."""


def told_failure(failure: Exception | None) -> bytes:
    """Returns what a process tells the others of its failure: a limit that would do, and a line."""
    if failure is None:
        return b""
    # The user's own mistakes are told as they are; of anything else the type matters too.
    is_users = isinstance(failure, (ValueError, MemoryLimitExceeded))
    line = str(failure) if is_users else f"{type(failure).__name__}: {failure}"
    return f"{limit_bytes(failure)}\t{line}".encode()


def heard_failure(process: str, word: bytes) -> Exception:
    """Returns what another process failed with, to be raised in this one.

    Args:
        process: the other one, in words.
        word: what it told, as `told_failure` makes it.
    """
    limit, line = word.decode().split("\t", 1)
    message = f"{process} says: {line}"
    limit_bytes = int(limit)
    return MemoryLimitExceeded(message, limit_bytes) if limit_bytes else Disagreement(message)


def limit_bytes(failure: Exception) -> int:
    """Returns the limit that would do, of a failure to keep one; else 0."""
    return failure.smallest_limit_bytes if isinstance(failure, MemoryLimitExceeded) else 0


def unlike(text: str, other: str) -> tuple[str, str]:
    r"""Returns the first line of each of two texts in which they differ; of long lines what is around the difference.

    >>> unlike("a 1\nb 2", "a 1\nb 3")
    ('b 2', 'b 3')
    """
    pairs = zip_longest(text.split("\n"), other.split("\n"), fillvalue="nothing")
    line, their_line = next((a, b) for a, b in pairs if a != b)
    if max(len(line), len(their_line)) <= SHOWN:
        return line, their_line
    letters = enumerate(zip(line, their_line, strict=False))
    at = next((i for i, (a, b) in letters if a != b), 0)
    shown = slice(max(0, at - SHOWN // 2), at + SHOWN // 2)
    return line[shown], their_line[shown]
