"""Replaces the content of a folder as a whole, and keeps a digest of each file.

Each new content is called a generation. It is a folder inside the folder:

    generation-000004/         the newest generation: whole, with digests.json
    generation-000005.draft/   the next one, while it is written and forced to the disk

A rename makes a draft the newest generation, and then the older generation is deleted. A rename is
atomic: it happens entirely or not at all. So the newest generation is whole, even if a process dies
at any moment. If something cannot be deleted, a warning is logged, and the next save tries again to
delete it. Files with other names do not belong to jvpipe and are left alone.
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
_OURS = re.compile(_PREFIX + r"\d{6,}(\..*)?")  # also drafts and half-deleted generations


class DamageError(ValueError):
    """A file is gone, or has changed since it was saved."""


def newest(folder: Path) -> Path | None:
    """Returns the newest generation in a folder; None if there is none."""
    generations = _all(folder) if folder.is_dir() else []
    return generations[-1] if generations else None


@contextmanager
def draft(folder: Path) -> Iterator[Path]:
    """Yields a path for a draft, which becomes the next generation when the context ends.

    If the code inside the context raises an error, the draft is deleted.
    """
    drafted = begin_draft(folder)
    try:
        yield drafted
        finish_draft(drafted)
    except Exception:
        drop_draft(drafted)
        raise


def begin_draft(folder: Path) -> Path:
    """Returns a path for a draft, which the caller makes.

    First makes the folder, and deletes what killed processes have left there: drafts, and all
    generations but the newest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder, newest(folder))
    # Leftovers that could not be deleted are counted too, so that no two folders get one number.
    numbers = map(_number, filter(_is_ours, folder.iterdir()))
    return folder / f"{_PREFIX}{max(numbers, default=0) + 1:06d}{_DRAFT}"


def finish_draft(drafted: Path, digests: Mapping[str, str] | None = None) -> None:
    """Makes a draft the newest generation.

    Args:
        drafted: the draft, with all its files.
        digests: the digests of some files, by name, if they were computed before.
    """
    generation = drafted.with_name(drafted.name.removesuffix(_DRAFT))
    # A system that crashes may lose what was written last. So the files are forced to the disk
    # before the rename, and the new name after it. A generation that is found after a crash then
    # has all of its files.
    _seal(drafted, digests or {})
    drafted.rename(generation)
    try:
        sync(generation.parent)
    except OSError:
        generation.rename(drafted)  # so that dropping the draft leaves the older generation
        raise
    _sweep(generation.parent, generation)


def drop_draft(drafted: Path) -> None:
    """Deletes a draft that will not become a generation; the newest generation stays."""
    _sweep(drafted.parent, newest(drafted.parent))


def check_generation(generation: Path, names: Collection[str] | None = None) -> None:
    """Compares the named files of a generation, or all of its files, with their digests.

    Raises:
        DamageError: a file is gone, or has changed since it was saved.
    """
    with damage_of(generation.parent):
        digests = read_json(generation, _DIGESTS)
        compare(_DIGESTS, digests, {str: str})
    folder = generation.parent
    for name in digests if names is None else names:
        path = generation / name
        is_whole = path.is_file() and file_digest(path) == digests.get(name)
        if not is_whole:
            damage = "is not what was saved" if path.exists() else "is gone"
            raise DamageError(f"{folder} is damaged: {path.relative_to(folder)} {damage}")


def delete(folder: Path) -> None:
    """Deletes all generations of a folder, and the folder if nothing else is in it.

    If the folder is a link, nothing is deleted, because the user has put the folder elsewhere.
    """
    with adding_path(folder):
        if folder.is_symlink():
            raise OSError("it is a link")
        if not any(map(_is_ours, folder.iterdir())):
            return
        # If the process dies while a generation is being deleted, the rest must not look like a
        # generation. So all are renamed first.
        for generation in _all(folder):
            generation.rename(generation.with_name(generation.name + ".deleted"))
        _sweep(folder, None)
        if not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def adding_path(path: Path) -> Iterator[None]:
    """Turns a failure to delete a path into a warning, which is logged only once."""
    try:
        yield
    except OSError as problem:
        _warn(path, problem.strerror or str(problem))


@cache
def _warn(path: Path, reason: str) -> None:
    """Warns that a path cannot be deleted. The cache lets each warning appear once."""
    _log.warning(
        "%s cannot be deleted (%s): that is tried again at the next checkpoint",
        path,
        reason,
    )


@contextmanager
def damage_of(folder: Path) -> Iterator[None]:
    """Turns an error in reading files into a DamageError that names the folder."""
    try:
        yield
    except DamageError:
        raise
    except (OSError, ValueError) as problem:
        raise DamageError(f"{folder} is damaged: {problem}") from problem


def read_json(folder: Path, name: str) -> Any:
    """Reads a JSON file; ValueError if it is missing, is not JSON, or is nested too deeply."""
    try:
        return json.loads((folder / name).read_bytes())
    except (OSError, ValueError, RecursionError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise ValueError(f"{name}: {reason}") from problem


def file_digest(path: Path) -> str:
    """Returns the digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _all(folder: Path) -> list[Path]:
    """Returns the generations of a folder, the newest last."""
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), key=_number)


def _number(generation: Path) -> int:
    return int(generation.name.removeprefix(_PREFIX).partition(".")[0])


def _is_ours(path: Path) -> bool:
    return path.is_dir() and _OURS.fullmatch(path.name) is not None


def _sweep(folder: Path, kept: Path | None) -> None:
    """Deletes all generations and drafts of a folder except one."""
    for path in sorted(folder.iterdir()):
        if path != kept and _is_ours(path):
            with adding_path(path):
                shutil.rmtree(path)


def _seal(folder: Path, digests: Mapping[str, str]) -> None:
    """Writes the digests of all files, and forces all files to the disk.

    Args:
        folder: the folder of a draft.
        digests: the digests of some files, by name, if they were computed before.
    """
    paths = sorted(folder.rglob("*"))
    files = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
    of_all = {name: digests.get(name) or file_digest(path) for name, path in files.items()}
    (folder / _DIGESTS).write_text(json.dumps(of_all, indent=1))
    for path in (*paths, folder / _DIGESTS, folder):
        sync(path)


def sync(path: Path) -> None:
    """Forces a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
