"""Whose JAX's devices are: a process that is forked from theirs has them without the threads that serve them."""

import os
import threading
from contextlib import suppress
from functools import cache

from jvpipe import _jax


def check_not_forked() -> None:
    """Raises ValueError in a process that was forked from one which has used JAX: any work would wait for ever."""
    if (owner := _owner()) != (own := os.getpid()):
        raise ValueError(
            f"process {own} was forked from {f'process {owner}' if owner else 'one'} that has used "
            "JAX, whose devices do no work in it: start processes with "
            "multiprocessing.get_context('spawn')"
        )


@cache
def _owner() -> int:
    """The process that this was first asked in; 0 if the devices there were of yet another one.

    What is forked inherits the answer. Where JAX was used before and nobody asked, its devices are there, and there is
    no thread but Python's; where the system does not tell of threads, that is not seen.
    """
    with suppress(OSError):
        threads = len(os.listdir("/proc/self/task"))
        if _jax.has_devices() and threads <= threading.active_count():
            return 0
    return os.getpid()
