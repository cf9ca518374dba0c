"""Replaces a file atomically: even after a crash, the file has its old or its new content."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Replaces the content of a file by a text; creates the file if it does not exist."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Replaces the content of a file by bytes; creates the file if it does not exist."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        # The content is forced to the disk before the rename, in case the machine stops.
        os.fsync(file.fileno())
    draft.replace(path)
