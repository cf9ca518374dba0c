"""What a run says where there is no terminal: a line at once for each phase, and one every few seconds of work."""

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from jvpipe.report.metrics import StepMetrics
from jvpipe.util.sizes import format_bytes


@runtime_checkable
class Written(Protocol):
    """Where text goes."""

    def write(self, text: str, /) -> Any:
        """Takes text."""
        ...

    def flush(self) -> Any:
        """Passes on what it has taken."""
        ...


class Lines:
    """Lines in a pipe or a file, each there at once; nobody need read them.

    A context manager: inside it a thread says what is being done whenever no line was written for
    `silence_s`.

    Args:
        out: where they go.
        period_s: seconds between the lines of two steps.
        silence_s: after so many seconds without a line one says what goes on.
        clock: seconds from any origin.
    """

    def __init__(
        self,
        out: Written,
        period_s: float = 5.0,
        silence_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out, self._period_s, self._silence_s, self._clock = out, period_s, silence_s, clock
        self._said_s, self._step_s = clock(), -math.inf
        self._doing: list[tuple[str, float]] = []  # what goes on, and within it, each since when
        self._ended = threading.Event()

    def __enter__(self) -> "Lines":
        threading.Thread(target=self._watch, name="jvpipe-lines", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()

    def say(self, line: str) -> None:
        """Writes a line."""
        with suppress(
            OSError, ValueError
        ):  # whoever read them has gone: that must not stop the training
            self._out.write(line + "\n")
            self._out.flush()
        self._said_s = self._clock()

    def doing(self, what: str) -> None:
        """Notes what goes on from here, in place of all before."""
        self._doing = [(what, self._clock())]

    def begin(self, part: str) -> None:
        """Notes a part of what goes on, until `end`."""
        self._doing.append((part, self._clock()))

    def end(self, part: str) -> None:
        """Notes that a part is done."""
        names = [name for name, _ in self._doing]
        if part in names:
            # The last of that name: parts may lie within each other.
            del self._doing[len(names) - 1 - names[::-1].index(part)]

    def step(self, metrics: StepMetrics, total: int) -> None:
        """Says what a step was like, if it is the first, the last, or `period_s` after the last one that was written.

        Args:
            metrics: of the step.
            total: the number of the last step.
        """
        if metrics.step == total or self._clock() - self._step_s >= self._period_s:
            self._step_s = self._clock()
            self.say(step_line(metrics, total))

    def tell_silence(self) -> None:
        """Says what goes on, if no line was written for long."""
        now_s = self._clock()
        if now_s - self._said_s >= self._silence_s and self._doing:
            what, since_s = self._doing[-1]
            self.say(f"{what}: {now_s - since_s:.0f} s so far")

    def _watch(self) -> None:
        while not self._ended.wait(self._silence_s / 10):
            self.tell_silence()


def step_line(metrics: StepMetrics, total: int) -> str:
    """Writes a step as a line.

    Args:
        metrics: of the step.
        total: the number of the last step.
    """
    peak = max(metrics.peak_bytes.values(), default=0)
    return (
        f"step {metrics.step} of {total}: loss {metrics.loss:.4f}, {metrics.examples_per_s:.1f} examples/s, "
        f"bubble {metrics.bubble_fraction:.0%}, peak {format_bytes(peak)}"
    )
