"""The command line in processes of its own, forked from one that has imported it: that takes longer than a tiny run."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

LIMIT_S = 240
IMPORTED = ("jvpipe.cli.train", "jvpipe.models.bert", "grain", "tokenizers")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(list(IMPORTED))


def environment() -> dict[str, str]:
    """The command makes its devices itself."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return os.environ | {"XLA_FLAGS": " ".join(flags)}


def _main(arguments: list[str], environment: dict[str, str], out: str, err: str) -> None:
    os.environ.update(environment)
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    from jvpipe.cli import train

    sys.exit(train.main(arguments))


class Command:
    """A run of jvpipe.train with these arguments."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.arguments, self._out, self._err = arguments, folder / "out", folder / "err"
        self._process = FORKS.Process(target=_main, args=(arguments, environment(), str(self._out), str(self._err)))
        self._process.start()

    def wait_for(self, done: Callable[[], object]) -> None:
        """Until something is done; the command must not end before."""
        until = time.monotonic() + LIMIT_S
        while not done():
            assert self._process.exitcode is None, self._err.read_text()
            assert time.monotonic() < until
            time.sleep(0.05)

    def send(self, signum: signal.Signals) -> None:
        """A signal."""
        assert self._process.pid
        os.kill(self._process.pid, signum)

    def ended(self) -> CompletedProcess[str]:
        """Once it has ended: its exit code and what it said."""
        self._process.join(LIMIT_S)
        assert self._process.exitcode is not None, "it did not end"
        return CompletedProcess(self.arguments, self._process.exitcode, self._out.read_text(), self._err.read_text())

    def kill(self) -> None:
        """Ends it at once, if it has not ended."""
        self._process.kill()
        self._process.join()


@contextmanager
def running(*arguments: str) -> Iterator[Command]:
    """A command that does not outlive the block."""
    with TemporaryDirectory() as folder:
        command = Command(list(arguments), Path(folder))
        try:
            yield command
        finally:
            command.kill()


def finished(*arguments: str) -> CompletedProcess[str]:
    """A command that has ended."""
    with running(*arguments) as command:
        return command.ended()
