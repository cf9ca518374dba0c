"""Whether the code that the folder of a run names may be run again without being asked for: its user made it there."""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from jvpipe.cli.found_model import is_installed

MARK = "made_here"
"""Its name in config.json."""
_KEY_BYTES = 32


def mark(folder: Path, model: str) -> str:
    """What only this user's runs of a model in this folder are marked with; nothing where no key can be kept.

    Args:
        folder: of the run.
        model: as `--model` names it.
    """
    key = _key()
    if key is None:
        return ""
    file, colon, name = model.rpartition(":")
    code = f"{Path(file).resolve()}:{name}" if colon and file.endswith(".py") else model
    told = json.dumps([os.getuid(), str(folder.resolve()), code])
    return hmac.new(key, told.encode(), hashlib.sha256).hexdigest()


def check_made_here(folder: Path, config: Mapping[str, Any], model: str) -> None:
    """Keeps code from being run that a folder from elsewhere names.

    Args:
        folder: of the run.
        config: what its config.json holds.
        model: that it names.

    Raises:
        ValueError: the model is somebody's code, and the mark is not that of this user and this place.
    """
    found, own = config.get(MARK), mark(folder, model)
    if is_installed(model) or (own and isinstance(found, str) and found == own):
        return
    raise ValueError(
        f"{folder} was not made here by this user, and names code to be run, {model}: look at it, and give --model "
        f"{model} again, or --trust"
    )


def _key() -> bytes | None:
    """The user's own secret, made when it is first asked for; None where there can be none that others cannot read."""
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        path = state / "jvpipe" / "key"
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=path.parent) as file:  # for its owner alone
                file.write(secrets.token_bytes(_KEY_BYTES))
                file.flush()
                with suppress(FileExistsError):  # another process was faster
                    os.link(file.name, path)
        seen, key = path.stat(), path.read_bytes()
    except (OSError, RuntimeError):  # no home, or nothing can be written there
        return None
    mine = seen.st_uid == os.getuid() and not seen.st_mode & 0o077
    return key if mine and len(key) == _KEY_BYTES else None
