"""A connection of two processes that prove with each line that they have the same secret."""

import asyncio
import hmac
import json
import secrets
from typing import Any, Literal

_GREETING = "jvpipe-meeting-1"
LINE_BYTES = 1 << 16
"""The longest line that is read."""

End = Literal["server", "client"]


class AnotherSecretError(Exception):
    """What the other end says is not proved with the secret of this one."""


class SignedLines:
    """One end of a connection: lines of JSON, each with an HMAC that is keyed with the secret.

    Both ends begin with a fresh nonce. An HMAC is over both nonces, the end that speaks, the line's place and its text:
    a line cannot be changed, sent again, sent back or kept for another connection, and the secret is never sent.

    Args:
        reader: of the connection.
        writer: of the connection.
        secret: nothing where the processes have none, and everybody is believed.
        end: which one this is.
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
            ValueError: the other end speaks of something else.
        """
        mine = f"{_GREETING} {secrets.token_hex(16)}"
        self._writer.write(f"{mine}\n".encode())
        theirs = (await self._line()).decode()
        if not theirs.startswith(f"{_GREETING} "):
            raise ValueError("what answers there is not this version of jvpipe")
        ordered = (mine, theirs) if self._end == "server" else (theirs, mine)
        self._nonces = " ".join(ordered)

    async def say(self, **told: Any) -> None:
        """Tells the other end something."""
        text = json.dumps(told).encode()
        proof = self._proof(self._end, self._said, text)
        self._said += 1
        self._writer.write(proof + b" " + text + b"\n")
        await self._writer.drain()

    async def hear(self) -> dict[str, Any]:
        """Returns what the other end says next.

        Raises:
            AnotherSecretError: it is not proved.
            OSError: the connection has ended.
            ValueError: it is no object of JSON, or too long.
        """
        proof, _, text = (await self._line()).partition(b" ")
        other: End = "client" if self._end == "server" else "server"
        if not hmac.compare_digest(proof, self._proof(other, self._heard, text)):
            raise AnotherSecretError
        self._heard += 1
        try:
            told = json.loads(text)
        except RecursionError as problem:
            raise ValueError("nested too deeply") from problem
        if not isinstance(told, dict):
            raise ValueError("not an object")
        return told

    def close(self) -> None:
        """Ends the connection after what was said."""
        self._writer.close()

    def _proof(self, end: End, place: int, text: bytes) -> bytes:
        signed = f"{self._nonces} {end} {place} ".encode() + text
        return hmac.new(self._secret, signed, "sha256").hexdigest().encode()

    async def _line(self) -> bytes:
        line = await self._reader.readline()  # ValueError for a longer one than the reader's limit
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the connection was closed")
        return line[:-1]
