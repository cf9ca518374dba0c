"""The outputs of a command: files, whose paths are checked first, and printed progress."""

import logging
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree
from rich.console import Console
from rich.logging import RichHandler
from safetensors import SafetensorError

from jvpipe.pipeline import Pipeline
from jvpipe.report.console import DeviceRow, TrainingDisplay, in_runs
from jvpipe.report.lines import Lines
from jvpipe.report.metrics import StepMetrics
from jvpipe.runtime.state.checkpoints import array_file
from jvpipe.util.extras import extra
from jvpipe.util.paths import path_names


def check_outputs(
    outputs: Mapping[str, str | None], inputs: Mapping[str, str | None] | None = None
) -> None:
    """Raises ValueError unless a file can be written at each path.

    No file is changed. Two options must not name the same file.

    Args:
        outputs: the paths of files to write, by option; None if an option is not given.
        inputs: the paths of files to read, by option; no output may overwrite one of them.

    >>> check_outputs({"--json": "nowhere/plan.json"})
    Traceback (most recent call last):
    ValueError: --json nowhere/plan.json: there is no folder nowhere: make it, or give another path
    """
    taken: dict[Path, str] = {}
    for option, path in (inputs or {}).items():
        # A path with a null byte is invalid. Reading the input raises the error for it.
        if path and "\0" not in path:
            taken[Path(path).resolve()] = option
    for option, path in outputs.items():
        if path is None:
            continue
        if reason := _reason(path):
            raise ValueError(f"{option} {path}: {reason}")
        file = Path(path).resolve()
        if file in taken:
            raise ValueError(
                f"{option} {path}: {taken[file]} names the same file; give another path"
            )
        taken[file] = option


def check_figure(path: str) -> None:
    """Checks that `--figure` can be drawn to a path.

    Raises:
        ValueError: no file can be written there, or its suffix is not the suffix of a format.
        MissingExtraError: the package that draws is not installed.
    """
    with extra("figures"):
        from jvpipe.report.figures import check_format
    check_outputs({"--figure": path})
    check_format(path)


@contextmanager
def writing(option: str, path: str) -> Iterator[Path]:
    """Yields an output's path; an OSError in the block gets a message that names the option."""
    try:
        yield Path(path)
    except OSError as error:
        raise OSError(
            f"{option} {path}: the file cannot be written ({error.strerror or error})"
        ) from None


def _reason(path: str) -> str | None:
    """Returns the reason why no file can be written at a path; None if a file can be written."""
    file = Path(path)
    try:
        if file.is_dir():
            return "this is a folder: give the path of a file"
        if not file.parent.is_dir():
            return f"there is no folder {file.parent}: make it, or give another path"
        if file.exists() and not file.is_file():
            return None  # opening a pipe or a device could have an effect outside
        there = file.exists()
        # Opening the file also detects a read-only disk, which permissions do not show.
        with file.open("ab"):
            pass
        if not there:
            file.resolve().unlink()  # removes the file, not a link to it
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        return f"the file cannot be written ({cause}): give another path"
    return None


# The functions below write parameters to files that other programs read.


def parameter_names(params: PyTree) -> dict[str, Any]:
    """Returns the leaves of a pytree by name: the path of each leaf, with dots between its keys.

    All names are different. If dots in keys make two names equal, `path_names` escapes all keys.

    >>> list(parameter_names({"encoder": [{"kernel": 1.0}, {"kernel": 2.0}]}))
    ['encoder.0.kernel', 'encoder.1.kernel']
    """
    return dict(zip(path_names(params, "."), jax.tree.leaves(params), strict=True))


def check_writable(path: Path) -> None:
    """Raises ValueError if `--export` certainly cannot write a safetensors file at a path."""
    check_outputs({"--export": str(path)})
    if path.suffix != ".safetensors":
        raise ValueError(
            f"--export {path}: parameters are written in the format safetensors; name the file "
            f"{path.stem}.safetensors"
        )


def write_safetensors(path: Path, params: PyTree) -> None:
    """Writes host arrays to a `.safetensors` file, with the names of `parameter_names`.

    Raises:
        OSError: the file cannot be written. No part of it is left.
    """
    leaves = parameter_names(params).items()
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in leaves}
    # The file gets its final name only when it is complete. Renaming is atomic, so no other program
    # ever reads an incomplete file.
    draft = path.with_name(path.name + ".draft")
    try:
        array_file.save(draft, arrays)
        draft.replace(path)
    except (SafetensorError, OSError) as problem:
        draft.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {problem}") from problem


# A running command prints lines to stdout, shows a display on stderr, or both (see `Speech`).

_log = logging.getLogger("jvpipe")


class Speech:
    """A context manager that shows a command's progress: its phases, its steps, and jvpipe's log.

    stderr, if it is a terminal         the log, and a display of the training
    stderr, if it is not a terminal     the warnings of the log
    stdout, if both are terminals       nothing, because the display shows the same
    stdout, otherwise                   lines
    """

    def __init__(self) -> None:
        self._screen = Console(stderr=True)
        shown = self._screen.is_terminal
        self._lines = None if shown and sys.stdout.isatty() else Lines(sys.stdout)
        self._display: TrainingDisplay | None = None
        self._total = 0
        self._opened = ExitStack()
        # WARNING is Python's own default for logs without handlers.
        handler = _to_stderr(logging.WARNING)
        if shown:
            handler = RichHandler(logging.INFO, self._screen, show_level=False, show_path=False)
        self._handlers = [handler]
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
        """Sets the current activity. After a long silence, a line on stdout names it."""
        if self._lines:
            self._lines.doing(what)

    def training(self, total: int, first: int) -> TrainingDisplay:
        """Returns the display of a training: a context manager, visible on a terminal while open.

        Args:
            total: the number of the last step.
            first: how many steps are finished.
        """
        self._total = total
        self._display = TrainingDisplay(total, self._screen, first)
        return self._display

    def step(self, metrics: StepMetrics, places: Mapping[str, DeviceRow]) -> None:
        """Shows a step that has ended.

        Args:
            metrics: the metrics of the step.
            places: the devices of the run by name, in the order of the display's rows.
        """
        if self._lines:
            self._lines.step(metrics, self._total)
        if self._display:
            self._display.update(metrics, places)


def rows_by_device(pipe: Pipeline) -> dict[str, DeviceRow]:
    """Returns the current layers and the memory limit of each device, by the device's name."""
    layers = defaultdict[int, list[int]](list)
    for stage in pipe.plan.stages:
        for device in stage.devices:
            layers[device] += stage.layers
    settings = pipe.session.settings
    rows: dict[str, DeviceRow] = {}
    for d in sorted(layers):
        limit = settings.limits[d] if settings.limits else None
        rows[str(settings.devices[d])] = DeviceRow(in_runs(layers[d]), limit)
    return rows


def progress() -> AbstractContextManager[None]:
    """Returns a context manager that shows the log of jvpipe on stderr."""
    return _heard(logging.INFO, [_to_stderr(logging.INFO)])


@contextmanager
def _heard(level: int, handlers: Sequence[logging.Handler]) -> Iterator[None]:
    """Sends the log of jvpipe to handlers while the context is open.

    Args:
        level: the lowest level that is sent; a handler may filter by a higher level.
        handlers: the handlers.
    """
    level_before, propagate = _log.level, _log.propagate
    _log.setLevel(level)
    _log.propagate = False  # another library's root handler would print the log a second time
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
    """A handler that prints INFO messages as lines, and reports when phases begin and end.

    A phase logs its beginning at the level DEBUG, and its end at the level INFO.
    """

    def __init__(self, lines: Lines) -> None:
        super().__init__(logging.DEBUG)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            self._lines.say(record.getMessage())
        phase = getattr(record, "phase", None)
        if phase and record.levelno == logging.DEBUG:
            self._lines.begin(phase)
        elif phase:
            self._lines.end(phase)
