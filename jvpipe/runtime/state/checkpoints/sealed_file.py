"""Sealed files: JSON files with a digest of their content, which reveals whether they were edited.

The digest has no secret, so it protects against mistakes, and not against forgery.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jvpipe.runtime.state.checkpoints.generations import DamageError
from jvpipe.util.replaced_file import replace_text


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Writes entries and their digest as JSON; a crash leaves the complete old or new file."""
    sealed = {**content, "digest": _digest(content)}
    replace_text(path, json.dumps(sealed, indent=1) + "\n")


def read_sealed(path: Path) -> dict[str, Any]:
    """Returns the entries of a file that `write_sealed` wrote.

    Raises:
        OSError: the file cannot be read.
        DamageError: the file has changed since it was written, or is not a sealed file.
    """
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        # The digest does not cover its own entry.
        digest, expected = content.pop("digest", None), _digest(content)
    except (ValueError, RecursionError) as problem:
        raise DamageError(f"{path} is damaged: {problem}") from problem
    if digest != expected:
        damage = "has lost its digest" if digest is None else "is not what the run wrote"
        cure = "put it back (options are changed on the command line, not in the file)"
        raise DamageError(f"{path} {damage}: {cure}")
    return content


def _digest(content: Mapping[str, Any]) -> str:
    # Sorted names make the digest independent of the order of the entries.
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
