"""The interpreter, shared: one thread dispatches the training while another traces, plans and compiles."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

TURN_S = 1e-4
_lock = Lock()
_outside: list[tuple[float, bool]] = []  # what each that is inside has found; the first is what holds outside


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
