"""The memory of CPU devices: freed buffers are kept by the process for the next ones.

By default, glibc returns a large buffer to the system when it is freed. The pages of the next
buffer then come from the system one by one while it is written, which takes up to a quarter of a
step (experiments/groups). If buffers are kept, their pages are there at once, and the process holds
as much memory as at its peak.
"""

import ctypes
import os
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the numbers of these options in glibc's malloc.h
_KEPT_BYTES = 2**31 - 1  # the largest value of the option
_MAPPED_BYTES = 2**30  # larger buffers are still mapped, and returned when they are freed
_VARIABLES = (
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)


@cache
def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory, once for the process; returns whether it does.

    Does nothing if there is another C library, or the user's environment sets these options.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _VARIABLES):
        return False
    tell = getattr(ctypes.CDLL(None), "mallopt", None)
    options = (_MMAP_THRESHOLD, _MAPPED_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES)
    return tell is not None and all(tell(*option) for option in options)
