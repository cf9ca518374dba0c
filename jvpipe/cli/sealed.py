"""JSON files that hold their own digest, so that a change is noticed."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jvpipe.report.metrics import replace_text
from jvpipe.runtime.checkpoints.generations import DamageError


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file, whole or not at all."""
    replace_text(path, json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Reads what `write` was given.

    Raises:
        OSError: there is no file.
        DamageError: it is not what was written.
    """
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        found, wanted = content.pop("digest", None), _digest(content)
    except (ValueError, RecursionError) as problem:
        raise DamageError(f"{path} is damaged: {problem}") from problem
    if found != wanted:
        told = "has lost its digest" if found is None else "is not what the run wrote"
        raise DamageError(
            f"{path} {told}: put it back (options are changed on the command line, not in the file)"
        )
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
