"""Processes that run one pipeline together: what they agree on before rows run, and how their arrays get across."""

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, cast

import jax

from jvpipe import _jax
from jvpipe._jax import Device
from jvpipe.ir.rows import AskRun, OfferRun
from jvpipe.runtime.checkpoints.checkpoint import to_host
from jvpipe.runtime.controller import HostLost
from jvpipe.runtime.tensors import MemoryLimitExceeded
from jvpipe.runtime.transport import Transport, transfer_servers

T = TypeVar("T")
TIMEOUT_S = 300.0
"""How long one process waits for what another has to say."""


class Disagreement(ValueError):  # noqa: N818 - it says what differs
    """Processes were started or given something different."""


@dataclass
class Hosts:
    """The process that this is among all that run a pipeline: `process` of `count`.

    `store` is what they tell one another through; every process asks the same things in the same order.
    """

    process: int
    count: int
    store: Any
    timeout_s: float = TIMEOUT_S
    transport: Transport | None = None
    _asked: int = field(default=0, repr=False)

    def exchange(self, name: str, value: bytes) -> list[bytes]:
        """Tells all processes a value, and returns everybody's by process.

        Raises:
            TimeoutError: some process said nothing for so long.
        """
        self._asked += 1
        key = f"jvpipe/{self._asked}/{name}"
        self.store.key_value_set(f"{key}/{self.process}", base64.b85encode(value).decode())
        values = []
        for other in range(self.count):
            try:
                told = self.store.blocking_key_value_get(f"{key}/{other}", round(self.timeout_s * 1000))
            except Exception as error:
                raise TimeoutError(
                    f"process {other} has not told its {name} for {self.timeout_s:g} s: {str(error).splitlines()[0]}"
                ) from error
            values.append(base64.b85decode(told))
        return values

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
        failures = [_heard(other, line.decode()) for other, line in told if line and other != self.process]
        if failure is not None:
            failures.append(failure)
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
        transport = self._connected()

        def offer(array: jax.Array) -> tuple[()]:
            transport.offer(half.process, half.number, array)
            return ()

        return offer

    def asking(self, half: AskRun, like: jax.ShapeDtypeStruct, device: Device) -> Callable[[], list[jax.Array]]:
        """Makes what runs the target's half of a copy from another process.

        Args:
            half: which copy.
            like: its shape and type.
            device: of this process, where it will lie.
        """
        transport = self._connected()
        return lambda: [transport.ask(half.process, half.number, like, device)]

    def _connected(self) -> Transport:
        assert self.transport is not None, "connect comes before rows are bound"
        return self.transport

    def gather(
        self,
        holders: Sequence[int],
        likes: Sequence[jax.ShapeDtypeStruct],
        arrays: Sequence[jax.Array | None],
        device: Device,
    ) -> list[Any] | None:
        """Copies arrays of all processes to the host of the first one; the others get None.

        Args:
            holders: the process that each array lies with.
            likes: their shapes and types.
            arrays: those of this process, and None.
            device: of this process, over which they go.
        """
        transport = self._connected()
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
                here = transport.ask(holder, number, like, device) if holder else array
                assert here is not None
                values.append(to_host(here))
        self.exchange("gathered", b"")  # what was offered has arrived: it may be overwritten
        return values

    def connect(self, address: str) -> None:
        """Starts this process's transfer server and learns of the others'."""

        def publish(own: str) -> dict[int, str]:
            return {i: told.decode() for i, told in enumerate(self.exchange("address", own.encode()))}

        self.transport = transfer_servers(address, publish)


def _told(failure: Exception | None) -> bytes:
    """What a process tells the others of its failure: a limit that would do, and a line."""
    if failure is None:
        return b""
    named = isinstance(failure, (ValueError, MemoryLimitExceeded))
    return f"{_limit_bytes(failure)}\t{failure if named else f'{type(failure).__name__}: {failure}'}".encode()


def _heard(process: int, told: str) -> Exception:
    """What another process failed with."""
    limit_bytes, line = told.split("\t", 1)
    message = f"process {process} says: {line}"
    return MemoryLimitExceeded(message, int(limit_bytes)) if int(limit_bytes) else Disagreement(message)


def _limit_bytes(failure: Exception) -> int:
    return failure.smallest_limit_bytes if isinstance(failure, MemoryLimitExceeded) else 0


def digest(text: str) -> str:
    """Tells texts apart."""
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


@cache
def present_hosts() -> Hosts | None:
    """The processes that `jax.distributed.initialize` has brought together; None if there is one alone."""
    if jax.process_count() == 1:
        return None
    hosts = Hosts(jax.process_index(), jax.process_count(), _jax.coordination())
    hosts.connect(_jax.own_address())
    return hosts
