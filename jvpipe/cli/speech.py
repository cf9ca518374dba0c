"""What a command says while it works: lines unless stdout is a terminal, a display if stderr is one."""

import logging
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.logging import RichHandler

from jvpipe.pipeline import Pipeline
from jvpipe.report.console import Place, TrainingDisplay, in_runs
from jvpipe.report.lines import Lines
from jvpipe.report.metrics import StepMetrics

_log = logging.getLogger("jvpipe")


class Speech:
    """A context manager: inside it the log of jvpipe is heard, each phase with its seconds.

    Where stderr is a terminal, the log and a display appear there, else warnings alone; where stdout is none, lines do.
    """

    def __init__(self) -> None:
        self._screen = Console(stderr=True)
        shown = self._screen.is_terminal
        self._lines = None if shown and sys.stdout.isatty() else Lines(sys.stdout)
        self._display: TrainingDisplay | None = None
        self._total = 0
        self._opened = ExitStack()
        self._handlers: list[logging.Handler] = [
            RichHandler(logging.INFO, self._screen, show_level=False, show_path=False)
            if shown
            else _warnings()
        ]
        if self._lines:
            self._handlers.append(_ToLines(self._lines))

    def __enter__(self) -> "Speech":
        self._opened.callback(_restore, _log.level, _log.propagate)
        _log.setLevel(logging.DEBUG)  # each handler has a level of its own
        _log.propagate = False  # some library may have given the root a handler
        for handler in self._handlers:
            _log.addHandler(handler)
            self._opened.callback(_log.removeHandler, handler)
        if self._lines:
            self._opened.enter_context(self._lines)
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def doing(self, what: str) -> None:
        """Notes what goes on now."""
        if self._lines:
            self._lines.doing(what)

    def training(self, total: int, first: int) -> TrainingDisplay:
        """The display of a training, which is shown as long as it is open.

        Args:
            total: the number of its last step.
            first: the number of steps that are done.
        """
        self._total = total
        self._display = TrainingDisplay(total, first, self._screen)
        return self._display

    def step(self, metrics: StepMetrics, places: Mapping[str, Place]) -> None:
        """Tells of a step that has ended.

        Args:
            metrics: of the step.
            places: the devices of the run by name, in the order of their rows.
        """
        if self._lines:
            self._lines.step(metrics, self._total)
        if self._display:
            self._display.update(metrics, places)


def places(pipe: Pipeline) -> dict[str, Place]:
    """What is on each device of a pipeline now, by its name."""
    session, layers = pipe.session, defaultdict[int, list[int]](list)
    for stage in pipe.plan.stages:
        for device in stage.devices:
            layers[device] += stage.layers
    devices, limits = session.settings.devices, session.settings.limits
    return {
        str(devices[d]): Place(in_runs(layers[d]), limits[d] if limits else None)
        for d in sorted(layers)
    }


@contextmanager
def progress() -> Iterator[None]:
    """Inside it the log of jvpipe is heard on stderr, as it comes."""
    level, propagate, handler = _log.level, _log.propagate, logging.StreamHandler()
    _log.setLevel(logging.INFO)
    _log.propagate = False  # some library may have given the root a handler
    _log.addHandler(handler)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        _restore(level, propagate)


class _ToLines(logging.Handler):
    """Lines of what is logged, and of phases which have begun."""

    def __init__(self, lines: Lines) -> None:
        super().__init__(logging.DEBUG)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        phase = getattr(record, "phase", None)
        if record.levelno == logging.INFO:
            self._lines.say(record.getMessage())
        if phase:
            (self._lines.begin if record.levelno == logging.DEBUG else self._lines.end)(phase)


def _restore(level: int, propagate: bool) -> None:
    _log.setLevel(level)
    _log.propagate = propagate


def _warnings() -> logging.Handler:
    """To stderr, as Python does where nobody listens."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    return handler
