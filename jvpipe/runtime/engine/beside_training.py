"""Work beside the training: how it shares the Python interpreter, and a thread that does it."""

import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar

T = TypeVar("T")

TURN_S = 1e-4
"""Seconds after which a thread beside the training gives up the interpreter.

With Python's own 5 ms, a dispatch could wait that long.
"""

_lock = Lock()
_outside: list[tuple[float, bool]] = []
"""(switch interval, garbage collection on), as each `beside_training` now active found them.

The first entry is the setting of the program outside, which the last one to leave puts back.
"""


@contextmanager
def beside_training() -> Iterator[None]:
    """Keeps work beside the training from holding up the thread that dispatches.

    The dispatching thread gives up the interpreter at each dispatch and then needs it back. Inside
    the context, threads therefore take turns of at most `TURN_S`. Garbage collection is off there,
    because tracing would set off collections that look at every object and take half a second.

    >>> with beside_training():
    ...     round(sys.getswitchinterval(), 4), gc.isenabled()
    (0.0001, False)
    """
    with _lock:
        _outside.append((sys.getswitchinterval(), gc.isenabled()))
        sys.setswitchinterval(min(TURN_S, _outside[0][0]))
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            interval_s, collecting = _outside.pop()
            if not _outside:
                sys.setswitchinterval(interval_s)
                if collecting:
                    gc.enable()


class Thread:
    """A thread beside the training that runs the calls asked of it, in order, once switched on.

    >>> thread = Thread("jvpipe-example")
    >>> thread.switch(on=True)
    >>> asked = thread.ask(sum, [1, 2])
    >>> thread.wait()
    >>> asked.result(), thread.waiting
    (3, 0)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._asked: list[Future[Any]] = []

    def __bool__(self) -> bool:
        return self._pool is not None

    def switch(self, *, on: bool) -> None:
        """Starts the thread again, or ends it; calls that have not begun are cancelled."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        self._pool, self._asked = ThreadPoolExecutor(1, self._name) if on else None, []

    @property
    def waiting(self) -> int:
        """How many calls have not ended yet."""
        # Finished calls are forgotten, so the list stays short.
        self._asked = [future for future in self._asked if not future.done()]
        return len(self._asked)

    def ask(self, act: Callable[..., T], *args: Any) -> Future[T]:
        """Hands a call to the thread; returns at once."""
        assert self._pool is not None, "switched on"
        self._asked.append(future := self._pool.submit(act, *args))
        return future

    def wait(self) -> None:
        """Waits until all calls have ended."""
        for future in self._asked:
            future.result()
