"""The interpreter, shared: one thread dispatches the training while another traces, plans and compiles."""

import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar

T = TypeVar("T")
TURN_S = 1e-4
_lock = Lock()
_outside: list[
    tuple[float, bool]
] = []  # what each that is inside has found; the first is what holds outside


@contextmanager
def beside_training() -> Iterator[None]:
    """While it lasts nobody keeps the interpreter for long: every wait of the dispatching thread is one of a device.

    Turns end after `TURN_S`, not after 5 ms: a dispatch gives the interpreter up and asks for it again. And tracing
    does not set off collections of garbage, of which one that looks at every object takes half a second.

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
    """A thread beside the training, once it is switched on: it does one thing after another.

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
        """Begins anew, or ends; what has not begun by then is not done."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        self._pool, self._asked = ThreadPoolExecutor(1, self._name) if on else None, []

    @property
    def waiting(self) -> int:
        """How much it has not done yet."""
        self._asked = [future for future in self._asked if not future.done()]
        return len(self._asked)

    def ask(self, act: Callable[..., T], *args: Any) -> Future[T]:
        """Has it do something; returns at once."""
        assert self._pool is not None, "switched on"
        self._asked.append(future := self._pool.submit(act, *args))
        return future

    def wait(self) -> None:
        """Waits until all is done."""
        for future in self._asked:
            future.result()
