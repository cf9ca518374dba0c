"""Processes that run one pipeline together: what they agree on before rows run, and how their arrays get across."""

import base64
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar, cast
from weakref import ref

import jax

from jvpipe import _jax
from jvpipe.cost.hardware import Link
from jvpipe.ir.rows import AskRun, OfferRun, Row
from jvpipe.runtime.checkpoints.checkpoint import to_host
from jvpipe.runtime.disagreement import (
    Disagreement,
    heard_failure,
    limit_bytes,
    told_failure,
    unlike,
)
from jvpipe.runtime.failures import HostLost
from jvpipe.runtime.forks import check_not_forked
from jvpipe.runtime.pulse import Pulse, Pulses
from jvpipe.runtime.transport import Transport, transfer_servers
from jvpipe.trace.digests import digest

T = TypeVar("T")
TIMEOUT_S = 300.0
"""How long one process waits for what another has to say."""
SILENT_S = 60.0
"""How long a process may be silent before it is lost: less than JAX waits before it ends all."""
_LOOK_S = 0.5
"""How often who waits looks whether the others are still there."""
_BRIEFLY_S, _BETWEEN_S = 1e-5, 1e-3
"""How long who waits for an array sleeps before it looks again, at first and at most."""
_ASKED = 4096
"""So many copies from other processes are known, to say which one is waited for."""
_FAILED = "failure"
"""What a process tells instead of what it was asked for."""


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
    hosts, by process, once they are connected; `link` is that between two of them, once it is measured. A process whose
    pulse is not heard for `silent_s` is lost. `farewell` tells the others that this one ends in order. What is told on
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
    pulses: Pulses | None = None
    silent_s: float = SILENT_S
    farewell: Callable[[], None] = lambda: None
    channel: str = ""
    _told: int = field(default=0, repr=False)
    _key: str = field(default="", repr=False)
    _read: str = field(default="", repr=False)
    _awaited: str = field(default="", repr=False)
    _asked: deque[_Asked] = field(default_factory=lambda: deque(maxlen=_ASKED), repr=False)
    _asides: dict[str, "Hosts"] = field(default_factory=dict, repr=False)

    def exchange(self, name: str, value: bytes) -> list[bytes]:
        """Tells all processes a value, and returns everybody's by process.

        Raises:
            HostLost: some process is gone, or said nothing for `timeout_s`.
            Disagreement: another process has failed, or has something else to tell: it was called differently.
        """
        told = self._tell(name, value)
        for other, (at, line) in enumerate(told):
            if at == _FAILED:
                raise Disagreement(str(heard_failure(self.named(other), line)))
        self._check_same_call(name, told)
        return [line for _, line in told]

    def _tell(self, name: str, value: bytes) -> list[tuple[str, bytes]]:
        """Tells all processes a value under a name; returns the name and the value of each, by process."""
        if self.count == 1:
            return [(name, value)]
        before = self._key
        try:
            key = self._say(name, value)
            others = [other for other in range(self.count) if other != self.process]
            told = {other: self._heard(key, other, name) for other in others}
            self._awaited = ""
            self._read = before
        except (HostLost, Disagreement):
            raise
        except Exception as error:
            reason = str(error).splitlines()[0]
            gone = self.gone(wait_s=_LOOK_S) or f"{self.named(0)} does not answer"
            raise HostLost(
                f"{gone}, go on from the last checkpoint: no {name} came: {reason}"
            ) from error
        return [told.get(process, (name, value)) for process in range(self.count)]

    def _heard(self, key: str, process: int, name: str) -> tuple[str, bytes]:
        """The name and the value that a process tells, as soon as it does; it must know of as many processes."""
        count, at, value = self._answer(f"{key}{process}", process, name).split("\t")
        if int(count) != self.count:
            raise Disagreement(
                f"process {self.process} is one of {self.count} processes and process {process} one of {count}: "
                "give jax.distributed.initialize the same num_processes in all"
            )
        return at, base64.b85decode(value)

    def _say(self, name: str, value: bytes) -> str:
        """Says something under the next number; returns what the keys of all processes begin with there."""
        self._told += 1
        key = f"jvpipe/{self.channel}{self._told}/"
        self._key, read, self._read = f"{key}{self.process}", self._read, ""

        def say() -> None:
            if read:
                self.store.key_value_delete(read)
            told = base64.b85encode(value).decode()
            self.store.key_value_set(self._key, f"{self.count}\t{name}\t{told}")

        self._bounded(say, name)
        return key

    def _bounded(self, say: Callable[[], None], name: str) -> None:
        """Tells the first process something, which keeps it for all; if that is stopped the store waits for ever."""
        said: Future[None] = Future()

        def run() -> None:
            try:
                said.set_result(say())
            except BaseException as error:  # raised below, in the thread that waits
                said.set_exception(error)

        threading.Thread(target=run, name="jvpipe-say", daemon=True).start()
        until_s = time.monotonic() + self.timeout_s
        while not wait([said], min(_LOOK_S, self.timeout_s)).done:
            late = time.monotonic() > until_s
            if lost := self.gone() or (late and self.silent(self.timeout_s / 2)):
                raise HostLost(f"{lost}, go on from the last checkpoint: waited to tell {name!r}")
            if late:
                raise HostLost(f"{self.named(0)} has not heard {name!r} for {self.timeout_s:g} s")
        said.result()

    def _check_same_call(self, name: str, told: Sequence[tuple[str, bytes]]) -> None:
        """Raises Disagreement, as all processes then do, if one is at something else than this."""
        for other, (at, _) in enumerate(told):
            if at not in (name, _FAILED):
                raise Disagreement(
                    f"{self.named(self.process)} tells its {name}, and {self.named(other)} its {at}: all processes "
                    "must make the same calls in the same order"
                )

    def fail(self, failure: Exception) -> None:
        """Tells the others that this process has failed, wherever they next wait for it; waits for nobody."""
        if self.count > 1:
            self._say(_FAILED, told_failure(failure))

    def aside(self, name: str) -> "Hosts":
        """The same processes on a channel of their own, for another thread; every call gives the same one.

        Args:
            name: of the channel.
        """
        fresh = {"_told": 0, "_key": "", "_read": "", "_awaited": "", "_asides": {}}
        return self._asides.setdefault(
            name, replace(self, channel=f"{self.channel}{name}/", **fresh)
        )

    def _answer(self, key: str, process: int, name: str) -> str:
        """What a process tells under a key, as soon as it does."""
        self._awaited = f"the {name} of {self.named(process)}"
        until_s = time.monotonic() + self.timeout_s
        while True:
            left_s = until_s - time.monotonic()
            try:
                return self.store.blocking_key_value_get(
                    key, max(1, round(1000 * min(_LOOK_S, left_s)))
                )
            except Exception as error:
                if gone := self.gone():
                    raise HostLost(
                        f"{gone}, go on from the last checkpoint: no {name} came"
                    ) from error
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if left_s < _LOOK_S:
                    silent = self.silent(self.timeout_s / 2)
                    told = f"{self.named(process)} has not told its {name} for {self.timeout_s:g} s"
                    raise HostLost(f"{silent}: {told}" if silent else told) from error

    def named(self, process: int) -> str:
        """A process in words: its number, and its host if that is known."""
        return f"process {process}" + (f" (host {self.names[process]})" if self.names else "")

    def lost(self) -> list[int]:
        """The processes that are gone, once they are connected; asking does not wait."""
        return self.transport.lost() if self.transport else []

    def gone(self, wait_s: float = 0.0) -> str:
        """Says which processes are gone or have been silent for too long, and nothing if none is.

        Args:
            wait_s: how long to wait for that to be seen.
        """
        until_s = time.monotonic() + wait_s
        while not (lost := self.lost()) and time.monotonic() < until_s:
            time.sleep(0.01)
        if not lost:
            return self.silent(self.silent_s)
        gone = f"{' and '.join(map(self.named, lost))} {'is' if len(lost) == 1 else 'are'} gone"
        # who has left may have waited for who is stopped, and have said so first
        return " and ".join(filter(None, [gone, self.silent(self.silent_s / 2, lost)]))

    def silent(self, seconds: float, known: Sequence[int] = ()) -> str:
        """Says which processes were not heard of for so long, though they were before; nothing if all were.

        Args:
            seconds: how long.
            known: processes that are gone, as is known.
        """
        if self.pulses is None:
            return ""
        others = set(range(self.count)) - {self.process, *known}
        since_s = {other: self.pulses.silent_s(other) for other in others}
        silent = [other for other, s in since_s.items() if s > seconds]
        if not silent:
            return ""
        have = "has" if len(silent) == 1 else "have"
        least_s = min(since_s[other] for other in silent)
        return f"{' and '.join(map(self.named, silent))} {have} been silent for {least_s:.0f} s"

    def come(self, array: jax.Array) -> None:
        """Waits for an array, that may have failed, as long as no process has been silent for too long.

        Args:
            array: that comes from other processes, or depends on what does.

        Raises:
            HostLost: names who is silent: it is stopped, or its host cannot be reached.
        """
        pause_s = _BRIEFLY_S
        while not _jax.is_ready(array):
            if silent := self.silent(self.silent_s):
                awaited = self.awaited()
                waited = f": waited for {awaited}" if awaited else ""
                raise HostLost(f"{silent}, go on from the last checkpoint{waited}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _BETWEEN_S)

    def awaited(self) -> str:
        """Says what of which process has not come, though it was asked for; nothing if all has."""
        if self._awaited:
            return self._awaited
        for process, row, array in tuple(self._asked):
            x = array()
            if x is not None and not x.is_deleted() and not _has_come(x):
                stage = f"stage {row.stage}, " if row.stage >= 0 else ""
                return f"{stage}task {row} of {self.named(process)}"
        return ""

    def agree(self, name: str, parts: Sequence[tuple[str, str]]) -> None:
        """Makes sure that all processes have the same.

        Only digests are told, unless a part differs: then all tell that part, to name the line of it that does.

        Args:
            name: of what is compared.
            parts: what it consists of, each with its name; the first that differs is told.

        Raises:
            Disagreement: it differs between two processes; all of them raise it.
        """
        mine = [[part, digest(text)] for part, text in parts]
        every = [json.loads(told) for told in self.exchange(name, json.dumps(mine).encode())]
        if all(each == mine for each in every):
            return
        named = [[part for part, _ in each] for each in every]
        if others := [i for i, each in enumerate(named) if each != named[self.process]]:
            raise Disagreement(
                f"{name} differ between process {self.process} and process {others[0]}"
            )
        at = next(i for i in range(len(parts)) if len({each[i][1] for each in every}) > 1)
        part, text = parts[at]
        texts = [told.decode() for told in self.exchange(f"{name}: {part}", text.encode())]
        other = next(i for i, each in enumerate(texts) if each != text)
        own, their = unlike(text, texts[other])
        raise Disagreement(
            f"{name} differ between processes: {part} is {own!r} in process {self.process} and {their!r} in process "
            f"{other}"
        )

    def together(self, name: str, act: Callable[[], T]) -> T:
        """Does what every process must succeed in; if one fails, all raise.

        Raises:
            MemoryLimitExceeded: a process cannot keep its limit; the largest that would do is told to all.
            Disagreement: what else another process failed with.
        """
        try:
            value, failure = act(), None
        except (
            HostLost,
            Disagreement,
        ):  # who is gone is not waited for, and of what differs all know
            raise
        except Exception as error:
            value, failure = None, error
        told = self._tell(name if failure is None else _FAILED, told_failure(failure))
        self._check_same_call(name, told)
        others = [
            (other, line)
            for other, (at, line) in enumerate(told)
            if at == _FAILED and other != self.process
        ]
        failures = [heard_failure(self.named(other), line) for other, line in others]
        if failure is not None:
            failures.insert(0, failure)
        if failures:
            worst = max(failures, key=limit_bytes)
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

    def asking(
        self, half: AskRun, row: Row, like: jax.ShapeDtypeStruct
    ) -> Callable[[], list[jax.Array]]:
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
            for number, (holder, like, array) in enumerate(
                zip(holders, likes, arrays, strict=True)
            ):
                here = transport.ask(holder, number, like) if holder else array
                assert here is not None
                values.append(to_host(here))
        self.exchange("gathered", b"")  # what was offered has arrived: it may be overwritten
        return values

    def carry(
        self, copies: Sequence[Carried], arrays: Sequence[jax.Array | None]
    ) -> list[jax.Array | None]:
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
            address = self.address or _jax.own_address()
            self.pulses = Pulses(address)
            self.transport = transfer_servers(address, partial(self._publish, self.pulses))

    def _publish(self, pulses: Pulses, server: str) -> dict[int, str]:
        """Tells the others a server's address, this host's name and its pulse; returns their servers' addresses."""
        own = json.dumps([server, socket.gethostname(), pulses.own])
        told = [json.loads(x) for x in self.exchange("address", own.encode())]
        self.names = [name for _, name, _ in told]
        others = {i: each for i, each in enumerate(told) if i != self.process}
        pulses.begin(self.process, {i: Pulse(*pulse) for i, (_, _, pulse) in others.items()})
        return {i: server for i, (server, _, _) in others.items()}


def together(hosts: Hosts | None, name: str, act: Callable[[], T]) -> T:
    """Does something; of several processes all must succeed in it.

    Args:
        hosts: the processes, if there are several.
        name: of what is done.
        act: does it here.
    """
    return hosts.together(name, act) if hosts else act()


@contextmanager
def telling() -> Iterator[None]:
    """Has the other processes hear of what fails in the block, or in the function that this decorates.

    They hear it where they next wait for this process, and raise it too, instead of waiting in vain.

    Raises:
        ValueError: this process was forked from one that has used JAX.
    """
    check_not_forked()
    try:
        yield
    except (HostLost, Disagreement):  # all know of these
        raise
    except Exception as failure:
        if hosts := present_hosts():
            hosts.fail(failure)
        raise


def _has_come(array: jax.Array) -> bool:
    if not _jax.is_ready(array):
        return False
    try:
        array.block_until_ready()
    except Exception:
        return False
    return True


ALONE = Hosts(0, 1, None)
"""One process, which tells nobody anything."""


@cache
def present_hosts() -> Hosts | None:
    """The processes that `jax.distributed.initialize` has brought together; None if there is one alone."""
    process, count = _jax.process_of()
    return Hosts(process, count, _jax.coordination()) if count > 1 else None
