"""Lines between two processes, each signed with a secret, and the file that holds the secret.

The secret itself is never sent. The signature of a line is a hash (an HMAC) that only somebody with
the secret can compute, so it proves that the sender has the secret.
"""

import asyncio
import hmac
import json
import os
import secrets
import stat
from typing import Any, Literal

_GREETING = "jvpipe-meeting-1"
LINE_BYTES = 1 << 16
"""The longest line that is read, so that a stranger cannot fill the memory."""
VARIABLE = "JVPIPE_SECRET_FILE"
"""The environment variable that names the secret's file if `--secret-file` is not given."""


def read_secret(path: str | None) -> bytes:
    """Returns the secret in a file, without white space around it; empty if no file is named.

    Args:
        path: the file of `--secret-file`; None for the file that the environment variable names.

    Raises:
        ValueError: the file is empty or cannot be read, or others than its owner may use it.
    """
    source = "--secret-file"
    if path is None:
        source, path = VARIABLE, os.environ.get(VARIABLE)
    if path is None:
        return b""
    where = f"{source} {path}"
    try:
        # Without O_NONBLOCK, opening a pipe that has no writer would wait forever.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ValueError(f"{where} is not a file")
            secret = file.read(LINE_BYTES + 1).strip()
    except OSError as problem:
        raise ValueError(f"{where} cannot be read: {problem.strerror}") from problem
    if mode & 0o077:
        bits = f"{stat.S_IMODE(mode):04o}"
        raise ValueError(f"{where}: others may use the file, its mode is {bits}: chmod 600 {path}")
    if not 0 < len(secret) <= LINE_BYTES:
        size = "is empty" if not secret else f"has more than {LINE_BYTES} bytes"
        raise ValueError(
            f"{where} {size}: write a secret into it, such as `openssl rand -hex 32` gives"
        )
    return secret


End = Literal["server", "client"]


class AnotherSecretError(Exception):
    """The error for a line that was not signed with the secret of the process that reads it."""


class SignedLines:
    """One end of a connection: lines of JSON, each signed by an HMAC that is keyed with the secret.

    At the start, each end sends a nonce: a random text that is used only once. The HMAC covers the
    text of a line, so that nobody can change it. It also covers three things, so that a stranger
    cannot send a copy of the line: its number, against a later copy in this connection; the end
    that sends, against a copy back to the sender; both nonces, against a copy in another
    connection.

    Args:
        reader: reads from the connection.
        writer: writes to the connection.
        secret: the secret, which is never sent; if it is empty, anyone can sign lines.
        end: which end of the connection this is.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, end: End
    ) -> None:
        self._reader, self._writer, self._secret = reader, writer, secret
        self._end: End = end
        self._nonces, self._said, self._heard = "", 0, 0

    async def greet(self) -> None:
        """Exchanges nonces.

        Raises:
            OSError: the connection has ended.
            ValueError: the other end does not speak this protocol.
        """
        mine = f"{_GREETING} {secrets.token_hex(16)}"
        self._writer.write(f"{mine}\n".encode())
        theirs = (await self._line()).decode()
        if not theirs.startswith(f"{_GREETING} "):
            raise ValueError("what answers there is not this version of jvpipe")
        # Both ends put the nonces in the same order: first the server's, then the client's.
        ordered = (mine, theirs) if self._end == "server" else (theirs, mine)
        self._nonces = " ".join(ordered)

    async def say(self, **words: Any) -> None:
        """Sends a JSON object with the given entries to the other end."""
        text = json.dumps(words).encode()
        proof = self._proof(self._end, self._said, text)
        self._said += 1
        self._writer.write(proof + b" " + text + b"\n")
        await self._writer.drain()

    async def hear(self) -> dict[str, Any]:
        """Returns the JSON object that the other end sends next.

        Raises:
            AnotherSecretError: the line is not signed with this end's secret.
            OSError: the connection has ended.
            ValueError: the line holds no JSON object, or is too long.
        """
        proof, _, text = (await self._line()).partition(b" ")
        other: End = "client" if self._end == "server" else "server"
        # The comparison takes equally long for all wrong proofs, so its time reveals nothing.
        if not hmac.compare_digest(proof, self._proof(other, self._heard, text)):
            raise AnotherSecretError
        self._heard += 1
        try:
            words = json.loads(text)
        except RecursionError as problem:
            raise ValueError("nested too deeply") from problem
        if not isinstance(words, dict):
            raise ValueError("not an object")
        return words

    def close(self) -> None:
        """Closes the connection once all lines have been sent."""
        self._writer.close()

    def _proof(self, end: End, place: int, text: bytes) -> bytes:
        """Returns the HMAC of the line that has number `place` among the lines of an end."""
        signed = f"{self._nonces} {end} {place} ".encode() + text
        return hmac.new(self._secret, signed, "sha256").hexdigest().encode()

    async def _line(self) -> bytes:
        """Reads the next line, without its end; raises an error if the connection has ended."""
        line = await self._reader.readline()  # raises ValueError if the line is over the limit
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the connection was closed")
        return line[:-1]
