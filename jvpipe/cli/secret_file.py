"""The secret that the processes of a run prove to one another that they have: a file that its owner alone can read."""

import os
import stat
from contextlib import ExitStack

VARIABLE = "JVPIPE_SECRET_FILE"
"""Names the file where `--secret-file` does not."""
_MOST_BYTES = 1 << 16


def read_secret(path: str | None) -> bytes:
    """Returns the secret that a file holds, without white space at its ends; nothing where no file is named.

    Args:
        path: as `--secret-file` names it; without one as the environment does.

    Raises:
        ValueError: the file cannot be read, others than its owner may read or change it, or it is empty.
    """
    named, path = (
        ("--secret-file", path) if path is not None else (VARIABLE, os.environ.get(VARIABLE))
    )
    if path is None:
        return b""
    with ExitStack() as held:
        try:
            # a pipe without a writer would be waited for
            file = held.enter_context(os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb"))
            status = os.fstat(file.fileno())
            secret = file.read(_MOST_BYTES + 1).strip() if stat.S_ISREG(status.st_mode) else b""
        except OSError as problem:
            raise ValueError(f"{named} {path} cannot be read: {problem.strerror}") from problem
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{named} {path} is not a file")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(
            f"{named} {path}: others may use the file, its mode is {mode:04o}: chmod 600 {path}"
        )
    if not 0 < len(secret) <= _MOST_BYTES:
        size = "is empty" if not secret else f"has more than {_MOST_BYTES} bytes"
        raise ValueError(
            f"{named} {path} {size}: write a secret into it, such as `openssl rand -hex 32` gives"
        )
    return secret
