"""Processes that run one pipeline together: what they agree on before rows run, and how their arrays get across."""

import json
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar, cast
from weakref import ref

import jax

from jvpipe import _jax
from jvpipe.cost.hardware import Link
from jvpipe.ir.rows import AskRun, OfferRun, Row
from jvpipe.runtime.engine.channel import FAILED, Channel
from jvpipe.runtime.engine.disagreement import (
    Disagreement,
    heard_failure,
    limit_bytes,
    told_failure,
    unlike,
)
from jvpipe.runtime.engine.failures import HostLost
from jvpipe.runtime.engine.forks import check_not_forked
from jvpipe.runtime.engine.pulse import Pulse, Pulses
from jvpipe.runtime.engine.transport import Transport, to_host, transfer_servers
from jvpipe.trace.digests import digest

T = TypeVar("T")
_BRIEFLY_S, _BETWEEN_S = 1e-5, 1e-3
"""How long a process that waits for an array sleeps before it checks again, at first and at most."""


class _Asked(NamedTuple):
    """A copy that was asked for: the process, the row, and the array, as long as it lives."""

    process: int
    row: Row
    array: Callable[[], jax.Array | None]


class Carried(NamedTuple):
    """A copy of an array from one process to another; `like` is its shape, type and place there."""

    source: int
    target: int
    like: jax.ShapeDtypeStruct


@dataclass
class Hosts(Channel):
    """The process that this is among all that run a pipeline.

    All ask the same things in the same order.

    Args:
        link: the link between two processes, once it is measured.
        farewell: tells the others that this process ends in order.
    """

    link: Link | None = None
    farewell: Callable[[], None] = lambda: None
    # The last copies from other processes, to say which one is waited for.
    _asked: deque[_Asked] = field(default_factory=lambda: deque(maxlen=4096), repr=False)
    _asides: dict[str, "Hosts"] = field(default_factory=dict, repr=False)

    def aside(self, name: str) -> "Hosts":
        """Returns the same processes on a channel of their own, for another thread.

        Every call gives the same one.

        Args:
            name: of the channel.
        """
        fresh = {"_said": 0, "_key": "", "_read": "", "_awaited": "", "_asides": {}}
        aside = replace(self, channel=f"{self.channel}{name}/", **fresh)
        # Two threads may ask at once: both get the one that came first.
        return self._asides.setdefault(name, aside)

    def come(self, array: jax.Array) -> None:
        """Waits for an array, which may have failed, as long as no process has been silent for too long.

        Args:
            array: that comes from other processes, or depends on what does.

        Raises:
            HostLost: names the process that is silent: it is stopped, or its host cannot be
                reached.
        """
        # It looks instead of blocking, since JAX itself would wait for a stopped process without an
        # end.
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
        # In the order of asking: the first that has not come is what all later ones wait for.
        for process, row, array in tuple(self._asked):
            x = array()
            if x is not None and not x.is_deleted() and not _has_come(x):
                stage = f"stage {row.stage}, " if row.stage >= 0 else ""
                return f"{stage}task {row} of {self.named(process)}"
        return ""

    def agree(self, name: str, parts: Sequence[tuple[str, str]]) -> None:
        """Checks that all processes have the same.

        Only digests are exchanged, unless a part differs: then all tell that part, to name the line
        that does.

        Args:
            name: of what is compared.
            parts: what it consists of, each with its name; the first that differs is told.

        Raises:
            Disagreement: it differs between two processes; all of them raise it.
        """
        mine = [[part, digest(text)] for part, text in parts]
        words = self.exchange(name, json.dumps(mine).encode())
        digests = [json.loads(word) for word in words]
        if all(theirs == mine for theirs in digests):
            return
        # First the names: parts of different names cannot be compared.
        names = [[part for part, _ in theirs] for theirs in digests]
        others = [i for i, theirs in enumerate(names) if theirs != names[self.process]]
        if others:
            raise Disagreement(
                f"{name} differ between process {self.process} and process {others[0]}"
            )
        # All processes find the same first part, since all compare the same digests.
        columns = zip(*digests, strict=True)
        at = next(i for i, column in enumerate(columns) if len({d for _, d in column}) > 1)
        part, text = parts[at]
        texts = [word.decode() for word in self.exchange(f"{name}: {part}", text.encode())]
        other = next(i for i, theirs in enumerate(texts) if theirs != text)
        line, their_line = unlike(text, texts[other])
        raise Disagreement(
            f"{name} differ between processes: {part} is {line!r} in process {self.process} and {their_line!r} in "
            f"process {other}"
        )

    def together(self, name: str, act: Callable[[], T]) -> T:
        """Does what every process must succeed in; if one fails, all raise.

        Args:
            name: of what is done.
            act: does it in this process.

        Raises:
            MemoryLimitExceeded: a process cannot keep its limit; the largest that would do is told
                to all.
            Disagreement: what else another process failed with.
        """
        value: T | None = None
        failure: Exception | None = None
        try:
            value = act()
        except (HostLost, Disagreement):
            # Nobody should wait for a process that is lost, and all processes raise by themselves
            # what differs.
            raise
        except Exception as error:
            failure = error
        words = self._tell(name if failure is None else FAILED, told_failure(failure))
        self._check_same_call(name, words)
        failures = [] if failure is None else [failure]
        for other, (at, line) in enumerate(words):
            if at == FAILED and other != self.process:
                failures.append(heard_failure(self.named(other), line))
        if not failures:
            return cast(T, value)
        # If all failures are of limits, the largest limit would do for everybody.
        worst = max(failures, key=limit_bytes)
        if worst is failure:
            raise worst
        raise worst from failure

    def first(self, name: str, act: Callable[[], T]) -> T | None:
        """Has the first process do something; the others wait, and get None."""
        return self.together(name, (lambda: None) if self.process else act)

    def decided(self, name: str, act: Callable[[], str]) -> str:
        """Returns what the first process decides, in all processes."""
        decision = self.first(name, act)
        return self.exchange(name, (decision or "").encode())[0].decode()

    def offering(self, half: OfferRun) -> Callable[[jax.Array], tuple[()]]:
        """Returns what runs the source's half of a copy to another process."""
        transport = self.connected

        def offer(array: jax.Array) -> tuple[()]:
            transport.offer(half.process, half.number, array)
            return ()

        return offer

    def asking(
        self, half: AskRun, row: Row, like: jax.ShapeDtypeStruct
    ) -> Callable[[], list[jax.Array]]:
        """Returns what runs the target's half of a copy from another process.

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
        self.connected.begin()
        here = zip(holders, likes, arrays, strict=True)
        if self.process:
            values = None
            for number, (holder, _, array) in enumerate(here):
                if holder == self.process:
                    assert array is not None
                    self.connected.offer(0, number, array)
        else:
            values = []
            for number, (holder, like, array) in enumerate(here):
                arrived = self.connected.ask(holder, number, like) if holder else array
                assert arrived is not None
                values.append(to_host(arrived))
        # Nobody goes on before all has arrived: what was offered may be overwritten from here on.
        self.exchange("gathered", b"")
        return values

    def carry(
        self, copies: Sequence[Carried], arrays: Sequence[jax.Array | None]
    ) -> list[jax.Array | None]:
        """Copies arrays between processes; each gets those that are for it, and None.

        Args:
            copies: those between all processes; every process gives the same.
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
        # From here on, offered arrays may be overwritten.
        self.exchange("carried", b"")
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
            # The pulses come first: their address is told together with the server's.
            self.pulses = Pulses(address)
            self.transport = transfer_servers(address, partial(self._publish, self.pulses))

    def _publish(self, pulses: Pulses, server: str) -> dict[int, str]:
        """Tells the others a server's address, this host's name and its pulse.

        Returns their servers' addresses.
        """
        mine = json.dumps([server, socket.gethostname(), pulses.own])
        words = [json.loads(word) for word in self.exchange("address", mine.encode())]
        self.names = [name for _, name, _ in words]
        others = {i: word for i, word in enumerate(words) if i != self.process}
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
    """Tells the other processes what fails in the block, or in the function that this decorates.

    They hear it where they next wait for this process, and raise it too, instead of waiting for
    ever.

    Raises:
        ValueError: this process was forked from one that has used JAX.
    """
    check_not_forked()
    try:
        yield
    except (HostLost, Disagreement):  # the others meet these by themselves
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
"""One process alone: it has nobody to tell anything."""


@cache
def present_hosts() -> Hosts | None:
    """Returns the processes that `jax.distributed.initialize` has brought together.

    Returns None if there is only one.
    """
    process, count = _jax.process_of()
    return Hosts(process, count, _jax.coordination()) if count > 1 else None
