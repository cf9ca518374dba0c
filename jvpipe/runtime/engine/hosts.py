"""The processes that run one pipeline: their agreements, common decisions, and copies of arrays.

Each process usually runs on a host (a machine) of its own, so their class is called `Hosts`.
"""

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
"""Seconds of the first and of the longest sleep between two checks whether an array has come."""


class _Asked(NamedTuple):
    """A copy asked of another process: that process, the row, a weak reference to the result."""

    process: int
    row: Row
    array: Callable[[], jax.Array | None]


class Carried(NamedTuple):
    """A copy of an array between processes; `like` is its shape, type and place in `target`."""

    source: int
    target: int
    like: jax.ShapeDtypeStruct


@dataclass
class Hosts(Channel):
    """The present process, with its connections to all others that run the pipeline.

    `Channel` exchanges words and finds processes that are gone or silent. A pulse is a sign of life
    that each process sends all the time (`pulse.py`). A process is silent if its pulses stop.

    All processes must make these calls in the same order, because each waits for the same call of
    the others: `exchange`, `exchange_json`, `agree`, `together`, `first`, `decided`, `gather`,
    `carry`, `connect`. No other method waits for a call of another process.

    Args:
        link: the latency and bandwidth between two processes, once they are measured.
        farewell: tells the other processes that this one ends without an error.
    """

    link: Link | None = None
    farewell: Callable[[], None] = lambda: None
    # The newest copies from other processes. `awaited` looks here for the one that is late.
    _asked: deque[_Asked] = field(default_factory=lambda: deque(maxlen=4096), repr=False)
    _asides: dict[str, "Hosts"] = field(default_factory=dict, repr=False)

    def aside(self, name: str) -> "Hosts":
        """Returns the same processes on another channel, for the calls of another thread.

        Every call with the same name returns the same object.
        """
        # `replace` passes all fields on. A private field that belongs to one channel must get its
        # first value here. `_asked` is shared, because both channels copy by the same transport.
        fresh = {"_said": 0, "_key": "", "_read": "", "_awaited": "", "_asides": {}}
        aside = replace(self, channel=f"{self.channel}{name}/", **fresh)
        # If two threads call this at once, `setdefault` gives both the same object.
        return self._asides.setdefault(name, aside)

    def come(self, *arrays: jax.Array | None, pause_s: float = _BRIEFLY_S) -> None:
        """Waits until arrays have come or their computations have failed.

        Args:
            arrays: arrays that come from another process, or depend on one that does; None stands
                for an array of another process.
            pause_s: seconds between the first two checks. Each later pause is twice as long, up to
                a millisecond.

        Raises:
            HostLost: a process has been silent for too long.
        """
        # JAX itself would wait for a stopped process forever, so the arrays are checked repeatedly.
        for array in arrays:
            pause = pause_s
            while array is not None and not _jax.is_ready(array):
                self.check_silence()
                time.sleep(pause)
                pause = min(2 * pause, _BETWEEN_S)

    def check_silence(self) -> None:
        """Checks that the other processes are alive; every loop that waits for one calls this.

        Raises:
            HostLost: a process has been silent for too long, because it is stopped or its host
                cannot be reached.
        """
        if silent := self.silent(self.silent_s):
            awaited = self.awaited()
            waited = f": waited for {awaited}" if awaited else ""
            raise HostLost(f"{silent}, go on from the last checkpoint{waited}")

    def awaited(self) -> str:
        """Names what this process waits for, and from which process; empty if it does not wait."""
        if self._awaited:
            return self._awaited
        # The copies are in the order of asking, so this finds the oldest that has not come.
        for process, row, array in tuple(self._asked):
            x = array()
            if x is not None and not x.is_deleted() and not _has_come(x):
                stage = f"stage {row.stage}, " if row.stage >= 0 else ""
                return f"{stage}task {row} of {self.named(process)}"
        return ""

    def exchange_json(self, name: str, value: Any) -> list[Any]:
        """Calls `exchange` with a value that is written as JSON."""
        words = self.exchange(name, json.dumps(value).encode())
        return [json.loads(word) for word in words]

    def agree(self, name: str, parts: Sequence[tuple[str, str]]) -> None:
        """Checks that all processes have the same texts.

        The processes exchange digests of the texts. If digests differ, the processes also exchange
        their whole texts of the first part that differs. So the message can show a line that
        differs.

        Args:
            name: says in the message what is compared.
            parts: the name and the text of each part.

        Raises:
            Disagreement: a part differs between two processes; all processes raise it.
        """
        mine = [[part, digest(text)] for part, text in parts]
        digests = self.exchange_json(name, mine)
        if all(theirs == mine for theirs in digests):
            return
        # First the names of the parts must be equal. Otherwise the texts cannot be compared.
        names = [[part for part, _ in theirs] for theirs in digests]
        others = [i for i, theirs in enumerate(names) if theirs != names[self.process]]
        if others:
            raise Disagreement(
                f"{name} differ between process {self.process} and process {others[0]}"
            )
        # Every process now has the digests of all, so all find the same first part that differs.
        columns = zip(*digests, strict=True)
        counts = [len({of_text for _, of_text in column}) for column in columns]
        at = next(i for i, count in enumerate(counts) if count > 1)
        part, text = parts[at]
        texts = [word.decode() for word in self.exchange(f"{name}: {part}", text.encode())]
        other = next(i for i, theirs in enumerate(texts) if theirs != text)
        line, their_line = unlike(text, texts[other])
        raise Disagreement(
            f"{name} differ between processes: {part} is {line!r} in process "
            f"{self.process} and {their_line!r} in process {other}"
        )

    def together(self, name: str, act: Callable[[], T]) -> T:
        """Calls a function in every process; if it fails in one, all processes raise an error.

        Args:
            name: says in messages what is done.
            act: the function, in this process.

        Raises:
            MemoryLimitExceeded: some processes cannot keep their limits. All processes raise the
                error, with the largest limit that one of them needs.
            Disagreement: another process has failed in some other way.
            Exception: the error of `act`, if it has failed in this process in some other way.
        """
        value: T | None = None
        failure: Exception | None = None
        try:
            value = act()
        except (HostLost, Disagreement):
            # The others find these errors by themselves. After a lost process, no further call
            # could succeed.
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
        # The largest limit is enough for all processes. Failures of other kinds count as 0. Among
        # equal ones, `max` takes the first, which is this process's own.
        worst = max(failures, key=limit_bytes)
        if worst is failure:
            raise worst
        raise worst from failure

    def first(self, name: str, act: Callable[[], T]) -> T | None:
        """Calls a function in the first process; the others wait, and get None.

        Args:
            name: says in messages what is done.
            act: the function; only the first process calls it.
        """
        return self.together(name, (lambda: None) if self.process else act)

    def decided(self, name: str, act: Callable[[], str]) -> str:
        """Calls a function in the first process, and returns its result in all processes.

        Args:
            name: says in messages what is decided.
            act: the function; only the first process calls it.
        """
        decision = self.first(name, act)
        return self.exchange(name, (decision or "").encode())[0].decode()

    def offering(self, half: OfferRun) -> Callable[[jax.Array], tuple[()]]:
        """Returns a function that runs this process's half of a copy to another process."""
        transport = self.connected

        def offer(array: jax.Array) -> tuple[()]:
            transport.offer(half.number, array)
            return ()

        return offer

    def asking(
        self,
        half: AskRun,
        row: Row,
        like: jax.ShapeDtypeStruct,
    ) -> Callable[[], list[jax.Array]]:
        """Returns a function that runs this process's half of a copy from another process.

        Args:
            half: the other process, and the number of the copy.
            row: the row of the whole copy, for messages.
            like: the shape, type and place that the array will have here.
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
            holders: the process that has each array.
            likes: each array's shape and type, and a device of the first process to copy it to.
            arrays: the arrays; None for those that this process does not have.
        """
        self.connected.begin()
        here = zip(holders, likes, arrays, strict=True)
        if self.process:
            values = None
            for number, (holder, _, array) in enumerate(here):
                if holder == self.process:
                    assert array is not None
                    self.connected.offer(number, array)
        else:
            values = []
            for number, (holder, like, array) in enumerate(here):
                arrived = self.connected.ask(holder, number, like) if holder else array
                assert arrived is not None
                self.come(arrived)
                values.append(to_host(arrived))
        # No process goes on before all arrays have arrived. Otherwise it could overwrite an array
        # that the first process has not copied yet.
        self.exchange("gathered", b"")
        return values

    def carry(
        self,
        copies: Sequence[Carried],
        arrays: Sequence[jax.Array | None],
    ) -> list[jax.Array | None]:
        """Copies arrays between processes.

        Returns, for each copy, its array in this process; None if another process is its target.

        Args:
            copies: the copies between all processes; every process must give the same ones.
            arrays: the array of each copy; None if this process does not have it.
        """
        transport = self.connected
        transport.begin()
        here: list[jax.Array | None] = []
        for number, (copy, array) in enumerate(zip(copies, arrays, strict=True)):
            if copy.source == self.process:
                assert array is not None
                transport.offer(number, array)
            asks = copy.target == self.process
            here.append(transport.ask(copy.source, number, copy.like) if asks else None)
        self.come(*here)
        jax.block_until_ready(here)  # raises the error of a copy that has failed
        # As in `gather`, no process may overwrite an array before all arrays have arrived.
        self.exchange("carried", b"")
        return here

    @property
    def connected(self) -> Transport:
        """The transport of arrays between the processes."""
        assert self.transport is not None, "connect comes first"
        return self.transport

    def connect(self) -> None:
        """Starts this process's transfer server, from which the others copy arrays, and its pulses.

        All processes are then connected. Does nothing if this process is alone, or if the processes
        are connected already.
        """
        if self.count > 1 and self.transport is None:
            address = self.address or _jax.own_address()
            # The pulses are made first, because their address is sent together with the server's.
            self.pulses = Pulses(address)
            self.transport = transfer_servers(address, partial(self._publish, self.pulses))

    def _publish(self, pulses: Pulses, server: str) -> dict[int, str]:
        """Exchanges the addresses of servers and pulses, and the names of hosts; begins the pulses.

        Returns the addresses of the other processes' servers, by process.
        """
        words = self.exchange_json("address", [server, socket.gethostname(), pulses.own])
        self.names = [name for _, name, _ in words]
        others = {i: word for i, word in enumerate(words) if i != self.process}
        their_pulses = {i: Pulse(*pulse) for i, (_, _, pulse) in others.items()}
        pulses.begin(self.process, their_pulses)
        return {i: server for i, (server, _, _) in others.items()}


def together(hosts: Hosts | None, name: str, act: Callable[[], T]) -> T:
    """Calls a function in all processes; if it fails in one, all processes raise an error.

    Args:
        hosts: the processes, if there are several.
        name: says in messages what is done.
        act: the function, in this process.
    """
    return hosts.together(name, act) if hosts else act()


@contextmanager
def telling() -> Iterator[None]:
    """Reports an error inside the context, or in a decorated function, to the other processes.

    The others raise the error when they next wait for this process. Without the report they would
    wait forever.

    Raises:
        ValueError: this process was forked from one that has used JAX.
    """
    check_not_forked()
    try:
        yield
    except (HostLost, Disagreement):  # the others find these by themselves
        raise
    except Exception as failure:
        if hosts := present_hosts():
            hosts.fail(failure)
        raise


def _has_come(array: jax.Array) -> bool:
    """Tells whether an array has come; False also if its copy has failed."""
    if not _jax.is_ready(array):
        return False
    try:
        array.block_until_ready()
    except Exception:
        return False
    return True


ALONE = Hosts(0, 1, None)
"""The only process of a run, for calls that need a `Hosts`."""


@cache
def present_hosts() -> Hosts | None:
    """Returns the processes that `jax.distributed.initialize` has connected; None if alone."""
    process, count = _jax.process_of()
    return Hosts(process, count, _jax.coordination()) if count > 1 else None
