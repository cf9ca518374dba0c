"""The channel on which processes exchange words: short messages, each with the name of a call.

The words lie in a store that the first process keeps for all. In its n-th call, each process writes
its n-th word under a key of its own, and reads the n-th words of all others. So no word is missed
or read twice if all processes make the same calls in the same order. If they do not, the names of
the calls differ, and an error is raised. A process that fails writes its failure as its next word
(`fail`). The others read it in their call of the same number, so the numbers of later calls agree.
Each column is one call. The keys are jvpipe/NUMBER/PROCESS, or jvpipe/CHANNEL/NUMBER/PROCESS on a
channel with a name:

    process 0   jvpipe/1/0 = "plan ..."    jvpipe/2/0 = "limits ..."
    process 1   jvpipe/1/1 = "plan ..."    jvpipe/2/1 = "failure ..."      both raise the failure

A process deletes its n-th word just before it writes word n + 2. By then it has read word n + 1 of
every other process. Each of them wrote its word n + 1 only after it had read all n-th words, so the
deleted word has been read by all. (A process whose n-th word is a failure reads no n-th words, but
it never needs them.)
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
from jvpipe.util.brief import first_line

LOOK_S = 0.5
"""Seconds after which a waiting process checks again whether the others are alive."""
CLOSING_S = 1.0
"""Seconds to wait, after an error, for signs that it was caused by the loss of another process."""
FAILED = "failure"
"""The name of a word that reports a failure. Any other word has the name of its call."""


@dataclass
class Channel:
    """One process's end of a channel.

    Args:
        process: the number of this process.
        count: the number of all processes.
        store: holds the words of all processes, by key.
        timeout_s: how long a process waits for the word of another one.
        address: the address at which others reach this host. By default, it is the address from
            which this host reaches the first process.
        names: the names of the hosts, by process, once they are connected.
        transport: carries arrays between the processes, once they are connected; it also notices
            processes that have left.
        pulses: signs of life of the processes, once they are connected.
        silent_s: after how many seconds without a pulse a process counts as lost. JAX ends all
            processes after a longer silence, so jvpipe's message comes first.
        channel: the name of the channel, with a slash at its end. Calls on one channel do not wait
            for those on another, so each thread can have its own.
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
    _said: int = field(default=0, repr=False)  # the number of this process's last word
    _key: str = field(default="", repr=False)  # the key of this process's last word
    # The key of the word before the last one, once all others have read it; `_say` deletes it.
    _read: str = field(default="", repr=False)
    # A text that says for which word this process waits; `Hosts.awaited` puts it into errors.
    _awaited: str = field(default="", repr=False)

    def exchange(self, name: str, value: bytes) -> list[bytes]:
        """Sends a value to all processes; returns the values of all in the order of processes.

        Args:
            name: the name of the call; all processes must make the same call.
            value: the value of this process.

        Raises:
            HostLost: a process is gone, or has sent no value within `timeout_s`.
            Disagreement: another process has failed, or makes a call with another name.
        """
        words = self._tell(name, value)
        for other, (at, line) in enumerate(words):
            if at == FAILED:
                raise Disagreement(str(heard_failure(self.named(other), line)))
        self._check_same_call(name, words)
        return [line for _, line in words]

    def _tell(self, name: str, value: bytes) -> list[tuple[str, bytes]]:
        """Sends a name and a value to all processes; returns the pairs of all, in their order."""
        if self.count == 1:
            return [(name, value)]
        before = self._key
        try:
            key = self._say(name, value)
            words: list[tuple[str, bytes]] = []
            for other in range(self.count):
                is_own = other == self.process
                words.append((name, value) if is_own else self._heard(key, other, name))
        except (HostLost, Disagreement):
            raise
        except Exception as error:
            # The first process keeps the store. If the store fails, that process is probably gone.
            gone = self.gone(wait_s=CLOSING_S) or f"{self.named(0)} does not answer"
            raise HostLost(
                f"{gone}, go on from the last checkpoint: no {name} came: {first_line(error)}"
            ) from error
        self._awaited = ""
        # All others have written their words of this call, so they no longer need this process's
        # word of the call before. The next call deletes that word.
        self._read = before
        return words

    def _heard(self, key: str, process: int, name: str) -> tuple[str, bytes]:
        """Waits for a process's word; returns its name and value.

        Raises Disagreement if the process was started with another number of processes.

        Args:
            key: the part of the word's key that all processes share.
            process: the process.
            name: the name of the call, for messages.
        """
        count, at, value = self._answer(f"{key}{process}", process, name).split("\t")
        if int(count) != self.count:
            raise Disagreement(
                f"process {self.process} is one of {self.count} processes and process "
                f"{process} one of {count}: give jax.distributed.initialize the same "
                "num_processes in all"
            )
        return at, base64.b85decode(value)

    def _say(self, name: str, value: bytes) -> str:
        """Writes this process's next word; returns the part of its key that all processes share."""
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
        """Calls the store, and waits for at most `timeout_s`.

        The call runs in another thread, because it never returns if process 0, which keeps the
        store, is stopped.
        """
        outcome: Future[None] = Future()

        def run() -> None:
            try:
                outcome.set_result(say())
            except BaseException as error:  # `outcome.result()` below raises it in this thread
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
        """Raises Disagreement in all processes if one of them makes a call with another name."""
        for other, (at, _) in enumerate(words):
            if at not in (name, FAILED):
                raise Disagreement(
                    f"{self.named(self.process)} tells its {name}, "
                    f"and {self.named(other)} its {at}: all processes must make the same "
                    "calls in the same order"
                )

    def fail(self, failure: Exception) -> None:
        """Tells the others that this process has failed, without waiting for them.

        Each of them learns this when it next waits for a word of this process.
        """
        if self.count > 1:
            self._say(FAILED, told_failure(failure))

    def _answer(self, key: str, process: int, name: str) -> str:
        """Waits for a process's word under a key, and returns it.

        Args:
            key: the key.
            process: the process.
            name: the name of the call, for messages.
        """
        self._awaited = f"the {name} of {self.named(process)}"
        until_s = time.monotonic() + self.timeout_s
        while True:
            left_s = until_s - time.monotonic()
            # The store does not notice that a process is gone. So each wait is short, and after
            # each one this process checks whether the others are there.
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
        """Makes the error for a process whose word has not come in time."""
        late = (
            f"{self.named(process)} has not told its {name} for {self.timeout_s:g} s: all "
            "processes must make the same calls, with equally many batches of the same shapes"
        )
        silent = self.silent(self.timeout_s / 2)
        return HostLost(f"{silent}: {late}" if silent else late)

    def named(self, process: int) -> str:
        """Returns a text for a process: its number, and its host's name if that is known."""
        return f"process {process}" + (f" (host {self.names[process]})" if self.names else "")

    def lost(self) -> list[int]:
        """Returns the processes that are gone, without waiting; empty before they are connected."""
        return self.transport.lost() if self.transport else []

    def gone(self, wait_s: float = 0.0) -> str:
        """Says which processes are gone or have been silent for too long; empty if none is.

        Args:
            wait_s: how long to wait until a process is seen to be gone.
        """
        until_s = time.monotonic() + wait_s
        lost = self.lost()
        while not lost and time.monotonic() < until_s:
            time.sleep(0.01)
            lost = self.lost()
        if not lost:
            return self.silent(self.silent_s)
        are = "is" if len(lost) == 1 else "are"
        gone = f"{' and '.join(map(self.named, lost))} {are} gone"
        # A process may have left because it found another process silent. The message also names
        # the silent process. The silence that this process has measured may still be a little
        # shorter than `silent_s`, so half of `silent_s` is enough.
        silent = self.silent(self.silent_s / 2, lost)
        return " and ".join(filter(None, [gone, silent]))

    def silent(self, seconds: float, gone: Sequence[int] = ()) -> str:
        """Says which processes have given no sign of life for a time; empty if there are none.

        A pulse is a sign of life that each process sends all the time. Some networks block pulses,
        so a process of which none has ever come is not named.

        Args:
            seconds: the time.
            gone: processes that have left, which are not named either.
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
