"""What a folder holds at every moment of some work, as if the process had died there."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock

_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


@contextmanager
def copied_at_every_operation(folder: Path, copies: Path) -> Iterator[None]:
    """Copies a folder to `copies` before each operation on files that Python tells of, and at the
    end.

    What a library writes in threads of its own falls between two of them.
    """
    copies.mkdir()
    lock, hears, busy = RLock(), [True], [False]

    def copy() -> None:
        if folder.exists():
            with suppress(shutil.Error):  # what such a thread renames meanwhile
                shutil.copytree(folder, copies / f"{len(list(copies.iterdir())):04d}")

    def hook(event: str, args: object) -> None:
        if event in _EVENTS and hears[0]:
            with lock:  # other threads wait
                if not busy[0]:
                    busy[0] = True
                    copy()
                    busy[0] = False

    sys.addaudithook(hook)  # for good: it can only be made deaf
    try:
        yield
    finally:
        hears[0] = False
    copy()
