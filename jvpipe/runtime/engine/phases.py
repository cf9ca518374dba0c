"""The phases before the first step: the log tells what each took."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger("jvpipe")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Tells the log how long a phase took, once it has ended; that it begins, to whoever listens for details.

    Both records have its name as `phase`.

    Args:
        name: what is done, such as "tracing the loss".
    """
    _log.debug("%s", name, extra={"phase": name})
    start_s = time.perf_counter()
    yield
    _log.info("%s took %.2f s", name, time.perf_counter() - start_s, extra={"phase": name})
