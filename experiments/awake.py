"""Keeps the cores of a virtual machine awake: one that goes to sleep is given to others, and comes
back late.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LOOP = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def awake() -> Iterator[None]:
    """Meanwhile a loop runs on every core whenever nothing else wants to.

    Paced layers sleep, and on a busy host each of their awakenings waited: up to half of the time
    counted as stolen. Where the system knows no idle class there are no loops.
    """
    known = hasattr(os, "SCHED_IDLE")
    loops = [
        subprocess.Popen([sys.executable, "-c", LOOP, str(os.getpid())])
        for _ in range((os.cpu_count() or 1) * known)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
