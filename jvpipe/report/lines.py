"""Writes the progress of a run as lines of text, for output to a file or pipe."""

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from io import TextIOBase
from typing import TextIO

from jvpipe.report.metrics import StepMetrics
from jvpipe.util.sizes import format_bytes


class Lines:
    """A context manager that writes lines to a pipe or file, and flushes after each.

    While the context is open, a thread writes a line about the current work whenever no line was
    written for `silence_s`, so a reader can see which work takes long. If the reader of the pipe
    has gone, lines are lost without an error.

    Args:
        out: the destination of the lines.
        period_s: the shortest time between the lines of two steps, in seconds.
        silence_s: the seconds without a line after which the thread writes a line.
        clock: returns seconds, counted from any origin.
    """

    def __init__(
        self,
        out: TextIO | TextIOBase,
        period_s: float = 5.0,
        silence_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out, self._clock = out, clock
        self._period_s, self._silence_s = period_s, silence_s
        # The times of the last line, and of the last line about a step.
        self._said_s, self._step_s = clock(), -math.inf
        # The current work and its nested parts, outermost first, each with its start time.
        self._doing: list[tuple[str, float]] = []
        self._ended = threading.Event()

    def __enter__(self) -> "Lines":
        threading.Thread(target=self._watch, name="jvpipe-lines", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()

    def say(self, line: str) -> None:
        """Writes a line."""
        # If the reader of the pipe has gone, training must continue.
        with suppress(OSError, ValueError):
            self._out.write(line + "\n")
            self._out.flush()
        self._said_s = self._clock()

    def doing(self, what: str) -> None:
        """Sets the current work, in place of the previous work and its parts."""
        self._doing = [(what, self._clock())]

    def begin(self, part: str) -> None:
        """Begins a part of the current work, which lasts until `end` is called with its name."""
        self._doing.append((part, self._clock()))

    def end(self, part: str) -> None:
        """Ends a part of the current work."""
        places = [i for i, (name, _) in enumerate(self._doing) if name == part]
        if places:
            # Parts may be nested, so the last one with this name ends.
            del self._doing[places[-1]]

    def step(self, metrics: StepMetrics, total: int) -> None:
        """Writes a line for a step if it is the first or last, or if `period_s` have passed.

        Args:
            metrics: the metrics of the step.
            total: the number of the last step.
        """
        if metrics.step == total or self._clock() - self._step_s >= self._period_s:
            self._step_s = self._clock()
            self.say(step_line(metrics, total))

    def tell_silence(self) -> None:
        """Writes a line about the current work if no line was written for `silence_s`."""
        now_s = self._clock()
        if now_s - self._said_s >= self._silence_s:
            for what, since_s in self._doing[-1:]:  # `end` may empty the list at any time
                self.say(f"{what}: {now_s - since_s:.0f} s so far")

    def _watch(self) -> None:
        while not self._ended.wait(self._silence_s / 10):
            self.tell_silence()


def step_line(metrics: StepMetrics, total: int) -> str:
    """Returns the line of a step.

    Args:
        metrics: the metrics of the step.
        total: the number of the last step.
    """
    peak = max(metrics.peak_bytes.values(), default=0)
    numbers = (
        f"loss {metrics.loss:.4f}",
        f"{metrics.examples_per_s:.1f} examples/s",
        f"bubble {metrics.bubble_fraction:.0%}",
        f"peak {format_bytes(peak)}",
    )
    return f"step {metrics.step} of {total}: {', '.join(numbers)}"
