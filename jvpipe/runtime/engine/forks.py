"""The process that owns JAX's devices; a process forked from it lacks the threads behind them."""

import os
import threading
from contextlib import suppress
from functools import cache

from jvpipe import _jax


def check_not_forked() -> None:
    """Raises ValueError in a process forked from one that has used JAX: work would wait forever."""
    owner, present = _owner(), os.getpid()
    if owner == present:
        return
    parent = f"process {owner}" if owner else "one"
    raise ValueError(
        f"process {present} was forked from {parent} that has used JAX, whose devices do no work in it: start "
        "processes with multiprocessing.get_context('spawn')"
    )


@cache
def _owner() -> int:
    """Returns the process of the first call; 0 if its devices came with a fork.

    A forked process inherits the answer of the first call. If JAX was used before a fork, and the
    first call comes after it, the forked process has devices but no threads except Python's. On
    systems that do not list threads, this goes unnoticed.
    """
    # JAX's own threads do not survive a fork, so that only Python's threads are left.
    with suppress(OSError):
        threads = len(os.listdir("/proc/self/task"))
        if _jax.has_devices() and threads <= threading.active_count():
            return 0
    return os.getpid()
