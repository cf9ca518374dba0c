"""Files that a command line is to write, looked at before it begins to work."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from jvpipe.ir.extras import extra


def check_outputs(
    outputs: Mapping[str, str | None], inputs: Mapping[str, str | None] | None = None
) -> None:
    """Raises ValueError unless a file can be written at each path, another one for each; leaves all as it is.

    Args:
        outputs: paths by the option that names them; None is passed over.
        inputs: files that are read, likewise: no output may take their place.

    >>> check_outputs({"--json": "nowhere/plan.json"})
    Traceback (most recent call last):
    ValueError: --json nowhere/plan.json: there is no folder nowhere: make it, or give another path
    """
    taken = {
        Path(path).resolve(): option
        for option, path in (inputs or {}).items()
        if path and "\0" not in path
    }
    for option, path in outputs.items():
        if path is None:
            continue
        if reason := _reason(path):
            raise ValueError(f"{option} {path}: {reason}")
        file = Path(path).resolve()
        if file in taken:
            raise ValueError(
                f"{option} {path}: this is the file of {taken[file]}: give another path"
            )
        taken[file] = option


def check_figure(path: str) -> None:
    """Raises ValueError unless a picture can be drawn at the path of `--figure`, or MissingExtraError."""
    with extra("figures"):
        from jvpipe.report.figures import check_format
    check_outputs({"--figure": path})
    check_format(path)


@contextmanager
def writing(option: str, path: str) -> Iterator[Path]:
    """The path of an output while it is written; what goes wrong is an OSError that names it."""
    try:
        yield Path(path)
    except OSError as error:
        raise OSError(
            f"{option} {path}: this cannot be written ({error.strerror or error})"
        ) from None


def _reason(path: str) -> str | None:
    """Why no file can be written there."""
    file = Path(path)
    try:
        if file.is_dir():
            return "this is a folder: give the path of a file"
        if not file.parent.is_dir():
            return f"there is no folder {file.parent}: make it, or give another path"
        if file.exists() and not file.is_file():
            return None  # a pipe or a device: opening it would tell its other end
        there = file.exists()
        with file.open("ab"):
            pass
        if not there:
            file.unlink()
    except (OSError, ValueError) as error:
        return f"this cannot be written ({getattr(error, 'strerror', None) or error}): give another path"
    return None
