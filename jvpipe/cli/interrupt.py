"""Ctrl-C and SIGTERM as a wish that is heard between two steps."""

import signal
import sys
from types import FrameType


class StopRequest:
    """A context manager: inside it the first signal is noted in `signum`, a second one ends the process at once.

    >>> with StopRequest() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     stop.signum == signal.SIGTERM
    True
    """

    signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous = {}

    def __enter__(self) -> "StopRequest":
        self._previous = {signum: signal.signal(signum, self._note) for signum in self.signals}
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        for each in self.signals:
            signal.signal(each, signal.SIG_DFL)
        print("\nfinishing the step and saving; once more stops at once", file=sys.stderr)
