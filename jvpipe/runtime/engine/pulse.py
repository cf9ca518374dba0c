"""The pulse of processes: each tells the others now and then that it is alive, whatever it is waiting for."""

import secrets
import socket
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

BEAT_S = 0.25
"""How often a process tells that it is alive."""
_WORD_BYTES = 64
"""The most bytes of a datagram that are read: more than a word and the number of a process."""


class Pulse(NamedTuple):
    """The address at which a process hears of the others, and the word that they must say, which no stranger knows."""

    host: str
    port: int
    word: str


class Pulses:
    """The pulses of several processes, as datagrams that each sends to all others.

    They tell a process that is stopped or cut off from one that only waits: this one still has a
    pulse. A process that was never heard is not missed, because a network may let no datagrams
    through.

    Args:
        address: of this host on the network of the processes.
    """

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self.own = Pulse(address, self._socket.getsockname()[1], secrets.token_hex(8))
        self._heard_s: dict[int, float] = {}

    def begin(self, process: int, others: Mapping[int, Pulse]) -> None:
        """Tells the others from here on, and hears of them.

        Args:
            process: the number of this one.
            others: the pulses of the others, by process.
        """
        for act in (partial(self._tell, process, others), partial(self._hear, set(others))):
            threading.Thread(target=act, name="jvpipe-pulse", daemon=True).start()

    def silent_s(self, process: int) -> float:
        """Returns the seconds since a process was last heard of; 0 if it never was."""
        heard_s = self._heard_s.get(process)
        return 0.0 if heard_s is None else time.monotonic() - heard_s

    def _tell(self, process: int, others: Mapping[int, Pulse]) -> None:
        while True:
            for other in others.values():
                try:
                    self._socket.sendto(f"{other.word} {process}".encode(), other[:2])
                except OSError:  # a process that is gone is noticed elsewhere
                    continue
            time.sleep(BEAT_S)

    def _hear(self, others: set[int]) -> None:
        senders = {f"{self.own.word} {other}".encode(): other for other in others}
        while True:
            try:
                word = self._socket.recv(_WORD_BYTES)
            except OSError:  # told late that an earlier datagram of ours had nowhere to go
                continue
            if word in senders:
                self._heard_s[senders[word]] = time.monotonic()
