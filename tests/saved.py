"""Reads whole checkpoints, which a run reads only in parts."""

from pathlib import Path
from typing import Any

from jvpipe.runtime.state.checkpoints.array_file import Arrays
from jvpipe.runtime.state.checkpoints.checkpoint import open_checkpoint


def load_checkpoint(path: str | Path) -> tuple[Arrays, dict[str, Any]]:
    """The arrays of a checkpoint, and its `meta.json`; all files are compared with their digests."""
    saved = open_checkpoint(path)
    saved.check()
    return saved.read(), saved.meta
