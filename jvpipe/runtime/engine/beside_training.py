"""Lets other threads work while training runs, without delaying the thread that dispatches.

Python's interpreter runs only one thread at a time. Work beside the training, such as planning and
compiling, can therefore keep the dispatching thread waiting for its turn.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar

import jax

T = TypeVar("T")

TURN_S = 1e-4
"""The longest turn of a thread, in seconds, while another thread waits for the interpreter.

Python's own value is 5 ms, which would be the longest delay of a dispatch.
"""

_lock = Lock()
_outside: list[tuple[float, bool]] = []
"""The switch interval that each active `beside_training` found, and whether collection was on.

The first entry has the settings of the rest of the program. Each context that ends removes the last
entry, so the last context to end gets the first entry, and restores its settings. This also holds
for contexts of several threads, which may end in any order.
"""


@contextmanager
def beside_training() -> Iterator[None]:
    """Keeps the work inside the context from delaying the thread that dispatches.

    The context changes two settings of the whole process. At each dispatch, the dispatching thread
    gives up the interpreter, and gets it back only after another thread's turn. So a turn is
    limited to `TURN_S`. Garbage collection is off, because tracing would start collections that
    look at every object and stop all threads for half a second.

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


def program_ends() -> bool:
    """Tells whether the main thread has ended. From then on, Python refuses calls for threads."""
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(int)
    except RuntimeError:
        return True
    return False


class Thread:
    """A thread beside the training that runs calls, one after another, in the order of `ask`.

    The thread is off until `switch` starts it. In JAX, each thread has its own `jax.enable_x64`. A
    call runs under the setting of the thread that has asked for it.

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
        """Starts the thread, or ends it.

        If the thread is on already, it first ends: it finishes the call that it is running, and its
        other calls are cancelled.
        """
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        self._pool, self._asked = ThreadPoolExecutor(1, self._name) if on else None, []

    @property
    def waiting(self) -> int:
        """The number of calls that have not ended yet."""
        # Calls that have ended are removed from the list, so that it stays short.
        self._asked = [future for future in self._asked if not future.done()]
        return len(self._asked)

    def ask(self, act: Callable[..., T], *args: Any) -> Future[T]:
        """Hands a call to the thread, and returns its future result at once."""
        assert self._pool is not None, "switched on"
        wide = jax.config.read("jax_enable_x64")
        self._asked.append(future := self._pool.submit(_under, wide, act, *args))
        return future

    def wait(self) -> None:
        """Waits for the calls in their order; raises the error of the first that has failed.

        Calls that `waiting` has seen end are not looked at. Their errors are only in their futures.
        """
        for future in self._asked:
            future.result()


def _under(wide: bool, act: Callable[..., T], *args: Any) -> T:
    """Calls a function under the given setting of `jax.enable_x64`."""
    with jax.enable_x64(wide):
        return act(*args)
