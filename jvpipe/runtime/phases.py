"""The phases before the first step: the log tells what each took."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger("jvpipe")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Tells the log how long a phase took, once it has ended.

    Args:
        name: what is done, such as "tracing the loss".
    """
    start_s = time.perf_counter()
    yield
    _log.info("%s took %.2f s", name, time.perf_counter() - start_s)
