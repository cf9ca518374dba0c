"""Locks the folder of a run, so that no other run writes checkpoints there.

The lock is on the folder itself (`flock`). A file in the folder, the holder, names the process that
has the lock. The holder is only used in messages.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname

from jvpipe.util.replaced_file import replace_bytes


class HeldError(ValueError):
    """The error for a folder that another process has locked."""


@contextmanager
def held_folder(path: Path, holder: Path) -> Iterator[None]:
    """Makes a folder if there is none, and locks it while the context is open.

    The system frees the lock when the process ends, even after a crash. At the end of the context,
    the folder and its parents are removed if this call made them and they are empty.

    Args:
        path: the folder.
        holder: a file in the folder that names the process; it exists while the context is open.

    Raises:
        HeldError: another process holds the lock.
    """
    # The innermost folder comes first, because folders must be removed in this order.
    new_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _lock(path, descriptor, holder)
        _write_holder(path, descriptor, holder)
        place = place_of(path)
        try:
            yield
        finally:
            # The folder may have been moved meanwhile. `descriptor` still refers to it.
            with suppress(OSError):
                os.unlink(holder.name, dir_fd=descriptor)
            with suppress(OSError):  # `rmdir` refuses a folder that is not empty
                for folder in new_folders if place_of(path) == place else ():
                    folder.rmdir()
    finally:
        os.close(descriptor)


def place_of(path: Path) -> tuple[int, int] | None:
    """Returns the device and inode numbers of a path's folder; None if there is no folder.

    The numbers change if the folder is moved away and another one takes its path.
    """
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_dev, seen.st_ino


def _lock(path: Path, descriptor: int, holder: Path) -> None:
    """Locks an open folder; raises HeldError if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HeldError(
            f"another run is at work in {path}{_named(holder)}: stop it, or name another --run-dir"
        ) from None


def _write_holder(path: Path, descriptor: int, holder: Path) -> None:
    """Writes the file that names this process."""
    before = os.fstat(descriptor)
    process = f"process {os.getpid()}, started by {os.getppid()}"
    replace_bytes(holder, f"{process}, on {gethostname()}".encode())
    # Several hosts compare the folder's modification time, to check that they see the same folder.
    # Writing the file has changed this time. Other hosts may see the old time for a while longer,
    # and would then conclude that the folders differ. So the old time is restored.
    with suppress(OSError):
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _named(holder: Path) -> str:
    """Returns the description of the process that has locked a folder, in brackets.

    The text is empty if the process is not known.
    """
    with suppress(OSError):
        text = holder.read_bytes()[:200].decode(errors="replace")
        return f" ({text})" if text.isprintable() else ""
    return ""
