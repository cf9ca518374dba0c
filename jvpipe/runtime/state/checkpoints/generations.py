"""Generations: the content of a folder, replaced whole, with a digest of every file.

A new one is written beside the one there is, under another name, and forced to the disk; renaming it makes it the
newest, and only then is the older one deleted. So whenever a process dies, the newest generation is whole. What cannot
be deleted is told, and tried again with the next one. What else lies in the folder is somebody else's, and left alone.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from jvpipe.util.pattern import compare

_log = logging.getLogger("jvpipe")

_DIGESTS = "digests.json"
_PREFIX, _DRAFT = "generation-", ".draft"
_NAME = re.compile(_PREFIX + r"\d{6,}")
_OURS = re.compile(_PREFIX + r"\d{6,}(\..*)?")  # also drafts and what is being deleted


class DamageError(ValueError):
    """A file is not what was saved."""


def newest(folder: Path) -> Path | None:
    """The newest generation in a folder; None if there is none."""
    return next(iter(_all(folder)[::-1]), None) if folder.is_dir() else None


@contextmanager
def draft(folder: Path) -> Iterator[Path]:
    """A path for the next generation of a folder, which it becomes when the block ends without an error."""
    drafted = begin_draft(folder)
    try:
        yield drafted
        finish_draft(drafted)
    except Exception:
        drop_draft(drafted)
        raise


def begin_draft(folder: Path) -> Path:
    """A path for the next generation of a folder; the drafts of processes that were killed are gone."""
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder, newest(folder))
    left = map(_number, filter(_is_ours, folder.iterdir()))
    return folder / f"{_PREFIX}{max(left, default=0) + 1:06d}{_DRAFT}"


def finish_draft(drafted: Path, known: Mapping[str, str] | None = None) -> None:
    """Makes a draft the newest generation.

    Args:
        drafted: all files are written.
        known: digests of some of them, by name.
    """
    made = drafted.with_name(drafted.name.removesuffix(_DRAFT))
    _seal(drafted, known or {})
    drafted.rename(made)
    sync(made.parent)
    _sweep(made.parent, made)


def drop_draft(drafted: Path) -> None:
    """Deletes a draft that has not become a generation."""
    _sweep(drafted.parent, newest(drafted.parent))


def check(generation: Path, names: Collection[str] | None = None) -> None:
    """Compares files of a generation with their digests: those named, or all.

    Raises:
        DamageError: a file is gone or another one.
    """
    with damage_of(generation.parent):
        digests = read_json(generation, _DIGESTS)
        compare(_DIGESTS, digests, {str: str})
    for name in digests if names is None else names:
        path = generation / name
        if not (path.is_file() and digest_of(path) == digests.get(name)):
            told = "is not what was saved" if path.exists() else "is gone"
            raise DamageError(
                f"{generation.parent} is damaged: {path.relative_to(generation.parent)} {told}"
            )


def delete(folder: Path) -> None:
    """Deletes all generations of a folder, and the folder if nothing else was in it.

    What lies behind a link was put there by somebody else, and stays.
    """
    with telling(folder):
        if folder.is_symlink():
            raise OSError("it is a link")
        if not any(map(_is_ours, folder.iterdir())):
            return
        for each in _all(folder):  # half a generation is none
            each.rename(each.with_name(each.name + ".deleted"))
        _sweep(folder, None)
        if not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def telling(path: Path) -> Iterator[None]:
    """Inside it a path is deleted; what that fails with is no error, but a warning, the first time."""
    try:
        yield
    except OSError as problem:
        _tell(path, problem.strerror or str(problem))


@cache
def _tell(path: Path, reason: str) -> None:
    _log.warning(
        "%s cannot be deleted (%s): that is tried again at the next checkpoint",
        path,
        reason,
    )


@contextmanager
def damage_of(folder: Path) -> Iterator[None]:
    """Inside it a folder's files are read; what is found wrong with them is its damage."""
    try:
        yield
    except DamageError:
        raise
    except (OSError, ValueError) as problem:
        raise DamageError(f"{folder} is damaged: {problem}") from problem


def read_json(folder: Path, name: str) -> Any:
    """Reads a JSON file of a folder; raises ValueError if it is gone, none, or nested too deeply."""
    try:
        return json.loads((folder / name).read_bytes())
    except (OSError, ValueError, RecursionError) as problem:
        told = getattr(problem, "strerror", None) or problem
        raise ValueError(f"{name}: {told}") from problem


def digest_of(path: Path) -> str:
    """The digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _all(folder: Path) -> list[Path]:
    """The generations of a folder, the newest last."""
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), key=_number)


def _number(generation: Path) -> int:
    return int(generation.name.removeprefix(_PREFIX).partition(".")[0])


def _is_ours(path: Path) -> bool:
    return path.is_dir() and _OURS.fullmatch(path.name) is not None


def _sweep(folder: Path, kept: Path | None) -> None:
    """Deletes the older generations and what killed processes left of others."""
    for path in sorted(folder.iterdir()):
        if path != kept and _is_ours(path):
            with telling(path):
                shutil.rmtree(path)


def _seal(folder: Path, known: Mapping[str, str]) -> None:
    """Adds the digests of all files, and forces everything to the disk."""
    paths = sorted(folder.rglob("*"))
    files = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
    digests = {name: known.get(name) or digest_of(path) for name, path in files.items()}
    (folder / _DIGESTS).write_text(json.dumps(digests, indent=1))
    for path in (*paths, folder / _DIGESTS, folder):
        sync(path)


def sync(path: Path) -> None:
    """Forces a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
