"""Processes that run one pipeline together: what they agree on before rows run, and how their arrays get across."""

import base64
import hashlib
import json
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast
from weakref import ref

import jax

from jvpipe import _jax
from jvpipe.cost.hardware import Link
from jvpipe.ir.rows import AskRun, OfferRun, Row
from jvpipe.runtime.checkpoints.checkpoint import to_host
from jvpipe.runtime.failures import HostLost
from jvpipe.runtime.tensors import MemoryLimitExceeded
from jvpipe.runtime.transport import Transport, transfer_servers

T = TypeVar("T")
TIMEOUT_S = 300.0
"""How long one process waits for what another has to say."""
_LOOK_S = 0.5
"""How often who waits looks whether the others are still there."""
_ASKED = 4096
"""So many copies from other processes are known, to say which one is waited for."""


class Disagreement(ValueError):  # noqa: N818 - it says what differs
    """Processes were started or given something different."""


class _Asked(NamedTuple):
    """A copy that was asked for: the process, the row, and the array, as long as it lives."""

    process: int
    row: Row
    array: Callable[[], jax.Array | None]


class Carried(NamedTuple):
    """A copy of an array from one process to another, and what it is like there: its shape, type and place."""

    source: int
    target: int
    like: jax.ShapeDtypeStruct


@dataclass
class Hosts:
    """The process that this is among all that run a pipeline: `process` of `count`.

    `store` is what they tell one another through; every process asks the same things in the same order. `address` is
    that of this host for the others; by default that over which it reaches the first process. `names` are those of the
    hosts, by process, once they are connected; `link` is that between two of them, once it is measured. What is told on
    one `channel` does not wait for what is told on another.
    """

    process: int
    count: int
    store: Any
    timeout_s: float = TIMEOUT_S
    address: str | None = None
    names: Sequence[str] = ()
    link: Link | None = None
    transport: Transport | None = None
    channel: str = ""
    _told: int = field(default=0, repr=False)
    _key: str = field(default="", repr=False)
    _awaited: str = field(default="", repr=False)
    _asked: deque[_Asked] = field(default_factory=lambda: deque(maxlen=_ASKED), repr=False)
    _asides: dict[str, "Hosts"] = field(default_factory=dict, repr=False)

    def exchange(self, name: str, value: bytes) -> list[bytes]:
        """Tells all processes a value, and returns everybody's by process.

        Raises:
            HostLost: some process is gone, or said nothing for `timeout_s`.
        """
        if self.count == 1:
            return [value]
        self._told += 1
        key, before = f"jvpipe/{self.channel}{self._told}/{name}/", self._key
        self._key = f"{key}{self.process}"
        try:
            self.store.key_value_set(self._key, base64.b85encode(value).decode())
            told = [self._answer(f"{key}{other}", other, name) for other in range(self.count)]
            self._awaited = ""
            if before:  # all have read it
                self.store.key_value_delete(before)
        except HostLost:
            raise
        except Exception as error:
            reason = str(error).splitlines()[0]
            gone = self.gone(wait_s=_LOOK_S) or f"{self.named(0)} does not answer"
            raise HostLost(f"{gone}, go on from the last checkpoint: no {name} came: {reason}") from error
        return list(map(base64.b85decode, told))

    def aside(self, name: str) -> "Hosts":
        """The same processes on a channel of their own, for another thread; every call gives the same one.

        Args:
            name: of the channel.
        """
        fresh = {"_told": 0, "_key": "", "_awaited": "", "_asides": {}}
        return self._asides.setdefault(name, replace(self, channel=f"{self.channel}{name}/", **fresh))

    def _answer(self, key: str, process: int, name: str) -> str:
        """What a process tells under a key, as soon as it does."""
        self._awaited = f"the {name} of {self.named(process)}"
        until_s = time.monotonic() + self.timeout_s
        while True:
            left_s = until_s - time.monotonic()
            try:
                return self.store.blocking_key_value_get(key, max(1, round(1000 * min(_LOOK_S, left_s))))
            except Exception as error:
                if gone := self.gone():
                    raise HostLost(f"{gone}, go on from the last checkpoint: no {name} came") from error
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if left_s < _LOOK_S:
                    raise HostLost(f"{self.named(process)} has not told its {name} for {self.timeout_s:g} s") from error

    def named(self, process: int) -> str:
        """A process in words: its number, and its host if that is known."""
        return f"process {process}" + (f" (host {self.names[process]})" if self.names else "")

    def lost(self) -> list[int]:
        """The processes that are gone, once they are connected; asking does not wait."""
        return self.transport.lost() if self.transport else []

    def gone(self, wait_s: float = 0.0) -> str:
        """Says which processes are gone, and nothing if none is.

        Args:
            wait_s: how long to wait for that to be seen.
        """
        until_s = time.monotonic() + wait_s
        while not (lost := self.lost()) and time.monotonic() < until_s:
            time.sleep(0.01)
        are = "is" if len(lost) == 1 else "are"
        return f"{' and '.join(map(self.named, lost))} {are} gone" if lost else ""

    def awaited(self) -> str:
        """Says what of which process has not come, though it was asked for; nothing if all has."""
        if self._awaited:
            return self._awaited
        for process, row, array in tuple(self._asked):
            x = array()
            if x is not None and not x.is_deleted() and not _has_come(x):
                return f"stage {row.stage}, task {row} of {self.named(process)}"
        return ""

    def agree(self, name: str, parts: Sequence[tuple[str, str]]) -> None:
        """Makes sure that all processes have the same.

        Args:
            name: of what is compared.
            parts: what it consists of, each with its name; the first that differs is told.

        Raises:
            Disagreement: it differs between two processes.
        """
        lines = [f"{part}\t{digest(value)}\t{value[:80]!r}" for part, value in parts]
        mine = "\n".join(lines)
        for other, told in enumerate(self.exchange(name, mine.encode())):
            theirs = told.decode().split("\n")
            if theirs == lines:
                continue
            for (part, value), line in zip(parts, theirs, strict=False):
                their_part, their_digest, their_value = line.split("\t", 2)
                if (part, digest(value)) != (their_part, their_digest):
                    raise Disagreement(
                        f"{name} differ between processes: {part} is {value[:80]!r} in process {self.process} and "
                        f"{their_value} in process {other}"
                    )
            raise Disagreement(f"{name} differ between process {self.process} and process {other}")

    def together(self, name: str, act: Callable[[], T]) -> T:
        """Does what every process must succeed in; if one fails, all raise.

        Raises:
            MemoryLimitExceeded: a process cannot keep its limit; the largest that would do is told to all.
            Disagreement: what else another process failed with.
        """
        try:
            value, failure = act(), None
        except HostLost:  # who knows of one that is gone does not wait for it
            raise
        except Exception as error:
            value, failure = None, error
        told = enumerate(self.exchange(name, _told(failure)))
        failures = [_heard(self.named(other), line.decode()) for other, line in told if line and other != self.process]
        if failure is not None:
            failures.insert(0, failure)
        if failures:
            worst = max(failures, key=_limit_bytes)
            if worst is failure:
                raise worst
            raise worst from failure
        return cast(T, value)

    def first(self, name: str, act: Callable[[], T]) -> T | None:
        """Has the first process do something; the others wait, and get None."""
        return self.together(name, act if not self.process else lambda: None)

    def decided(self, name: str, act: Callable[[], str]) -> str:
        """What the first process decides, told to all."""
        decision = self.first(name, act)
        return self.exchange(name, (decision or "").encode())[0].decode()

    def offering(self, half: OfferRun) -> Callable[[jax.Array], tuple[()]]:
        """Makes what runs the source's half of a copy to another process."""
        transport = self.connected

        def offer(array: jax.Array) -> tuple[()]:
            transport.offer(half.process, half.number, array)
            return ()

        return offer

    def asking(self, half: AskRun, row: Row, like: jax.ShapeDtypeStruct) -> Callable[[], list[jax.Array]]:
        """Makes what runs the target's half of a copy from another process.

        Args:
            half: which copy.
            row: the whole of it.
            like: its shape, type and place.
        """
        transport = self.connected

        def ask() -> list[jax.Array]:
            array = transport.ask(half.process, half.number, like)
            self._asked.append(_Asked(half.process, row, ref(array)))
            return [array]

        return ask

    def gather(
        self,
        holders: Sequence[int],
        likes: Sequence[jax.ShapeDtypeStruct],
        arrays: Sequence[jax.Array | None],
    ) -> list[Any] | None:
        """Copies arrays of all processes to the host of the first one; the others get None.

        Args:
            holders: the process that each array lies with.
            likes: their shapes and types, and places of the first process over which they go.
            arrays: those of this process, and None.
        """
        transport = self.connected
        transport.begin()
        values: list[Any] | None = None
        if self.process:
            for number, (holder, array) in enumerate(zip(holders, arrays, strict=True)):
                if holder == self.process:
                    assert array is not None
                    transport.offer(0, number, array)
        else:
            values = []
            for number, (holder, like, array) in enumerate(zip(holders, likes, arrays, strict=True)):
                here = transport.ask(holder, number, like) if holder else array
                assert here is not None
                values.append(to_host(here))
        self.exchange("gathered", b"")  # what was offered has arrived: it may be overwritten
        return values

    def carry(self, copies: Sequence[Carried], arrays: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """Copies arrays between processes; each gets those that are for it, and None.

        Args:
            copies: those between all processes, which all tell alike.
            arrays: what is copied, those of this process, and None.
        """
        transport = self.connected
        transport.begin()
        here: list[jax.Array | None] = []
        for number, (copy, array) in enumerate(zip(copies, arrays, strict=True)):
            if copy.source == self.process:
                assert array is not None
                transport.offer(copy.target, number, array)
            asks = copy.target == self.process
            here.append(transport.ask(copy.source, number, copy.like) if asks else None)
        jax.block_until_ready(here)
        self.exchange("carried", b"")  # what was offered has arrived: it may be overwritten
        return here

    @property
    def connected(self) -> Transport:
        """What carries arrays between the processes."""
        assert self.transport is not None, "connect comes first"
        return self.transport

    def connect(self) -> None:
        """Starts this process's transfer server and learns of the others', unless that is done, or it is alone."""
        if self.count > 1 and self.transport is None:
            self.transport = transfer_servers(self.address or _jax.own_address(), self._publish)

    def _publish(self, server: str) -> dict[int, str]:
        """Tells the others a server's address and this host's name; returns theirs."""
        own = json.dumps([server, socket.gethostname()])
        told = [json.loads(x) for x in self.exchange("address", own.encode())]
        self.names = [name for _, name in told]
        return {i: other for i, (other, _) in enumerate(told) if i != self.process}


def together(hosts: Hosts | None, name: str, act: Callable[[], T]) -> T:
    """Does something; of several processes all must succeed in it.

    Args:
        hosts: the processes, if there are several.
        name: of what is done.
        act: does it here.
    """
    return hosts.together(name, act) if hosts else act()


def _has_come(array: jax.Array) -> bool:
    if not _jax.is_ready(array):
        return False
    try:
        array.block_until_ready()
    except Exception:
        return False
    return True


def _told(failure: Exception | None) -> bytes:
    """What a process tells the others of its failure: a limit that would do, and a line."""
    if failure is None:
        return b""
    named = isinstance(failure, (ValueError, MemoryLimitExceeded))
    return f"{_limit_bytes(failure)}\t{failure if named else f'{type(failure).__name__}: {failure}'}".encode()


def _heard(process: str, told: str) -> Exception:
    """What another process failed with."""
    limit_bytes, line = told.split("\t", 1)
    message = f"{process} says: {line}"
    return MemoryLimitExceeded(message, int(limit_bytes)) if int(limit_bytes) else Disagreement(message)


def _limit_bytes(failure: Exception) -> int:
    return failure.smallest_limit_bytes if isinstance(failure, MemoryLimitExceeded) else 0


def digest(text: str) -> str:
    """Tells texts apart."""
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


ALONE = Hosts(0, 1, None)
"""One process, which tells nobody anything."""


@cache
def present_hosts() -> Hosts | None:
    """The processes that `jax.distributed.initialize` has brought together; None if there is one alone."""
    process, count = _jax.process_of()
    return Hosts(process, count, _jax.coordination()) if count > 1 else None
