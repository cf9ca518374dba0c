"""What a command says while it works: lines where stdout is not a terminal, a display where stderr is one."""

import logging
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
        # Where both are terminals the display says it all.
        self._lines = None if shown and sys.stdout.isatty() else Lines(sys.stdout)
        self._display: TrainingDisplay | None = None
        self._total = 0
        self._opened = ExitStack()
        self._handlers: list[logging.Handler] = [
            RichHandler(logging.INFO, self._screen, show_level=False, show_path=False)
            if shown
            else _to_stderr(logging.WARNING)  # as Python does where nobody listens
        ]
        if self._lines:
            self._handlers.append(_ToLines(self._lines))

    def __enter__(self) -> "Speech":
        self._opened.enter_context(_heard(logging.DEBUG, self._handlers))
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
        """Returns the display of a training, which is shown as long as it is open.

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
    """Returns what is on each device of a pipeline now, by its name."""
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
    with _heard(logging.INFO, [_to_stderr(logging.INFO)]):
        yield


@contextmanager
def _heard(level: int, handlers: Sequence[logging.Handler]) -> Iterator[None]:
    """Inside it handlers hear the log of jvpipe from a level on; each may have a higher one of its own."""
    level_before, propagate = _log.level, _log.propagate
    _log.setLevel(level)
    _log.propagate = False  # some library may have given the root a handler
    for handler in handlers:
        _log.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            _log.removeHandler(handler)
        _log.setLevel(level_before)
        _log.propagate = propagate


def _to_stderr(level: int) -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setLevel(level)
    return handler


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
