"""The process that JAX's devices belong to: one forked from it has them without the threads that serve them."""

import os
import threading
from contextlib import suppress
from functools import cache

from jvpipe import _jax


def check_not_forked() -> None:
    """Raises ValueError in a process that was forked from one which has used JAX: any work would wait for ever."""
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
    """Returns the process in which this was first asked; 0 if the devices there belonged to yet another one.

    A forked process inherits the answer. If JAX was used before and nobody asked, the fork has
    devices but no threads except Python's; on systems that do not list threads, that goes
    unnoticed.
    """
    # JAX's own threads do not survive a fork: then there are only those that Python knows.
    with suppress(OSError):
        threads = len(os.listdir("/proc/self/task"))
        if _jax.has_devices() and threads <= threading.active_count():
            return 0
    return os.getpid()
