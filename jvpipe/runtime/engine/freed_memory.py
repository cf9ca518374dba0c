"""The memory of CPU devices: what is freed is kept for the next buffer.

Left alone, glibc gives large buffers back to the system as they are freed, and the pages of the
next one come one by one as it is written: up to a quarter of a step (experiments/groups). Kept,
they are there; a process holds what it held at its peak.
"""

import ctypes
import os
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES = 2**31 - 1  # the most that can be said
_MAPPED_BYTES = 2**30  # larger buffers are pages of their own
_VARIABLES = (
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)


@cache
def keep_freed_memory() -> bool:
    """Tells glibc to keep what is freed, once for the process; returns whether it does.

    It is not told where there is another C library, or where the user's environment has told it
    already.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _VARIABLES):
        return False
    tell = getattr(ctypes.CDLL(None), "mallopt", None)
    options = (_MMAP_THRESHOLD, _MAPPED_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES)
    return tell is not None and all(tell(*option) for option in options)
