"""Checks that a path is free for a new folder, so that old files do not mix with new ones."""

import os
from pathlib import Path


def check_new_folder(path: Path, called: str) -> None:
    """Checks that a path is free for a folder, or is an empty folder.

    Args:
        path: the path.
        called: how the user gave the path, for messages, such as "--export-weights tuned".

    Raises:
        ValueError: no folder can be made there, or it is not empty.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{called} exists already: name a new folder, or an empty one")
    if not path.parent.is_dir():
        raise ValueError(f"{called}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{called}: you have no permission to write there; name another folder")
