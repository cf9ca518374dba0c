"""Signs texts with a secret key in the user's home, to show later that this user signed them."""

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

_KEY_BYTES = 32
"""The size of the key, equal to that of a SHA-256 digest. A key of another size is ignored."""


def signature(text: str) -> str:
    """Returns the HMAC of a text under the user's key; an empty text if `_key` returns None."""
    key = _key()
    return "" if key is None else hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key() -> bytes | None:
    """Returns the user's secret key, which the first call creates.

    Returns None if the key cannot be created or read, has a wrong size, or is not private: only
    this user may own, read and change it.
    """
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        path = state / "jvpipe" / "key"
        if not path.exists():
            _make(path)
        seen, key = path.stat(), path.read_bytes()
    except (OSError, RuntimeError):  # no home, or nothing can be written there
        return None
    is_private = seen.st_uid == os.getuid() and not seen.st_mode & 0o077
    return key if is_private and len(key) == _KEY_BYTES else None


def _make(path: Path) -> None:
    """Creates the key file.

    The file gets its name only when it is complete. If two processes create a key at the same time,
    the second link fails, and both processes use the first key.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent) as file:  # only its owner can read it
        file.write(secrets.token_bytes(_KEY_BYTES))
        file.flush()
        with suppress(FileExistsError):  # another process was faster
            os.link(file.name, path)
