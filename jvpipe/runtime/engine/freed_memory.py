"""Keeps the freed memory of CPU devices in the process, where new buffers find it at once.

By default, glibc returns a large buffer to the system when the buffer is freed. The system then
supplies the pages of the next buffer one by one, while the buffer is written. These page faults
take up to a quarter of a step (experiments/groups). A process that keeps freed buffers avoids the
faults. The price is that the process's memory stays at its peak.
"""

import ctypes
import os
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the numbers of these options in glibc's malloc.h
_OPTIONS = (
    (_MMAP_THRESHOLD, 2**30),  # larger buffers still come from the system, and return there
    (_TRIM_THRESHOLD, 2**31 - 1),  # how many freed bytes are kept: as many as glibc allows
)
_VARIABLES = (
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)


@cache
def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory, once per process; returns whether glibc accepts.

    Does nothing if the C library has no `mallopt`, or if the user's environment sets these options.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _VARIABLES):
        return False
    tell = getattr(ctypes.CDLL(None), "mallopt", None)
    return tell is not None and all(tell(*option) for option in _OPTIONS)
