"""What CPU devices free is kept, unless the user's environment says otherwise."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource
import numpy as np
from jvpipe.runtime.engine.freed_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(1 << 20) for _ in range(16)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(keep_freed_memory(), faults(), faults())
"""

AS_USERS = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
AS_USERS |= {"NUMPY_MADVISE_HUGEPAGE": "0"}


def told(**variables: str) -> tuple[str, int, int]:
    """Whether memory is kept, and the page faults of making 128 MiB and of making them again."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS],
        capture_output=True,
        text=True,
        check=True,
        env=AS_USERS | variables,
    )
    kept, first, again = done.stdout.split()
    return kept, int(first), int(again)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_memory_is_kept() -> None:
    kept, first, again = told()
    assert kept == "True"
    assert first > 1000
    assert again < first / 10


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_the_environment_has_the_last_word() -> None:
    kept, first, again = told(MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == "False"
    assert again > first / 2
