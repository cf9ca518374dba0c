"""What processes tell one another: numbered words in a store that the first process keeps for all.

Every process says its first, second, ... word under a key of its own, and reads those of all others
with the same number. So no word is missed or read twice, as long as all processes make the same
calls in the same order; each word carries the name of its call, so that a different call is noticed
instead of misread.

    process 0   jvpipe/1/0 = "plan ..."    jvpipe/2/0 = "limits ..."
    process 1   jvpipe/1/1 = "plan ..."    jvpipe/2/1 = "failure ..."      both raise what process 1 has failed with

A process deletes a word of its own when it says the next but one: by then it has heard the next
word of all others, which they say only after they have read that one.
"""

import base64
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from jvpipe.runtime.engine.disagreement import Disagreement, heard_failure, told_failure
from jvpipe.runtime.engine.failures import HostLost
from jvpipe.runtime.engine.pulse import Pulses
from jvpipe.runtime.engine.transport import Transport

LOOK_S = 0.5
"""How often a process that waits checks whether the others are still there."""
CLOSING_S = 1.0
"""How long it may take to see that a process is gone, once something of it has failed."""
FAILED = "failure"
"""The name under which a process says that it has failed, instead of what it was asked for."""


@dataclass
class Channel:
    """One of several processes, and what it hears of the others.

    Args:
        process: the number of this one.
        count: of all processes.
        store: holds what they tell one another.
        timeout_s: how long one waits for what another has to say.
        address: of this host for the others; by default that over which it reaches the first
            process.
        names: of the hosts, by process, once they are connected.
        transport: carries arrays between the processes, once they are connected; it also knows who
            has left.
        pulses: tell who is alive, once they are connected.
        silent_s: a process whose pulse is not heard for so long is lost; less than JAX waits
            before it ends all.
        channel: words on one channel do not wait for those on another.
    """

    process: int
    count: int
    store: Any
    timeout_s: float = 300.0
    address: str | None = None
    names: Sequence[str] = ()
    transport: Transport | None = None
    pulses: Pulses | None = None
    silent_s: float = 60.0
    channel: str = ""
    _said: int = field(default=0, repr=False)  # the number of the last word
    _key: str = field(default="", repr=False)  # of the last word
    _read: str = field(default="", repr=False)  # the key of a word that all others have read
    _awaited: str = field(default="", repr=False)  # what this process waits for, in words

    def exchange(self, name: str, value: bytes) -> list[bytes]:
        """Tells all processes a value, and returns everybody's by process.

        Args:
            name: of the call; all processes must make the same one.
            value: of this process.

        Raises:
            HostLost: some process is gone, or said nothing for `timeout_s`.
            Disagreement: another process has failed, or has something else to tell: it was called
                differently.
        """
        words = self._tell(name, value)
        for other, (at, line) in enumerate(words):
            if at == FAILED:
                raise Disagreement(str(heard_failure(self.named(other), line)))
        self._check_same_call(name, words)
        return [line for _, line in words]

    def _tell(self, name: str, value: bytes) -> list[tuple[str, bytes]]:
        """Tells all processes a value under a name.

        Returns the name and the value of each, by process.
        """
        if self.count == 1:
            return [(name, value)]
        before = self._key
        try:
            key = self._say(name, value)
            words = [
                (name, value) if other == self.process else self._heard(key, other, name)
                for other in range(self.count)
            ]
        except (HostLost, Disagreement):
            raise
        except Exception as error:
            # The store lies with the first process: if it fails, that one is probably gone.
            reason = str(error).splitlines()[0]
            gone = self.gone(wait_s=CLOSING_S) or f"{self.named(0)} does not answer"
            raise HostLost(
                f"{gone}, go on from the last checkpoint: no {name} came: {reason}"
            ) from error
        self._awaited = ""
        # All others have said this word, so they have read the one before: it may go with the next.
        self._read = before
        return words

    def _heard(self, key: str, process: int, name: str) -> tuple[str, bytes]:
        """Returns the name and the value that a process says, once it does.

        It must know of as many processes.
        """
        count, at, value = self._answer(f"{key}{process}", process, name).split("\t")
        if int(count) != self.count:
            raise Disagreement(
                f"process {self.process} is one of {self.count} processes and process {process} one of {count}: "
                "give jax.distributed.initialize the same num_processes in all"
            )
        return at, base64.b85decode(value)

    def _say(self, name: str, value: bytes) -> str:
        """Says the next word; returns what the keys of all processes begin with there."""
        self._said += 1
        key = f"jvpipe/{self.channel}{self._said}/"
        self._key, read, self._read = f"{key}{self.process}", self._read, ""

        def say() -> None:
            if read:
                self.store.key_value_delete(read)
            text = base64.b85encode(value).decode()
            self.store.key_value_set(self._key, f"{self.count}\t{name}\t{text}")

        self._bounded(say, name)
        return key

    def _bounded(self, say: Callable[[], None], name: str) -> None:
        """Calls the store in a thread of its own: if the first process is stopped, the call never returns."""
        outcome: Future[None] = Future()

        def run() -> None:
            try:
                outcome.set_result(say())
            except BaseException as error:  # raised below, in the thread that waits
                outcome.set_exception(error)

        threading.Thread(target=run, name="jvpipe-say", daemon=True).start()
        until_s = time.monotonic() + self.timeout_s
        while not wait([outcome], min(LOOK_S, self.timeout_s)).done:
            is_late = time.monotonic() > until_s
            lost = self.gone() or (is_late and self.silent(self.timeout_s / 2))
            if lost:
                raise HostLost(f"{lost}, go on from the last checkpoint: waited to tell {name!r}")
            if is_late:
                raise HostLost(f"{self.named(0)} has not heard {name!r} for {self.timeout_s:g} s")
        outcome.result()

    def _check_same_call(self, name: str, words: Sequence[tuple[str, bytes]]) -> None:
        """Raises Disagreement, as all processes then do, if one makes another call than this."""
        for other, (at, _) in enumerate(words):
            if at not in (name, FAILED):
                raise Disagreement(
                    f"{self.named(self.process)} tells its {name}, and {self.named(other)} its {at}: all processes "
                    "must make the same calls in the same order"
                )

    def fail(self, failure: Exception) -> None:
        """Tells the others that this process has failed, wherever they next wait for it.

        Waits for nobody.
        """
        if self.count > 1:
            self._say(FAILED, told_failure(failure))

    def _answer(self, key: str, process: int, name: str) -> str:
        """Returns what a process says under a key, once it does."""
        self._awaited = f"the {name} of {self.named(process)}"
        until_s = time.monotonic() + self.timeout_s
        while True:
            left_s = until_s - time.monotonic()
            # In short turns, because the store notices nothing of processes that have gone.
            turn_ms = max(1, round(1000 * min(LOOK_S, left_s)))
            try:
                return self.store.blocking_key_value_get(key, turn_ms)
            except Exception as error:
                if gone := self.gone():
                    raise HostLost(
                        f"{gone}, go on from the last checkpoint: no {name} came"
                    ) from error
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if left_s < LOOK_S:
                    raise self._timeout(process, name) from error

    def _timeout(self, process: int, name: str) -> HostLost:
        late = f"{self.named(process)} has not told its {name} for {self.timeout_s:g} s"
        silent = self.silent(self.timeout_s / 2)
        return HostLost(f"{silent}: {late}" if silent else late)

    def named(self, process: int) -> str:
        """Returns a process in words: its number, and its host if that is known."""
        return f"process {process}" + (f" (host {self.names[process]})" if self.names else "")

    def lost(self) -> list[int]:
        """Returns the processes that are gone, once they are connected; asking does not wait."""
        return self.transport.lost() if self.transport else []

    def gone(self, wait_s: float = 0.0) -> str:
        """Says which processes are gone or have been silent for too long, and nothing if none is.

        Args:
            wait_s: how long to wait for that to be seen.
        """
        until_s = time.monotonic() + wait_s
        lost = self.lost()
        while not lost and time.monotonic() < until_s:
            time.sleep(0.01)
            lost = self.lost()
        if not lost:
            return self.silent(self.silent_s)
        gone = f"{' and '.join(map(self.named, lost))} {'is' if len(lost) == 1 else 'are'} gone"
        # A process that is stopped is the cause: those that waited for it may have left before
        # anybody missed it.
        silent = self.silent(self.silent_s / 2, lost)
        return " and ".join(filter(None, [gone, silent]))

    def silent(self, seconds: float, gone: Sequence[int] = ()) -> str:
        """Says which processes were not heard of for so long, though they were before; nothing if all were.

        Args:
            seconds: how long.
            gone: processes that have left: of course they are silent.
        """
        if self.pulses is None:
            return ""
        others = set(range(self.count)) - {self.process, *gone}
        since_s = {other: self.pulses.silent_s(other) for other in others}
        silent = [other for other, s in since_s.items() if s > seconds]
        if not silent:
            return ""
        have = "has" if len(silent) == 1 else "have"
        least_s = min(since_s[other] for other in silent)
        return f"{' and '.join(map(self.named, silent))} {have} been silent for {least_s:.0f} s"
