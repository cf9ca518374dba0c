"""Lets the processes of a run meet before JAX connects them, over lines signed with a secret.

Each process connects to process 0, which checks that all have the secret and equal options,
and tells them the port for JAX. The connections stay open during the run. If JAX loses a
process, it ends the others at once, before jvpipe's training thread can say why. So a separate
thread reports a connection that ends, unless the process at its other end has said farewell.

In the picture, time runs down, and each arrow is a line from one process to the other. A nonce is a
random text that is used in one connection only (signed_lines.py).

    process i                               process 0
      greeting with a nonce   --------->
                              <---------      greeting with a nonce
      number, values          --------->
                              <---------      who is missing, every few seconds
                              <---------      the port for JAX, or why there is no run
      (the run)                               (the run)
      farewell                --------->
                              <---------      farewell
"""

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

from jvpipe.runtime.engine.disagreement import SHOWN
from jvpipe.runtime.engine.failures import HostLost
from jvpipe.runtime.engine.signed_lines import LINE_BYTES, AnotherSecretError, SignedLines
from jvpipe.trace.digests import digest
from jvpipe.util.pattern import compare, whole_in


@dataclass(frozen=True)
class Patience:
    """How long processes wait for each other, in the meeting and during the run.

    Attributes:
        handshake_s: the longest time from a connection to the line that introduces the process.
        knock_s: the time between two tries to reach process 0.
        say_s: the time after which a waiting process says again for whom it waits.
        farewell_s: the longest time in which process 0 tells the others how the meeting ended, and
            in which a process sends its farewells.
        crowd: the largest number of connections that are served at a time, so that strangers cannot
            use up all file descriptors.
        look_s: the time between two checks, during training, that no process is lost and that the
            run makes progress.
        grace_s: how long the training thread, which knows the failed task, has to report a lost
            process. After this time, another thread reports the loss and ends this process.
        ending_s: the longest time that a process waits at its end for the others or for JAX's
            shutdown.
    """

    handshake_s: float = 5.0
    knock_s: float = 0.2
    say_s: float = 3.0
    farewell_s: float = 1.0
    crowd: int = 256
    look_s: float = 0.01
    grace_s: float = 2.0
    ending_s: float = 3.0


PATIENCE = Patience()

Parts = Mapping[str, list[str]]
"""For each named value, a list (JSON has no tuples): its digest, and the start of its text."""


class Given(NamedTuple):
    """The named values that must be equal in all processes, and the secret, which may be empty."""

    values: Sequence[tuple[str, str]]
    secret: bytes

    @property
    def parts(self) -> Parts:
        """The values in the form in which processes exchange them."""
        return {name: _part(value) for name, value in self.values}


def _part(value: str) -> list[str]:
    return [digest(value), value[:SHOWN]]


class _Side:
    """One side of a meeting: a thread, and connections that stay open during the whole run."""

    def __init__(self) -> None:
        self._met: Future[Any] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._held: dict[SignedLines, asyncio.Task[None]] = {}
        self._is_over = False

    def _meet(self, meeting: Coroutine[Any, Any, None]) -> Any:
        """Begins the meeting in a new thread, and waits for its result.

        The thread goes on after the meeting, and serves the connections until the process ends.
        """

        def run() -> None:
            try:
                asyncio.run(meeting)
            except Exception as error:
                if self._met.done():
                    raise
                self._met.set_exception(error)  # without it, this process would wait forever

        threading.Thread(target=run, name="jvpipe-meeting", daemon=True).start()
        return self._met.result()

    def _hold(self, lines: SignedLines, left: Awaitable[object], whom: str) -> asyncio.Task[None]:
        """Keeps a connection open, and reports at once if it ends without a farewell.

        Args:
            lines: this end of the connection.
            left: waits for the other end's next line, which can only be its farewell.
            whom: what messages call the other process.
        """
        self._loop = asyncio.get_running_loop()
        self._held[lines] = self._loop.create_task(self._hear(lines, left, whom))
        return self._held[lines]

    async def _hear(self, lines: SignedLines, left: Awaitable[object], whom: str) -> None:
        """Waits for a farewell, reports a connection that ends without one, and closes this end."""
        try:
            await left
        except (OSError, ValueError, AnotherSecretError):
            if not self._is_over:
                _say(f"warning: the connection to {whom} has ended")
        finally:
            del self._held[lines]
            lines.close()

    def end(self) -> None:
        """Says farewell to all connected processes, and no longer reports connections that end."""
        self._is_over = True
        if self._loop is None:
            return
        farewells = []
        # The loop goes over a copy, because the other thread removes connections that end.
        for lines in list(self._held):
            farewell = lines.say(farewell=True)
            farewells.append(asyncio.run_coroutine_threadsafe(farewell, self._loop))
        wait(farewells, PATIENCE.farewell_s)


class MeetingServer(_Side):
    """Process 0's side: waits for the others, and during the run refuses processes that come late.

    One thread serves all connections at the same time, so that a slow, silent or faulty process
    does not delay the others. If the values of a process differ, the meeting ends. Only a process
    with the secret and with a number that is not yet taken can cause this.

    Args:
        listener: the socket where this process listens.
        kept: a socket that reserves the port where JAX will connect the processes.
        count: the number of processes, including this one.
        agreed: the values that must be equal in all processes, and the secret.
    """

    def __init__(
        self, listener: socket.socket, kept: socket.socket, count: int, agreed: Given
    ) -> None:
        super().__init__()
        self._listener, self._kept = listener, kept
        self._count, self._given = count, agreed
        self._present: set[int] = set()
        self._visits: set[asyncio.Task[None]] = set()
        self._refusals: set[str] = set()

    def wait(self, timeout_s: float) -> None:
        """Waits for all processes.

        Args:
            timeout_s: the longest time that this may take, in seconds.

        Raises:
            ValueError: the values of a process differ from those of this one.
            HostLost: a process has not come in time.
        """
        _port_in(self._meet(self._serve(timeout_s)))

    async def _serve(self, timeout_s: float) -> None:
        """Serves connections until all processes have come, one has other values, or time is over.

        It then passes the result to `wait`, and goes on serving, to refuse processes that come
        late.
        """
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._end_if_complete()
        # From here on, each connection is served by a task of its own.
        server = await asyncio.start_server(self._visit, sock=self._listener, limit=LINE_BYTES)
        until_s = time.monotonic() + timeout_s
        while not self._end.done() and (left_s := until_s - time.monotonic()) > 0:
            await asyncio.wait({self._end}, timeout=min(PATIENCE.say_s, left_s))
            if not self._end.done() and left_s > PATIENCE.say_s:
                _say(f"waiting for {self._missing()}")
        if not self._end.done():
            self._end.set_result({"refused": _late(timeout_s, self._missing()), "again": True})
        if self._visits:  # others get the result first, because a refusal will end this process
            await asyncio.wait(self._visits, timeout=PATIENCE.farewell_s)
        self._met.set_result(self._end.result())
        await server.serve_forever()

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a connection; closes it if the other end is not a process of the run."""
        lines = SignedLines(reader, writer, self._given.secret, "server")
        visit = asyncio.current_task()
        assert visit is not None, "the server runs each visit in a task"
        self._visits.add(visit)
        try:
            if len(self._visits) <= PATIENCE.crowd:
                host, *_ = writer.get_extra_info("peername") or ["unknown"]
                await self._receive(lines, host)
        except (OSError, ValueError):
            pass
        finally:
            self._visits.discard(visit)
            if lines not in self._held:
                lines.close()

    async def _receive(self, lines: SignedLines, host: str) -> None:
        """Lets a process in, or says why it is refused.

        Args:
            lines: this end of the connection.
            host: the address of the process, for messages.
        """
        try:
            async with asyncio.timeout(PATIENCE.handshake_s):
                await lines.greet()
                process, parts = _introduced(await lines.hear())
        except AnotherSecretError:
            self._refuse(f"a process on {host}: its secret is another, or missing (--secret-file)")
            await lines.say()  # the signature shows the client that the secrets differ
            return
        mine = self._given.parts
        if process in self._present:
            self._refuse(f"a second process {process}, on {host}")
            why = f"there is a process {process} already: the run goes on without another one"
            await lines.say(refused=why, again=True)
        # Only a process that has the secret comes this far. So it is allowed to end the meeting.
        elif differing := _differing(mine, parts, 0, process):
            if self._end.done():
                self._refuse(f"process {process} on {host}: {differing}")
            else:
                self._end.set_result({"refused": differing, "again": False})
            await lines.say(refused=_differing(parts, mine, process, 0), again=False)
        elif process < self._count:
            await self._keep(lines, process)

    async def _keep(self, lines: SignedLines, process: int) -> None:
        """Counts a process as present unless it leaves early; tells it how the meeting ends."""
        self._present.add(process)
        self._end_if_complete()
        left = asyncio.ensure_future(lines.hear())  # its next line can only be a farewell
        try:
            while not self._end.done() and not left.done():
                await lines.say(missing=self._missing())
                # These lines also show the process that process 0 is alive.
                awaited = {self._end, left}
                await asyncio.wait(
                    awaited, timeout=PATIENCE.say_s, return_when=asyncio.FIRST_COMPLETED
                )
            if self._end.done():
                await lines.say(**self._end.result())
                self._hold(lines, left, f"process {process}")
        finally:
            if lines not in self._held:
                left.cancel()
                await asyncio.gather(left, return_exceptions=True)
            if not self._end.done():
                self._present.discard(process)

    def _end_if_complete(self) -> None:
        """Ends the meeting if all other processes are present."""
        if len(self._present) == self._count - 1 and not self._end.done():
            self._end.set_result({"port": self._kept.getsockname()[1]})

    def _missing(self) -> str:
        missing = [i for i in range(1, self._count) if i not in self._present]
        absent = " and ".join(f"process {i}" for i in missing)
        host, port, *_ = self._listener.getsockname()
        return f"{absent} at {host}:{port}"

    def _refuse(self, whom: str) -> None:
        """Reports a refusal once, so that a process that tries again does not fill the log."""
        if whom not in self._refusals and len(self._refusals) < PATIENCE.crowd:
            self._refusals.add(whom)
            _say(f"refused {whom}")


class Attendance(_Side):
    """The side of every other process: connects to process 0, and stays connected during the run.

    Args:
        host: the host of process 0.
        port: the port where process 0 listens.
        process: the number of this process.
        agreed: the values that must be equal in all processes, and the secret.
    """

    def __init__(self, host: str, port: int, process: int, agreed: Given) -> None:
        super().__init__()
        self._host, self._port = host, port
        self._process, self._given = process, agreed

    def wait(self, timeout_s: float) -> int:
        """Waits for all processes, and returns the port where JAX will connect them.

        Args:
            timeout_s: the longest time that this may take, in seconds.

        Raises:
            ValueError: process 0 has not answered, or has another secret or other values.
            HostLost: the number of this process is taken, or a process has not come in time.
        """
        return self._meet(self._attend(timeout_s))

    async def _attend(self, timeout_s: float) -> None:
        """Attends the meeting, and then keeps the connection until process 0 says farewell."""
        until_s = time.monotonic() + timeout_s
        where = f"{self._host}:{self._port}"
        lines = await _reached(self._host, self._port, self._process, self._given.secret, timeout_s)
        missing = ""
        try:
            # Process 0 decides when the time is over, and says so. Until that line comes, this
            # process waits a little longer.
            async with asyncio.timeout(max(0.0, until_s - time.monotonic()) + PATIENCE.farewell_s):
                await lines.say(process=self._process, parts=self._given.parts)
                while "missing" in (words := await lines.hear()):
                    missing = ascii(words["missing"]).strip("'")
                    _say(f"waiting for {missing}")
                port = _port_in(words)
            bond = self._hold(lines, lines.hear(), f"process 0 at {where}")
            self._met.set_result(port)  # after `_hold`, because the caller may say farewell at once
            await bond
        except AnotherSecretError as problem:
            raise ValueError(
                f"process 0 at {where} has another secret than process {self._process}, or one of "
                "them has none: --secret-file must name a file with the same secret in all "
                "processes"
            ) from problem
        except TimeoutError as problem:
            raise HostLost(_late(timeout_s, missing or "an answer of process 0")) from problem
        except OSError as problem:
            raise HostLost(f"process 0 left before all had come: {problem}") from problem
        finally:
            lines.close()


async def _reached(
    host: str, port: int, process: int, secret: bytes, timeout_s: float
) -> SignedLines:
    """Connects to process 0; tries again until process 0 listens or the time is over."""
    start_s = said_s = time.monotonic()
    while True:
        lines = None
        try:
            async with asyncio.timeout(min(PATIENCE.handshake_s, timeout_s)):
                connection = await asyncio.open_connection(host, port, limit=LINE_BYTES)
                lines = SignedLines(*connection, secret, "client")
                await lines.greet()
            return lines
        except (OSError, ValueError) as problem:
            if lines:
                lines.close()
            why, now_s = str(problem) or "no answer", time.monotonic()
            if now_s - start_s >= timeout_s:
                raise ValueError(
                    f"the coordinator {host}:{port} has not answered process {process} for "
                    f"{timeout_s:g} s ({why}): is process 0 started there, and the port open?"
                ) from problem
            if now_s - said_s >= PATIENCE.say_s:
                _say(f"waiting for process 0 at {host}:{port}: {why}")
                said_s = now_s
        await asyncio.sleep(PATIENCE.knock_s)


def _introduced(words: Mapping[str, Any]) -> tuple[int, Parts]:
    """Returns the number and values in a process's first line; raises ValueError without them."""
    pattern = {"process": whole_in(1, 2**31 - 1), "parts": {str: (str, str)}}
    compare("who comes", words, pattern)
    return words["process"], words["parts"]


def _port_in(words: Mapping[str, Any]) -> int:
    """Returns the port in a meeting's last line; raises HostLost or ValueError if there is none."""
    match words:
        case {"port": int(port)} if 0 < port < 2**16:
            return port
        case {"refused": str(why), "again": bool(again)} if why.isprintable():
            raise HostLost(why) if again else ValueError(why)
    raise ValueError("what process 0 says makes no sense: is it this version of jvpipe?")


def _differing(mine: Parts, theirs: Parts, process: int, other: int) -> str:
    """Writes which values differ, those of `process` first; returns an empty text if none do."""
    differences = []
    for name, part in mine.items():
        their_part = theirs.get(name, ["", ""])
        if part != their_part:
            here, there = (
                f"{part[1]!r} in process {process}",
                f"{their_part[1]!r} in process {other}",
            )
            differences.append(f"{name} is {here} and {there}")
    return f"the processes were not given the same: {'; '.join(differences)}" if differences else ""


def _late(timeout_s: float, missing: str) -> str:
    return f"not all processes have come within {timeout_s:g} s: waited for {missing}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
