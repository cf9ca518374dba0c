"""The command line, here or in processes of its own."""

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest import mock

import jax

from tests.forks import Fork, Main, forked


def train(arguments: Sequence[str]) -> int:
    """What `python -m jvpipe.train` does."""
    from jvpipe.cli import train_command

    return train_command.main(list(arguments))


@contextmanager
def as_users_have_it() -> Iterator[None]:
    """Inside, JAX is as users have it; a command keeps nothing for later ones."""
    names = (
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before, update = {name: jax.config.values[name] for name in names}, jax.config.update

    def updated(name: str, value: Any) -> None:
        if name != "jax_num_cpu_devices":  # there are eight
            update(name, value)

    try:
        with ExitStack() as held:
            held.enter_context(jax.numpy_dtype_promotion("standard"))
            held.enter_context(jax.numpy_rank_promotion("allow"))
            held.enter_context(mock.patch.dict(os.environ, JAX_COMPILATION_CACHE_DIR=""))
            held.enter_context(mock.patch.object(jax.config, "update", updated))
            yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def here(main: Main, *arguments: str, stands: Path | None = None) -> CompletedProcess[str]:
    """What has ended; it ran in this process, which has compiled much that such runs have in
    common.

    Args:
        main: takes the arguments, and returns the exit code or None.
        arguments: of a command line.
        stands: the folder that it stands in.
    """
    out, err = io.StringIO(), io.StringIO()
    with ExitStack() as held:
        held.enter_context(as_users_have_it())
        held.enter_context(chdir(stands or Path.cwd()))
        held.enter_context(redirect_stdout(out))
        held.enter_context(redirect_stderr(err))
        code = main(arguments) or 0
    return CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def finished(*arguments: str, stands: Path | None = None) -> CompletedProcess[str]:
    """A command that has ended, here; it stands in a folder."""
    return here(train, *arguments, stands=stands)


@contextmanager
def running(*arguments: str, **where: Any) -> Iterator[Fork]:
    """A command in a process that does not outlive the block; `where` as `forked` takes it."""
    with forked(train, *arguments, **where) as command:
        yield command


def ended(*arguments: str, **where: Any) -> CompletedProcess[str]:
    """A command that has ended, in a process of its own."""
    with running(*arguments, **where) as command:
        return command.ended()
