"""Functions in processes of their own, forked from one that has imported much: that takes longer
than a tiny run.
"""

import atexit
import faulthandler
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory, mkdtemp

import jax

LIMIT_S = 240
STACKS_S = 200  # a process that still runs then says where all its threads stand
IMPORTED = (
    "jvpipe.cli.train_command",
    "jvpipe.models.bert",
    "grain",
    "tokenizers",
    "tests.hosts.worker",
)
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(list(IMPORTED))
Main = Callable[[Sequence[str]], int | None]


@cache
def compiled_folder() -> str:
    """Where processes keep what they compile, for those that run the same later; it is gone when
    the tests end.
    """
    folder = mkdtemp(prefix="compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def keep_compiled(folder: str) -> None:
    """Keeps all programs in a folder; JAX has read its environment already."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def environment() -> dict[str, str]:
    """Whoever runs in it makes its devices itself."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return os.environ | {
        "XLA_FLAGS": " ".join(flags),
        "JAX_COMPILATION_CACHE_DIR": compiled_folder(),
    }


def _run(
    main: Main,
    arguments: Sequence[str],
    environment: dict[str, str],
    told: tuple[Path, Path],
    stands: Path | None,
    largest_file_bytes: int | None,
) -> None:
    os.environ.update(environment)
    keep_compiled(environment["JAX_COMPILATION_CACHE_DIR"])
    for path, descriptor in zip(told, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    faulthandler.dump_traceback_later(STACKS_S)
    if stands:
        os.chdir(stands)
    if largest_file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file_bytes, resource.RLIM_INFINITY))
    sys.exit(main(arguments))


class Fork:
    """A function at work on arguments such as a command line has, and what it says."""

    def __init__(
        self,
        main: Main,
        arguments: Sequence[str],
        folder: Path,
        stands: Path | None,
        largest_file_bytes: int | None,
    ) -> None:
        self.arguments, self._told = arguments, (folder / "out", folder / "err")
        given = (main, arguments, environment(), self._told, stands, largest_file_bytes)
        self._process = FORKS.Process(target=_run, args=given)
        self._process.start()

    def wait_for(self, done: Callable[[], object]) -> None:
        """Until something is done; the process must not end before."""
        until = time.monotonic() + LIMIT_S
        while not done():
            assert self._process.exitcode is None, self._told[1].read_text()[-3000:]
            assert time.monotonic() < until
            time.sleep(0.05)

    def has_said(self, text: str) -> bool:
        """Whether it has."""
        return self._told[0].exists() and text in self._told[0].read_text()

    @property
    def pid(self) -> int:
        """Its number to the system."""
        assert self._process.pid
        return self._process.pid

    def send(self, signum: signal.Signals) -> None:
        """A signal."""
        os.kill(self.pid, signum)

    @property
    def exit_code(self) -> int | None:
        """None as long as it runs."""
        return self._process.exitcode

    def ended(self) -> CompletedProcess[str]:
        """Once it has ended: its exit code and what it said."""
        self._process.join(LIMIT_S)
        assert self._process.exitcode is not None, self._told[1].read_text()[-9000:]
        return CompletedProcess(
            self.arguments, self._process.exitcode, *(path.read_text() for path in self._told)
        )

    def kill(self) -> None:
        """Ends it at once, if it has not ended."""
        self._process.kill()
        self._process.join()


@contextmanager
def forked(
    main: Main, *arguments: str, stands: Path | None = None, largest_file_bytes: int | None = None
) -> Iterator[Fork]:
    """A function in a process that does not outlive the block; it stands in a folder, and its disk
    may be nearly full.

    The function returns the exit code, or None.
    """
    with TemporaryDirectory() as folder:
        fork = Fork(main, arguments, Path(folder), stands, largest_file_bytes)
        try:
            yield fork
        finally:
            fork.kill()
