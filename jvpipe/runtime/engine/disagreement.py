"""What differs between processes, and what one of them has failed with, as they tell one another."""

from itertools import zip_longest

from jvpipe.runtime.engine.tensors import MemoryLimitExceeded

_SHOWN = 80
"""So many letters of what differs are told."""


class Disagreement(ValueError):  # noqa: N818 - it says what differs
    """Processes were started or given something different."""


def told_failure(failure: Exception | None) -> bytes:
    """What a process tells the others of its failure: a limit that would do, and a line."""
    if failure is None:
        return b""
    named = isinstance(failure, (ValueError, MemoryLimitExceeded))
    return f"{limit_bytes(failure)}\t{failure if named else f'{type(failure).__name__}: {failure}'}".encode()


def heard_failure(process: str, told: bytes) -> Exception:
    """What another process failed with."""
    limit_bytes, line = told.decode().split("\t", 1)
    message = f"{process} says: {line}"
    return (
        MemoryLimitExceeded(message, int(limit_bytes))
        if int(limit_bytes)
        else Disagreement(message)
    )


def limit_bytes(failure: Exception) -> int:
    """The limit that would do, of a failure to keep one; else 0."""
    return failure.smallest_limit_bytes if isinstance(failure, MemoryLimitExceeded) else 0


def unlike(text: str, other: str) -> tuple[str, str]:
    r"""The first line of each of two texts in which they differ; of long lines what is around the difference.

    >>> unlike("a 1\nb 2", "a 1\nb 3")
    ('b 2', 'b 3')
    """
    pairs = zip_longest(text.split("\n"), other.split("\n"), fillvalue="nothing")
    own, their = next((a, b) for a, b in pairs if a != b)
    if max(len(own), len(their)) <= _SHOWN:
        return own, their
    common = next((i for i, (a, b) in enumerate(zip(own, their, strict=False)) if a != b), 0)
    shown = slice(max(0, common - _SHOWN // 2), common + _SHOWN // 2)
    return own[shown], their[shown]
