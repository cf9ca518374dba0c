"""Logs the phases of the work before the first step, and how long each phase took."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger("jvpipe")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Logs at level DEBUG that a phase begins, and at level INFO how long it took.

    Both log records have an attribute `phase` with the name. Progress displays use the attribute to
    find the records.

    Args:
        name: the work of the phase, such as "tracing the loss".
    """
    _log.debug("%s", name, extra={"phase": name})
    start_s = time.perf_counter()
    # Displays show a phase as current work until the second record, so a failed one ends too.
    try:
        yield
    finally:
        _log.info("%s took %.2f s", name, time.perf_counter() - start_s, extra={"phase": name})
