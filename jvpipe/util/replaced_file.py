"""Replaces a file as a whole: however the process ends, the old or the new file is there."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Replaces a file by a text; makes the file if there is none."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Replaces a file by bytes; makes the file if there is none."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        # The content is forced to the disk before the rename, in case the machine stops.
        os.fsync(file.fileno())
    draft.replace(path)
