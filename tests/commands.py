"""The command line in processes of its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from subprocess import CompletedProcess
from typing import Any

from tests.forks import Fork, forked


def train(arguments: Sequence[str]) -> int:
    """What `python -m jvpipe.train` does."""
    from jvpipe.cli import train

    return train.main(list(arguments))


@contextmanager
def running(*arguments: str, **where: Any) -> Iterator[Fork]:
    """A command that does not outlive the block; `where` as `forked` takes it."""
    with forked(train, *arguments, **where) as command:
        yield command


def finished(*arguments: str, **where: Any) -> CompletedProcess[str]:
    """A command that has ended."""
    with running(*arguments, **where) as command:
        return command.ended()
