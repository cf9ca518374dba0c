"""Refuses work in a forked process: JAX's devices need threads, which a fork does not copy."""

import os
import threading
from contextlib import suppress
from functools import cache

from jvpipe import _jax


def check_not_forked() -> None:
    """Raises ValueError if the parent used JAX before the fork: work here would wait forever."""
    owner, present = _owner(), os.getpid()
    if owner == present:
        return
    parent = f"process {owner}" if owner else "one"
    raise ValueError(
        f"process {present} was forked from {parent} that has used JAX, "
        "whose devices do no work in it: start processes with "
        "multiprocessing.get_context('spawn')"
    )


@cache
def _owner() -> int:
    """Returns the process that called this function first; 0 if a fork gave it JAX's devices.

    The answer is cached, and a forked process inherits it. After a fork, the answer is therefore
    the number of another process. If the parent had used JAX but had not called this function, the
    forked process inherits no answer. It then has JAX's devices, but only Python's threads. This
    case goes unnoticed on systems that do not list threads in `/proc`.
    """
    # A working device has JAX threads, which Python does not count as its own.
    with suppress(OSError):
        threads = len(os.listdir("/proc/self/task"))
        if _jax.has_devices() and threads <= threading.active_count():
            return 0
    return os.getpid()
